"""Decisions and plans. Order is priority: earlier decisions win an axis where several want it."""

from __future__ import annotations

from typing import NamedTuple

NOWHERE = -1


class Shard(NamedTuple):
    """Give mesh axis `axis` to class group `group`; `sides` [the group's resolutions] says which side of each conflict.

    `unless` restricts the decision to ops that do not have that group. Expert parallelism is such a decision: the experts get
    the axis ahead of the batch, but not where tokens are still in sequence (routing, dispatch, combine): there the batch has
    it, and tokens travel between the two in an all-to-all.
    """

    group: int
    axis: int
    sides: tuple[int, ...] = ()
    unless: int = NOWHERE


class Replicate(NamedTuple):
    """Do not keep the arguments of group `role` split over `axis` at rest (what separates ZeRO-1/2 from ZeRO-3)."""

    role: int
    axis: int


Decision = Shard | Replicate
Plan = tuple[Decision, ...]


# Pairs of class groups (smaller number first) one of which is major to the other in some dimension of some op.
Nested = frozenset[tuple[int, int]]


def canonical(plan: Plan, nested: Nested = frozenset()) -> Plan:
    """The one order that stands for all equivalent ones: decisions that commute are sorted.

    Two decisions commute when neither the axis nor the group is the same, and neither group is nested in the other (a minor
    name may be split only once its majors are): no op can then tell which came first. `Replicate` commutes with everything and
    stands last. Lexicographic normal form of the trace.
    """
    rest = sorted({d for d in plan if isinstance(d, Replicate)}, key=lambda d: (d.role, d.axis))
    shards = [d for d in plan if isinstance(d, Shard)]
    ordered: list[Decision] = []
    while shards:
        free = [d for k, d in enumerate(shards) if all(commute(d, e, nested) for e in shards[:k])]
        first = min(free, key=lambda d: (d.axis, d.group, d.sides))
        shards.remove(first)
        ordered.append(first)
    return (*ordered, *rest)


def commute(a: Shard, b: Shard, nested: Nested = frozenset()) -> bool:
    apart = a.axis != b.axis and a.group != b.group
    return apart and (min(a.group, b.group), max(a.group, b.group)) not in nested
