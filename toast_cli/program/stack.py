"""Finds a program's stack of equal layers, scanned or unrolled, and says which ops and arrays are those of the layers,
and which belong to an end of the stack.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from toast_cli.base.errors import UsageError
from toast_cli.program.model import Program, once
from toast_cli.program.ops import CARRY, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE
from toast_cli.program.roles import INPUTS, WEIGHTS, argument_roles

LAYERS, FIRST, LAST = "layers", "first", "last"  # the stack, and what its two ends add to the stages there


@dataclass(frozen=True)
class Stack:
    """A stack of equal layers with its backward pass.

    Attributes:
        ops: those of the layers. scanned: they are in loops, else there are equal ops for each layer.
        weights: the layers', each with the number of its layer; -1 if it holds all. shapes: of arrays of them, their
        gradients and moments, each with the dimension that has a row for each layer; -1 if it has none.
        handed: values that a layer hands to the next one. kept: values that wait for the backward pass.
        loop: the loop over microbatches around the stack, -1 without one.
    """

    program: Program
    layers: int
    ops: frozenset[int]
    scanned: bool
    weights: Mapping[int, int]
    shapes: Mapping[tuple[int, ...], int]
    handed: tuple[int, ...]
    kept: frozenset[int]
    loop: int = -1

    def owner(self, shapes: set[tuple[int, ...]]) -> str:
        """The place of the weights that have one of these shapes."""
        return LAYERS if shapes & self.shapes.keys() else LAST if shapes & self.last_shapes else FIRST

    @cached_property
    def ends(self) -> tuple[int, int]:
        """The first and the last of the layers' products."""
        products = [n for n in self.ops if self.program.ops[n].kind.heavy]
        return min(products), max(products)

    def end_of(self, op: int) -> str:
        """The end of the stack that an op outside of the layers belongs to."""
        return LAST if self.ends[0] < op < self.ends[1] else FIRST

    @cached_property
    def kinds(self) -> dict[int, str]:
        """Value of an argument -> "weight", "state" or "input"."""
        return dict(_arguments(self.program))

    @cached_property
    def _others(self) -> list[int]:
        """Weights that are not the layers'."""
        return [v for v, kind in self.kinds.items() if kind == "weight" and v not in self.weights]

    @cached_property
    def weight_shapes(self) -> frozenset[tuple[int, ...]]:
        return frozenset([*self.shapes, *(self.program.values[v].shape for v in self._others)])

    @cached_property
    def last_shapes(self) -> frozenset[tuple[int, ...]]:
        """Shapes of weights that are first read behind the first layers: of the head."""
        firsts = {v: _first_use(self.program, v) for v in self._others}
        return frozenset(self.program.values[v].shape for v, reader in firsts.items() if reader > self.ends[0])

    @cached_property
    def repeated(self) -> frozenset[int]:
        """The ops that run for each microbatch; without a loop over microbatches all of them."""
        loops = self.program.loops
        if self.loop < 0:
            return frozenset(range(len(self.program.ops)))
        return frozenset(range(loops[self.loop].first, loops[self.loop].last))

    @property
    def microbatches(self) -> int:
        return int(self.program.loops[self.loop].trips) if self.loop >= 0 else 1


def find_stack(program: Program) -> Stack:
    """The stack with the most weights. Raises UsageError if there is none with a backward pass."""
    stacks = [stack for stack in (_scanned(program), _unrolled(program)) if stack is not None]
    if not stacks:
        hint = "stages need a training step that scans over layers, or whose weights' paths number the layers"
        reason = "the program has no stack of equal layers with a backward pass"
        raise UsageError(reason, where="--pipeline", hint=hint)
    return max(stacks, key=lambda stack: sum(program.values[v].bytes for v in stack.weights))


def _scanned(program: Program) -> Stack | None:
    """The stack of loops that read a row of stacked weights in each trip."""
    shapes_of: dict[int, dict[tuple[int, ...], int]] = defaultdict(dict)  # weight -> shapes in which it is stacked
    loops_of: dict[int, set[int]] = defaultdict(set)
    for weight, kind in _arguments(program):
        for path, number in _readers(program, weight) if kind == "weight" else ():
            op, shape = program.ops[number], program.values[path[-1]].shape
            if op.name == DYNAMIC_SLICE and op.loop >= 0:
                row, trips = program.values[op.results[0]].shape, program.loops[op.loop].trips
                dims = [d for d, (n, m) in enumerate(zip(shape, row, strict=True)) if n != m]
                if trips > 1 and [shape[d] for d in dims] == [trips]:
                    loops_of[weight].add(op.loop)
                    shapes_of[weight] |= dict(_dimensions(program, path, dims[0]))
    weights_of: dict[int, set[int]] = defaultdict(set)  # the forward loop -> weights
    for weight, readers in loops_of.items():
        weights_of[min(readers, key=lambda loop: program.loops[loop].first)].add(weight)
    if not weights_of:
        return None
    weights = max(weights_of.values(), key=lambda stack: sum(program.values[v].bytes for v in stack))
    loops = sorted(
        {loop for weight in weights for loop in loops_of[weight]}, key=lambda loop: program.loops[loop].first
    )
    shapes = {shape: dim for weight in weights for shape, dim in shapes_of[weight].items()}
    ops = frozenset(n for loop in loops for n in range(program.loops[loop].first, program.loops[loop].last))
    if len(loops) < 2 or not any(program.ops[n].kind.heavy for n in ops):  # no backward pass, or no products
        return None
    carries = [n for n in ops if program.ops[n].name == CARRY and program.ops[n].loop == loops[0]]
    written = {n: program.ops[program.producer[program.ops[n].operands[1]]].name for n in carries}
    values = {n: program.values[program.ops[n].results[0]] for n in carries}
    stacks = {values[n].shape for n in carries if written[n] == DYNAMIC_UPDATE_SLICE} - shapes.keys()
    handed = tuple(
        program.ops[n].results[0] for n in carries if written[n] != DYNAMIC_UPDATE_SLICE and len(values[n].shape) > 1
    )
    outer, layers = program.loops[loops[0]].parent, int(program.loops[loops[0]].trips)
    first = program.loops[outer].first if outer >= 0 else 0
    kept = frozenset(
        n for n, value in enumerate(program.values) if value.shape in stacks and program.producer[n] >= first
    )
    return Stack(program, layers, ops, True, dict.fromkeys(weights, -1), shapes, handed, kept, outer)


