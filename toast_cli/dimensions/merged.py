"""Merged dimensions that a mesh can hardly split, such as 65 steps of a batch of 256 in one of 16,640.

A dimension that a reshape merges from several is split along its major part first. If no mesh axis divides that part,
no op between the reshapes can be split along it, though most of them compute each row independently. The merged
dimension is then split regardless of its parts, and gathered where a reshape merges or splits it. A learner of that
shape (IMPALA) takes an eighth of the time on 16 chips.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from math import prod

from toast_cli.dimensions.model import Dimensions
from toast_cli.program.model import Op, Program, Rule, ValueFactors
from toast_cli.program.ops import (
    CARRY,
    JOIN,
    RAGGED_DOT,
    RESHAPE,
    SCATTER,
)

Place = tuple[int, int]  # value, dimension
Position = tuple[int, int]  # of an op: array number (operands first, then results), dimension

# Least fraction of the work that must involve a merged dimension to change it.
_LEAST_WORK = 0.01
# If its parts allow two shards, a dimension is split regardless of them only for this many times as many.
_WORTH = 4
# Ops that compute each row independently, besides those whose kind implies it.
_BY_ROWS = frozenset([CARRY, JOIN, "stablehlo.sort", "chlo.top_k", "stablehlo.cholesky", "stablehlo.triangular_solve"])


def set_apart(program: Program, dimensions: Dimensions, mesh: tuple[int, ...]) -> Program:
    """The program with merged dimensions that axes of a mesh divide, unlike their parts, made independent of these: the
    reshapes that merge and split them need them whole. mesh: sizes of the axes."""

    def gains(parts: tuple[int, ...]) -> bool:
        sizes = tuple(dimensions.class_sizes[c] for c in parts)
        before, after = most_shards(sizes, mesh), most_shards((prod(sizes),), mesh)
        return after > before and (before == 1 or (before == 2 and after >= _WORTH * before))

    places = _merges(program, dimensions, gains)
    if not places:
        return program
    ops = [
        replace(op, rule=_without_parts(op.rule, frozenset(positions)))
        if op.name == RESHAPE and (positions := [p for p in _products(op) if _place(op, p) in places])
        else op
        for op in program.ops
    ]
    return replace(program, ops=tuple(ops))


def _row_positions(op: Op, program: Program) -> dict[Position, tuple[Position, ...]]:
    """Position of a dimension along which an op computes each row independently, or sums over rows -> all positions of
    that dimension."""
    kind, rule = op.kind, op.rule
    plain = kind.elementwise or kind.matrix_unit or kind.reduction or kind.rearranges or kind.identity
    by_rows = plain or kind.lookup or kind.updates or op.name in _BY_ROWS
    if not by_rows or kind.per_device or kind.source or op.name == RAGGED_DOT:
        return {}
    arrays = op.operands + op.results
    of_factor: dict[int, list[Position]] = defaultdict(list)
    merged = {f for array in rule.operands + rule.results for dim in array if len(dim) > 1 for f in dim}
    for array, dims in enumerate(rule.operands + rule.results):
        for dim, factors in enumerate(dims):
            if len(factors) == 1:
                of_factor[factors[0]].append((array, dim))
    ordered = merged | rule.need_replication | rule.permutation | _windowed(op)
    if kind.lookup:  # rows that indices select are ordered
        shared = rule.operands[-1] if op.name == SCATTER else rule.results[0]
        ordered |= set(of_factor).difference(*shared)
    elif rule.results:
        ordered |= set(of_factor).difference(rule.reduction, *(dim for array in rule.results for dim in array))
    return {
        position: tuple(positions)
        for factor, positions in of_factor.items()
        if factor not in ordered and all(program.values[arrays[a]].shape[d] == rule.sizes[factor] for a, d in positions)
        for position in positions
    }


def _windowed(op: Op) -> set[int]:
    """Factors of dimensions along which an op makes each row from others: a pad that shifts rows is one of those."""
    operands, results = op.rule.operands, op.rule.results
    return {
        factor
        for w in op.windows
        for dim in (
            operands[0][w.operand_dim],
            results[0][w.result_dim],
            operands[1][w.kernel_dim] if w.kernel_dim >= 0 else (),
        )
        for factor in dim
    }


# -- finding merged dimensions -----------------------------------------------------------------------------------------


def _merges(program: Program, dimensions: Dimensions, gains: Callable[[tuple[int, ...]], bool]) -> set[Place]:
    """The arrays' dimensions that are merged from parts (classes) and gain by being split regardless of them, with all
    that are linked to them by ops that compute each row independently; empty if little of the work involves them."""
    chosen = lru_cache(maxsize=None)(gains)
    independent, most = set[Place](), 0.0
    for number, op in enumerate(program.ops):
        for array, dim in _products(op) if op.name == RESHAPE else ():
            place, parts = _place(op, (array, dim)), _parts(dimensions, number, (array, dim))
            if place in independent or len(parts) < 2 or not chosen(parts):
                continue
            places, touched = _linked(program, place)
            independent |= places
            most = max(most, sum(_work(program, program.ops[n]) for n in touched))
    return independent if most and most >= _LEAST_WORK * sum(_work(program, op) for op in program.ops) else set()


def _products(op: Op) -> list[Position]:
    """Positions of a reshape's dimensions that are merged from several."""
    return [
        (array, dim)
        for array, dims in enumerate(op.rule.operands + op.rule.results)
        for dim, factors in enumerate(dims)
        if sum(op.rule.sizes[f] > 1 for f in factors) > 1
    ]


