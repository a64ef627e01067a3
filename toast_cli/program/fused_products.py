"""Fused products: one product with a weight that computes several arrays side by side, which slices separate.

Queries, keys and values of an attention layer, gate and value of a gated perceptron, the gates of a recurrence: their
widths follow each other in one dimension of n parts, and no sharding of that dimension gives each device its share of
every part. Written as two dimensions, parts and width, the width can be split like any other. In the backward pass,
cotangents are concatenated (or padded) again for the product's own gradients.

In: a `Program`. Out: the dimensions of values to split into two, and the ops to rewrite (`Parts`), or None where
nothing is fused. Arguments and results stay as they are; weights are reshaped where products read them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from toast_cli.program.model import Op, Program, Rule
from toast_cli.program.ops import (
    ARGUMENT,
    BARRIER,
    BROADCAST_IN_DIM,
    CARRY,
    CONCATENATE,
    DOT_GENERAL,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    PAD,
    REDUCE,
    RESHAPE,
    SLICE,
    TRANSPOSE,
)

Place = tuple[int, int]  # value, dimension
Position = tuple[int, int]  # of an op: array number (operands first, then results), dimension

# Ops that propagate parts; products and reductions can have parts but do not propagate them.
_PASSING = frozenset(
    [BARRIER, BROADCAST_IN_DIM, CARRY, CONCATENATE, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE, PAD, RESHAPE, SLICE, TRANSPOSE]
)
_ENDS = frozenset([DOT_GENERAL, REDUCE])
_BODIES = frozenset(["stablehlo.map"])  # elementwise, with shapes in their regions


@dataclass(frozen=True)
class Parts:
    """values: value -> dimension -> elements of each part. ops: op to rewrite -> position -> elements of each part."""

    values: dict[int, dict[int, int]]
    ops: dict[int, dict[Position, int]]


def fused_parts(program: Program) -> Parts | None:
    """The fused products of a program, None if there are none."""
    return _Search(program).parts()


class _Search:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._from_arguments = _made_of_arguments(program)

    def parts(self) -> Parts | None:
        width: dict[Place, int] = {}
        known: set[Place] = set()
        for number, op in enumerate(self._program.ops):
            if op.name != SLICE:
                continue
            for place, _ in self._cuts(number):
                if place not in known:
                    products = self._products_behind(place, known)
                    for product in products:
                        if product not in width:
                            width.update(self._family(product))
        if not width:
            return None
        values: dict[int, dict[int, int]] = defaultdict(dict)
        ops = self._grown(width, values)
        return Parts(dict(values), ops) if ops else None

    # -- linked positions ------------------------------------------------------------------------------------------

    def _arrays(self, op: Op) -> tuple[int, ...]:
        return op.operands + op.results

    def _touching(self, value: int) -> Iterator[int]:
        yield self._program.producer[value]
        for number, _ in self._program.users[value]:
            yield number

    def _along(self, number: int, place: Place) -> list[Position]:
        """Positions of an op's arrays that share the dimension of a place."""
        op, (value, dim) = self._program.ops[number], place
        arrays = self._arrays(op)
        size = self._program.values[value].shape[dim]
        at = [array for array, it in enumerate(arrays) if it == value]
        for positions in alone(op.rule):
            if any((array, dim) in positions for array in at):
                return [(a, d) for a, d in positions if self._program.values[arrays[a]].shape[d] == size]
        return [(array, dim) for array in at]

    def _cuts(self, number: int) -> list[tuple[Place, int]]:
        """(array and dimension that an op slices, pads or concatenates to; common divisor of the pieces' sizes and
        offsets)."""
        op = self._program.ops[number]
        if op.name in (SLICE, PAD):
            whole = op.operands[0] if op.name == SLICE else op.results[0]
            found = []
            for w in op.windows:
                sizes = (w.low, w.inputs, w.outputs) if w.stride == w.dilation == 1 else (1,)
                inside = w.low <= 0 if op.name == SLICE else 0 <= w.low <= w.outputs - w.inputs
                found.append(((whole, w.operand_dim), gcd(*sizes) if inside else 1))
            return found
        if op.name == CONCATENATE:
            shapes = [self._program.values[v].shape for v in op.operands]
            made = self._program.values[op.results[0]].shape
            return [
                ((op.results[0], dim), gcd(*(shape[dim] for shape in shapes)))
                for dim in range(len(made))
                if shapes[0][dim] != made[dim]
            ]
        return []

    # -- fused products --------------------------------------------------------------------------------------------

    def _products_behind(self, place: Place, known: set[Place]) -> list[Place]:
        """Results of products with weights that a sliced array is computed from, element by element."""
        found: list[Place] = []
        waiting = [place]
        while waiting:
            here = waiting.pop()
            if here in known:
                continue
            known.add(here)
            number = self._program.producer[here[0]]
            op = self._program.ops[number]
            if op.name == DOT_GENERAL:
                if self._has_weight(op, here[1]):
                    found.append(here)
            elif self._passes(number, here):
                arrays = self._arrays(op)
                waiting += [(arrays[a], d) for a, d in self._along(number, here) if a < len(op.operands)]
        return found

    def _has_weight(self, product: Op, dim: int) -> bool:
        """Whether a dimension of a product's result is the first one that only the weight has."""
        made = product.rule.results[0]
        for operand, other in ((0, 1), (1, 0)):
            shared = {f for factors in product.rule.operands[other] for f in factors}
            free = [f for f in product.rule.operands[operand] if not shared.intersection(f)]
            if product.operands[operand] in self._from_arguments and free and free[0] == made[dim]:
                return len(made[dim]) == 1
        return False

    def _family(self, start: Place) -> dict[Place, int]:
        """Every place that shares the dimension of this one -> size of the parts that all cuts of it allow; empty if
        there is none."""
        family, waiting, width = {start}, [start], 0
        while waiting:
            here = waiting.pop()
            for number in self._touching(here[0]):
                arrays = self._arrays(self._program.ops[number])
                for array, dim in self._along(number, here):
                    if (arrays[array], dim) not in family:
                        family.add((arrays[array], dim))
                        waiting.append((arrays[array], dim))
                for place, size in self._cuts(number):
                    if place == here:
                        width = gcd(width, size)
        whole = self._program.values[start[0]].shape[start[1]]
        return dict.fromkeys(family, width) if width * width >= whole else {}

    # -- ops to rewrite --------------------------------------------------------------------------------------------

    def _grown(self, width: dict[Place, int], values: dict[int, dict[int, int]]) -> dict[int, dict[Position, int]]:
        """Ops to rewrite: those that cut, and those that parts propagate to. Fills `values`."""
        passed: set[int] = set()
        waiting = [place for number in range(len(self._program.ops)) for place, _ in self._cuts(number)]
        waiting = [place for place in waiting if place in width]
        while waiting:
            value, dim = here = waiting.pop()
            if dim in values[value]:
                continue
            values[value][dim] = width[here]
            made_of_arguments = value in self._from_arguments
            for number in self._touching(value):
                op = self._program.ops[number]
                if made_of_arguments and value not in op.results and here not in dict(self._cuts(number)):
                    continue  # another reader of a weight or a bias: its update
                if self._passes(number, here):
                    passed.add(number)
                    arrays = self._arrays(op)
                    if here not in dict(self._cuts(number)):
                        waiting += [(arrays[a], d) for a, d in self._along(number, here)]
        ops: dict[int, dict[Position, int]] = {}
        for value, dims in values.items():
            for number in self._touching(value):
                if number in passed or self._program.ops[number].name in _ENDS:
                    self._write(number, (value, dims), ops)
        self._out_of_loops(values, ops)
        return ops

    def _write(self, number: int, parted: tuple[int, dict[int, int]], ops: dict[int, dict[Position, int]]) -> None:
        value, dims = parted
        for dim, size in dims.items():
            at = self._positions(number, (value, dim))
            ops.setdefault(number, {}).update(dict.fromkeys(at, size))

    def _out_of_loops(self, values: dict[int, dict[int, int]], ops: dict[int, dict[Position, int]]) -> None:
        """Moves the reshape of a loop-invariant weight before the loop."""
        program = self._program
        waiting = [number for number in ops if program.ops[number].loop >= 0]
        while waiting:
            number = waiting.pop()
            for place, value in enumerate(program.ops[number].operands):
                dims = {dim: size for (array, dim), size in ops[number].items() if array == place}
                maker, users = program.producer[value], program.users[value]
                inside = {user for user, _ in users if program.ops[user].loop >= 0}
                if not dims or value in values or not inside <= ops.keys() or value not in self._from_arguments:
                    continue
                if program.ops[maker].loop < 0:
                    values[value] = dims
                elif all(self._passes(maker, (value, dim)) for dim in dims) and program.ops[maker].name != CARRY:
                    values[value] = dims
                    self._write(maker, (value, dims), ops)
                    waiting.append(maker)

    def _positions(self, number: int, place: Place) -> list[Position]:
        if place in dict(self._cuts(number)):
            return [(array, place[1]) for array in self._with_dimensions(number)]
        return self._along(number, place)

    def _with_dimensions(self, number: int) -> list[int]:
        arrays = self._arrays(self._program.ops[number])
        return [array for array, value in enumerate(arrays) if self._program.values[value].shape]

    def _passes(self, number: int, place: Place) -> bool:
        """Whether an op can propagate the parts of a dimension to all its operands and results."""
        op = self._program.ops[number]
        if op.name == BROADCAST_IN_DIM or place in dict(self._cuts(number)):
            return True
        elementwise = op.kind.elementwise and op.name.startswith("stablehlo.") and op.name not in _BODIES
        return (op.name in _PASSING or elementwise) and {a for a, _ in self._along(number, place)}.issuperset(
            self._with_dimensions(number)
        )


@lru_cache(maxsize=10_000)
def alone(rule: Rule) -> tuple[tuple[Position, ...], ...]:
    """Per factor, the positions of dimensions that consist of this factor only."""
    found: dict[int, list[Position]] = defaultdict(list)
    for array, dims in enumerate(rule.operands + rule.results):
        for dim, factors in enumerate(dims):
            if len(factors) == 1:
                found[factors[0]].append((array, dim))
    return tuple(map(tuple, found.values()))


def _made_of_arguments(program: Program) -> set[int]:
    """Values that are only conversions, rearrangements or concatenations of arguments and constants."""
    found: set[int] = set()
    for op in program.ops:
        plain = op.kind.rearranges or op.kind.identity or op.name in (ARGUMENT, "stablehlo.convert")
        read = op.operands[:1] if op.kind.takes_part else op.operands
        if op.results and plain and all(v in found for v in read):
            found.update(op.results)
    return found