def _unrolled(program: Program) -> Stack | None:
    """The stack of ops that occur for each layer, where paths of weights number the layers."""
    families: dict[tuple[str, object], dict[int, int]] = defaultdict(dict)  # path without a number, type -> weights
    paths = {argument.value: argument.path for argument in program.arguments}
    for weight, kind in _arguments(program):
        for matched in re.finditer(r"\d+", paths[weight]) if kind == "weight" else ():
            path = f"{paths[weight][: matched.start()]}*{paths[weight][matched.end() :]}"
            families[path, program.values[weight]][int(matched[0])] = weight
    sizes: Counter[int] = Counter()
    for family in families.values():
        sizes[len(family)] += sum(program.values[v].bytes for v in family.values())
    layers = max((n for n in sizes if n > 1), key=lambda n: sizes[n], default=0)
    rows = [family for family in families.values() if sorted(family) == list(range(layers))]
    if not rows:
        return None
    signatures = [(op.name, op.rule, op.detail, tuple(program.values[v] for v in op.results)) for op in program.ops]
    counts = Counter(signatures)
    ops = frozenset(n for n, signature in enumerate(signatures) if counts[signature] >= layers)
    reads = [[_first_use(program, family[k]) for family in rows] for k in range(layers)]
    in_order = all(max(numbers) < min(following) for numbers, following in pairwise(reads))
    if not in_order or not any(program.ops[n].kind.heavy for n in ops):
        return None
    starts = [min(numbers) for numbers in reads]
    dependent, begin = dependent_values(program), starts[layers // 2]
    length = begin - starts[layers // 2 - 1]
    crossing = [
        v
        for n in range(begin - length, begin)
        for v in program.ops[n].results
        if v in dependent and any(begin <= user < begin + length for user, _ in program.users[v])
    ]
    handed = sorted(crossing, key=lambda v: program.values[v].bytes)[-1:]
    # What is read long after the ops of its layer waits for the backward pass.
    waiting = (v for n in ops for v in program.ops[n].results if any(u > n + 2 * length for u, _ in program.users[v]))
    weights = {v: layer for family in rows for layer, v in family.items()}
    shapes = dict.fromkeys((program.values[v].shape for v in weights), -1)
    outer, kept = program.ops[begin].loop, dependent.intersection(waiting)
    return Stack(program, layers, ops, False, weights, shapes, tuple(handed), kept, outer)


def _arguments(program: Program) -> Iterator[tuple[int, str]]:
    """(value, "weight", "state" or "input") of each argument."""
    words = {WEIGHTS: "weight", INPUTS: "input"}
    names, roles = argument_roles(program)
    for argument, role in zip(program.arguments, roles, strict=True):
        yield argument.value, words.get(names[role], "state")


def _readers(program: Program, weight: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """The ops that read a weight, or what is made of weights alone (`1 + scale`), and depend on an input or take a row.
    Each has the path of what it reads: the weight, then what is made of it. An optimizer's weight decay depends on no
    input."""
    dependent = dependent_values(program)
    waiting: list[tuple[int, ...]] = [(weight,)]
    seen = {weight}
    while waiting:
        path = waiting.pop()
        for number, _ in program.users[path[-1]]:
            op = program.ops[number]
            if op.name == DYNAMIC_SLICE or not dependent.isdisjoint(op.results):
                yield path, number
            else:
                waiting += [(*path, value) for value in op.results if value not in seen]
                seen.update(op.results)


def _first_use(program: Program, weight: int) -> int:
    """The first op that reads a weight, see `_readers`; -1 for none. It is in the forward pass."""
    return min((number for _, number in _readers(program, weight)), default=-1)


def _dimensions(program: Program, path: tuple[int, ...], dim: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """(shape, dimension) of the values of a path from the last to the first: where a dimension of the last is."""
    yield program.values[path[-1]].shape, dim
    for before, value in pairwise(reversed(path)):
        op = program.ops[program.producer[before]]
        factors = op.rule.results[op.results.index(before)][dim]
        dims = [
            d for d, names in enumerate(op.rule.operands[op.operands.index(value)]) if names and names[0] in factors
        ]
        if not dims:
            return
        (dim, *_) = dims
        yield program.values[value].shape, dim


@once
def dependent_values(program: Program) -> frozenset[int]:
    """The values that depend on an input."""
    waiting = [value for value, kind in _arguments(program) if kind == "input"]
    dependent = set(waiting)
    while waiting:
        for number, _ in program.users[waiting.pop()]:
            new = [v for v in program.ops[number].results if v not in dependent]
            dependent.update(new)
            waiting += new
    return frozenset(dependent)
