"""The sharding rule of a region that is manual over some mesh axes: how the other axes can split it.

A factor is a dimension that runs through the region, from operand to operation to result, and along which every
operation can be split. A contracted dimension inside is one, too: the region completes the partial sum itself.

Enters: a region's body. Leaves: a `Rule`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from toast_cli.program.disjoint_set import DisjointSets
from toast_cli.program.model import Op, Program, Rule, ValueFactors

Dimension = tuple[int, int]  # value, dimension
_WHOLE = tuple(f"stablehlo.{name}" for name in ("all_gather", "all_to_all", "collective_broadcast", "reduce_scatter"))


def region_rule(body: Program) -> Rule:
    """The rule of a region. A dimension sharded over manual axes is longer outside than its factor."""
    dimensions: DisjointSets[Dimension] = DisjointSets()
    whole: set[Dimension] = set()
    for op in body.ops:
        for dims in _factors(op).values():
            for dimension in dims[1:]:
                dimensions.union(dims[0], dimension)
        whole.update(_needed_whole(op))
    blocked = {dimensions.find(dimension) for dimension in whole} | _twice(body, dimensions)
    inside = [argument.value for argument in body.arguments], [result.value for result in body.results]
    numbers: dict[Dimension, int] = {}
    sizes: list[int] = []

    def factors(value: int) -> ValueFactors:
        found: list[tuple[int, ...]] = []
        for d, size in enumerate(body.values[value].shape):
            name = dimensions.find((value, d))
            if name in blocked or size == 1:
                found.append(())
                continue
            number = numbers.setdefault(name, len(sizes))
            if number == len(sizes):
                sizes.append(size)
            found.append((number,) if sizes[number] == size else ())
        return tuple(found)

    come, leave = (tuple(map(factors, values)) for values in inside)
    return Rule(tuple(sizes), come, leave)


def _arrays(op: Op) -> Iterator[tuple[int, ValueFactors]]:
    yield from zip(op.operands, op.rule.operands, strict=True)
    yield from zip(op.results, op.rule.results, strict=True)


def _factors(op: Op) -> dict[int, list[Dimension]]:
    """Factor of an op -> the dimensions of which it is all or the major part."""
    found: dict[int, list[Dimension]] = defaultdict(list)
    for value, dims in _arrays(op):
        for d, factors in enumerate(dims):
            if factors:
                found[factors[0]].append((value, d))
    return found


def _needed_whole(op: Op) -> Iterator[Dimension]:
    """Dimensions along which an op cannot be split, and minor parts of others. XLA gathers the operands of collectives
    along further axes."""
    rule = op.rule
    if op.name in _WHOLE:
        yield from ((value, d) for value, dims in _arrays(op) for d in range(len(dims)))
    stuck = rule.need_replication | rule.permutation
    minor = {factor for _, dims in _arrays(op) for factors in dims for factor in factors[1:]}
    for value, dims in _arrays(op):
        for d, factors in enumerate(dims):
            if not factors or not stuck.isdisjoint(factors) or factors[0] in minor:
                yield value, d


def _twice(body: Program, dimensions: DisjointSets[Dimension]) -> set[Dimension]:
    """Dimension classes that occur twice in one array."""
    found: set[Dimension] = set()
    for value, array in enumerate(body.values):
        names = [dimensions.find((value, d)) for d in range(len(array.shape))]
        found.update(_repeated(names))
    return found


def _repeated(names: Iterable[Dimension]) -> Iterator[Dimension]:
    seen = set()
    for name in names:
        if name in seen:
            yield name
        seen.add(name)
