"""Decisions and plans. Order is priority: earlier decisions win an axis where several want it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

NOWHERE = -1
# In place of a side: ops that take part in the conflict are left to other decisions.
ASIDE = -1
# In place of a group in `Shard.unless`: ops that sum over the decision's own group are left to other decisions.
SUMMED = -2
# In place of a group in `Shard.unless`: look-ups in tables, and their gradients, are left to other decisions.
LOOK_UPS = -3


class Shard(NamedTuple):
    """Give mesh axis `axis` to class group `group`; `sides` [the group's resolutions] says which side of each conflict,
    or `ASIDE`.

    Three things restrict a decision to a part of the program, and what it leaves is there for decisions behind it.
    `ASIDE` leaves the ops of one kind of conflict: the sequence has the axis everywhere but in attention, and there the
    heads have it (Ulysses). `unless` leaves the ops that have that group: experts get the axis ahead of the batch, but
    not where tokens are still in sequence (routing, dispatch, combine). With `SUMMED` it leaves the ops that sum over
    the group: what they read is gathered, where else their results would be added up. With `LOOK_UPS` it leaves gathers
    and scatters: the batch has the axis everywhere but where embeddings are looked up, and there the features have it,
    so that neither the table is gathered nor its gradient reduced. `only` leaves all ops that do
    not have that group: the batch has the axis where there are heads, so that each device reads a part of the cache,
    and nowhere else. At the borders of such a part arrays travel from one sharding to the other, mostly in an
    all-to-all.
    """

    group: int
    axis: int
    sides: tuple[int, ...] = ()
    unless: int = NOWHERE
    only: int = NOWHERE


class Replicate(NamedTuple):
    """Do not keep the arguments of group `role` split over `axis` at rest (what separates ZeRO-1/2 from ZeRO-3)."""

    role: int
    axis: int


Decision = Shard | Replicate
Plan = tuple[Decision, ...]


# Whether no op can tell which of two decisions came first.
Commute = Callable[[Shard, Shard], bool]


def independent(a: Shard, b: Shard) -> bool:
    """Decisions of which this can be said whatever the program: neither the axis nor the group is the same."""
    return a.axis != b.axis and a.group != b.group


def canonical(plan: Plan, commute: Commute = independent) -> Plan:
    """The one order that stands for all equivalent ones: the lexicographically first of those that only exchange
    neighbours that commute (the normal form of a trace). `Replicate` commutes with everything and stands behind those.
    """
    ordered: list[Shard] = []
    keys: list[_Key] = []
    for decision in plan:
        if isinstance(decision, Shard):
            place, key = len(ordered), _key(decision)
            while place and commute(decision, ordered[place - 1]):
                place -= 1
            while place < len(ordered) and keys[place] < key:
                place += 1
            ordered.insert(place, decision)
            keys.insert(place, key)
    whole = sorted({d for d in plan if isinstance(d, Replicate)}, key=lambda d: (d.role, d.axis))
    return (*ordered, *whole)


_Key = tuple[int, int, tuple[int, ...], int, int]


def _key(decision: Shard) -> _Key:
    return decision.axis, decision.group, decision.sides, decision.unless, decision.only
