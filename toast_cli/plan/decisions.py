"""Decisions and plans. Order is priority: earlier decisions win an axis where several want it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

# No group, factor or argument.
NONE = -1
# In place of a side in `Shard.sides`: the decision does not apply to ops that take part in the conflict.
ASIDE = -1
# In place of a group in `Shard.unless`: the decision does not apply to ops that sum over its own group.
SUMMED = -2
# In place of a group in `Shard.unless`: the decision does not apply to look-ups in tables and their gradients.
LOOK_UPS = -3


class Shard(NamedTuple):
    """Splits class group `group` over mesh axis `axis`.

    sides: one entry for each kind of conflict that the group has (`Group.resolutions`; a conflict is an op or array
    that has a class of the group twice): the preferred side, which axis assignment tries first, or `ASIDE`. An empty
    tuple prefers side 0 everywhere.

    Three fields restrict a decision to a part of the program and leave the axis to later decisions elsewhere. `ASIDE`
    exempts the ops of one kind of conflict: the sequence has the axis everywhere but in attention, where the heads have
    it (Ulysses). `unless` exempts the ops that have that group: experts get the axis ahead of the batch, but not where
    tokens are still in sequence (routing, dispatch, combine). `SUMMED` exempts the ops that sum over the group: their
    operands are gathered, instead of their results being reduced. `LOOK_UPS` exempts gathers and scatters: the batch
    has the axis everywhere but in embedding look-ups, where the features have it, so that neither the table is gathered
    nor its gradient reduced. `only` exempts all ops that do not have that group: the batch has the axis only where
    there are heads, so that each device reads a part of the cache. At the borders of such a part arrays are resharded,
    mostly by an all-to-all.
    """

    group: int
    axis: int
    sides: tuple[int, ...] = ()
    unless: int = NONE
    only: int = NONE


class Replicate(NamedTuple):
    """Keeps what `Problem.roles[role]` names replicated over `axis` (weights: ZeRO-1/2, not ZeRO-3)."""

    role: int
    axis: int


Decision = Shard | Replicate
Plan = tuple[Decision, ...]


# Whether the order of two decisions makes no difference to any op.
Commute = Callable[[Shard, Shard], bool]


def independent(a: Shard, b: Shard) -> bool:
    """Whether two decisions commute in every program: neither the axis nor the group is the same."""
    return a.axis != b.axis and a.group != b.group


def canonical(plan: Plan, commute: Commute = independent) -> Plan:
    """The canonical order of a plan: the lexicographically first one that exchanging commuting neighbours leads to (the
    normal form of a trace). `Replicate` commutes with everything and comes last.
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
