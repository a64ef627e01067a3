"""Dimensions that a mesh does not divide, such as 150 tokens on 16 devices: split into uneven shards.

XLA pads such a dimension of an array inside the program (150 to 160, ten on each device), masks sums over it, and
communicates padded arrays. So the program is analysed and priced with the padded size, while the emitted program keeps
the original one. Arguments and results stay whole along it, since no compiler accepts uneven ones.

In: a `Program`, its `Dimensions`, the axis sizes of every mesh there is a choice of. Out: the program with
padded sizes where that pays off.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import lru_cache

from toast_cli.dimensions.merged import Meshes, Place, Position, most_shards
from toast_cli.dimensions.model import Dimensions
from toast_cli.program.model import Op, Program, Rule, ValueFactors
from toast_cli.program.ops import CARRY, DOT_GENERAL, DYNAMIC_SLICE, JOIN, REDUCE, REDUCERS

# Largest padding as a fraction of the dimension, and least fraction of the work in ops that have it.
MOST_PADDING, LEAST_WORK = 0.125, 0.1
# If a dimension allows two shards unpadded, it is padded only for this many times as many.
_WORTH = 4
_OTHERS = (CARRY, DOT_GENERAL, JOIN, REDUCE)


def with_uneven(program: Program, dimensions: Dimensions, meshes: Meshes) -> tuple[Program, dict[int, int]]:
    """(the program with padded sizes, size -> padded size)."""
    wanted = {c: padded for c, n in enumerate(dimensions.class_sizes) if (padded := _padded(n, meshes)) > n}
    places = _places(program, dimensions, wanted) if wanted else {}
    if not places:
        return program, {}
    of_value: dict[int, dict[int, int]] = defaultdict(dict)
    for (value, dim), number in places.items():
        of_value[value][dim] = wanted[number]
    values = list(program.values)
    for value, dims in of_value.items():
        shape = program.values[value].shape
        sizes = tuple(dims.get(dim, n) for dim, n in enumerate(shape))
        values[value] = replace(program.values[value], shape=sizes, written=shape)
    ops = []
    for op in program.ops:
        arrays = op.operands + op.results
        at = [(array, dim, size) for array, v in enumerate(arrays) for dim, size in of_value.get(v, {}).items()]
        ops.append(replace(op, rule=_padded_rule(op.rule, tuple(at), _splits(op, program))) if at else op)
    sized = {dimensions.class_sizes[number]: wanted[number] for number in set(places.values())}
    return replace(program, ops=tuple(ops), values=tuple(values)), sized


def _padded(size: int, meshes: Meshes) -> int:
    """The padded size of a dimension; its own size if that splits well, or if padding would be too large."""
    before, best = most_shards((size,), meshes), (1, 0)
    for shards in {shards for mesh in meshes for shards in _products(mesh)}:
        padded = -(-size // shards) * shards
        if padded - size <= MOST_PADDING * size:
            best = max(best, (most_shards((padded,), meshes), -padded))
    worth = before == 1 < best[0] or (before == 2 and best[0] >= _WORTH * before)
    return -best[1] if worth else size


@lru_cache(maxsize=100)
def _products(axes: tuple[int, ...]) -> frozenset[int]:
    found = {1}
    for size in axes:
        found |= {size * other for other in found}
    return frozenset(found - {1})


def _places(program: Program, dimensions: Dimensions, wanted: dict[int, int]) -> dict[Place, int]:
    """Dimensions of arrays that consist of one of these classes only, for classes with enough work."""
    found: dict[Place, int] = {}
    work: dict[int, float] = defaultdict(float)
    refused: set[int] = set()
    all_work = 0.0
    for number, op in enumerate(program.ops):
        form, classes = dimensions.forms[number], dimensions.factor_classes[number]
        cost = (op.flops + sum(program.values[v].elements for v in op.results)) * op.trips
        all_work += cost
        here = wanted.keys() & set(classes)
        for number_of_class in here:
            work[number_of_class] += cost
        for value, dims in zip(op.operands + op.results, form.operands + form.results, strict=True) if here else ():
            for dim, factors in enumerate(dims):
                size = program.values[value].shape[dim]
                if (
                    len(factors) == 1
                    and classes[factors[0]] in here
                    and size == dimensions.class_sizes[classes[factors[0]]]
                ):
                    found[value, dim] = classes[factors[0]]
        if any(program.values[v].dtype.startswith("complex") for v in op.results):
            refused |= here
        if op.kind.convolution or op.name == "stablehlo.reduce_window":
            refused |= {classes[factor] for w in op.windows for factor in form.operands[0][w.operand_dim]}
    return {place: c for place, c in found.items() if c not in refused and work[c] >= LEAST_WORK * all_work}


def _splits(op: Op, program: Program) -> bool:
    """Whether an op supports uneven shards: it has been tested with them, and is never emitted as a manual region (see
    `emit.misread`). XLA crashes on unsigned indices (jaxlib 0.10.2)."""
    kind = op.kind
    plain = kind.source or kind.elementwise or kind.rearranges or kind.identity or kind.lookup or kind.updates
    unsigned = kind.lookup and program.values[op.operands[len(op.results)]].dtype.startswith("ui")
    if unsigned or not (plain or op.name in _OTHERS):
        return False
    if op.name == DYNAMIC_SLICE:
        shapes = program.values[op.operands[0]].shape, program.values[op.results[0]].shape
        return not any(1 < part < whole for whole, part in zip(*shapes, strict=True))
    return op.name != REDUCE or (len(op.results) == 1 and op.detail in REDUCERS)


@lru_cache(maxsize=10_000)
def _padded_rule(rule: Rule, at: tuple[tuple[int, int, int], ...], splits: bool) -> Rule:
    """A rule with padded sizes. at: (array, dimension, padded size). splits: whether the op can be split along them;
    otherwise these dimensions have no factor."""
    padded = {(array, dim): size for array, dim, size in at}
    arrays = rule.operands + rule.results
    positions: dict[int, list[Position]] = defaultdict(list)
    for array, dims in enumerate(arrays):
        for dim, factors in enumerate(dims):
            for factor in factors:
                positions[factor].append((array, dim))
    sizes, whole, uneven = list(rule.sizes), set[int](), set[int]()
    for factor, found in positions.items():
        here = [p for p in found if p in padded]
        if not here:
            continue
        alone = all(arrays[a][d] == (factor,) for a, d in found) and len(here) == len(found)
        if splits and alone and factor not in rule.need_replication | rule.permutation:
            sizes[factor] = padded[here[0]]
            uneven.add(factor)
        else:
            whole.add(factor)

    def kept(array: int, dims: ValueFactors) -> ValueFactors:
        return tuple(() if (array, d) in padded and whole & {*factors} else factors for d, factors in enumerate(dims))

    made = tuple(kept(array, dims) for array, dims in enumerate(arrays))
    count = len(rule.operands)
    operands, results = made[:count], made[count:]
    return replace(rule, sizes=tuple(sizes), operands=operands, results=results, uneven=frozenset(uneven))
