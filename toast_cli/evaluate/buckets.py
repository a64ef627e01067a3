"""Buckets: cost items grouped by the decisions that affect them, each with a memo of its costs.

In: items, and the rows they depend on. Out: one `Bucket` for each set of decisions; the evaluator computes its
cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

import numpy as np
from numpy.typing import NDArray

from toast_cli.evaluate.array_items import ArrayItem
from toast_cli.evaluate.expected_step import Placed
from toast_cli.evaluate.items import Items, WorkItem
from toast_cli.evaluate.neighbour_items import NeighbourItem
from toast_cli.evaluate.op_sharding_memo import OpShardingMemo, RowNumbers, groups_of
from toast_cli.evaluate.sum_items import SumItem
from toast_cli.evaluate.timeline import Spans
from toast_cli.plan.loop_reads import LOOP_EDGES

Vector = NDArray[np.float64]
QUANTUM = 2.0**-48  # seconds


@dataclass(frozen=True, slots=True)
class Share:
    """Contribution of one bucket to a plan's cost.

    All numbers are integral, so that sums are exact in any order and on any machine.

    Attributes:
        compute, communication, transfers: in quanta. overlapping: the part of communication that the compiler overlaps
        with compute. arguments: bytes.
        alive: [moments] bytes. Shares of a bucket with the same arrays share one vector.
    """

    compute: int
    communication: int
    overlapping: int
    transfers: int
    arguments: int
    alive: Vector


Key = int | tuple[int, ...]  # row numbers of a bucket's views, in their order


@dataclass(slots=True)
class Bucket:
    """Items whose patterns the same decisions affect.

    Attributes:
        touches: groups and roles whose decisions affect the cost, see `op_sharding_memo.touches`.
        groups: class groups among them.
        views: those whose rows determine the share. key: selects the rows of these views from those of all.
        patterns, places: patterns of the items, including `LOOP_EDGES`, and (pattern, view, place in the view) of each.
        work, sums, neighbours, arrays: the items.
        memo: rows -> share. alive: numbers of `MemoryShares` -> [moments] bytes of its arrays. axis_memo: rows ->
        [axes] seconds. placed: rows -> its kernels and collectives, where they are in the program.
        held: the rows of the last exact memory profile, and the `Spans` of the bucket's arrays in it.
    """

    touches: frozenset[int]
    groups: tuple[int, ...] = ()
    views: list[int] = field(default_factory=list)
    key: Callable[[RowNumbers], Key] = itemgetter(0)
    patterns: set[int] = field(default_factory=set)
    places: list[tuple[int, int, int]] = field(default_factory=list)
    work: list[WorkItem] = field(default_factory=list)
    sums: list[SumItem] = field(default_factory=list)
    neighbours: list[NeighbourItem] = field(default_factory=list)
    arrays: list[ArrayItem] = field(default_factory=list)
    memo: dict[Key, Share] = field(default_factory=dict)
    alive: dict[tuple[int, ...], Vector] = field(default_factory=dict)
    axis_memo: dict[Key, Vector] = field(default_factory=dict)
    placed: dict[Key, Placed] = field(default_factory=dict)
    held: tuple[Key, Spans] | None = None


def quanta(seconds: float) -> int:
    return round(seconds / QUANTUM)


def make_buckets(items: Items, rows: OpShardingMemo) -> list[Bucket]:
    """All items in their buckets."""
    buckets: dict[frozenset[int], Bucket] = {}

    def bucket(patterns: Iterable[int]) -> Bucket:
        used = set(patterns)
        touches = frozenset().union(*(rows.views[rows.place[p][0]].touches for p in used))
        found = buckets.setdefault(touches, Bucket(touches))
        found.patterns |= used
        return found

    for work in items.work:
        bucket([work.pattern]).work.append(work)
    for added in items.sums:
        bucket(added.patterns).sums.append(added)
    for read in items.neighbours:
        bucket(read.patterns).neighbours.append(read)
    for array in filter(attrgetter("costs"), items.arrays):
        edges = [LOOP_EDGES] if array.at_edges else []
        bucket([array.pattern, *(r.pattern for r in array.readers), *edges]).arrays.append(array)
    for each in buckets.values():
        each.groups = groups_of(each.touches)
        each.views = sorted({rows.place[p][0] for p in each.patterns})
        each.key = itemgetter(*each.views)
        each.places = [(p, *rows.place[p]) for p in sorted(each.patterns)]
    return list(buckets.values())