def _place(op: Op, position: Position) -> Place:
    return (op.operands + op.results)[position[0]], position[1]


def _parts(dimensions: Dimensions, number: int, position: Position) -> tuple[int, ...]:
    form = dimensions.forms[number]
    factors = (form.operands + form.results)[position[0]][position[1]]
    return tuple(dimensions.factor_classes[number][factor] for factor in factors)


def _linked(program: Program, start: Place) -> tuple[frozenset[Place], set[int]]:
    """(dimensions linked with this one, ops that have any of them)."""
    places, waiting, touched = {start}, [start], set[int]()
    while waiting:
        value, dim = waiting.pop()
        for number in (program.producer[value], *(user for user, _ in program.users[value])):
            op = program.ops[number]
            touched.add(number)
            along = _row_positions(op, program)
            for array, operand in enumerate(op.operands + op.results):
                for position in along.get((array, dim), ()) if operand == value else ():
                    if (place := _place(op, position)) not in places:
                        places.add(place)
                        waiting.append(place)
    return frozenset(places), touched


def _work(program: Program, op: Op) -> float:
    return (op.flops + sum(program.values[v].elements for v in op.results)) * op.trips


@lru_cache(maxsize=10_000)
def most_shards(parts: tuple[int, ...], axes: tuple[int, ...]) -> int:
    """The most shards into which mesh axes of these sizes can split a dimension with these parts, major to minor."""
    if not parts:
        return 1
    best = 1
    for count in range(1, len(axes) + 1):
        for chosen in combinations(range(len(axes)), count):
            shards = prod(axes[k] for k in chosen)
            if parts[0] % shards == 0:
                left = tuple(size for k, size in enumerate(axes) if k not in chosen)
                best = max(best, shards * (most_shards(parts[1:], left) if shards == parts[0] else 1))
    return best


@lru_cache(maxsize=1000)
def _without_parts(rule: Rule, positions: frozenset[Position]) -> Rule:
    """A reshape's rule in which each of these dimensions is one factor of its own."""
    sizes = list(rule.sizes)
    arrays: list[ValueFactors] = []
    for array, dims in enumerate(rule.operands + rule.results):
        new = list(dims)
        for dim, factors in enumerate(dims):
            if (array, dim) in positions:
                new[dim] = (len(sizes),)
                sizes.append(prod(rule.sizes[f] for f in factors))
        arrays.append(tuple(new))
    count = len(rule.operands)
    return replace(rule, sizes=tuple(sizes), operands=tuple(arrays[:count]), results=tuple(arrays[count:]))
