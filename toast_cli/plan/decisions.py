"""Decisions, plans and goals. A plan is an ordered list of decisions: earlier ones win an axis where several want it.
A goal says which figure of a plan to minimise, and which bounds to keep.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from toast_cli.base.errors import UsageError
from toast_cli.base.units import parse_bytes, parse_seconds

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


def canonical(plan: Plan, commute: Callable[[Shard, Shard], bool]) -> Plan:
    """The canonical order of a plan: the lexicographically first one that exchanging commuting neighbours leads to (the
    normal form of a trace). `Replicate` commutes with everything and comes last.

    Args:
        commute: whether the order of two decisions makes no difference to any op.
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
    replicates = sorted({d for d in plan if isinstance(d, Replicate)}, key=lambda d: (d.role, d.axis))
    return (*ordered, *replicates)


_Key = tuple[int, int, tuple[int, ...], int, int]


def _key(decision: Shard) -> _Key:
    return decision.axis, decision.group, decision.sides, decision.unless, decision.only


# ---------------------------------------------------------------- goals
# Figure -> whether it is a time (else it is an amount of memory).
FIGURES = {"step_time": True, "compute": True, "communication": True, "peak_memory": False, "argument_memory": False}
_FIGURE = re.compile(r"(\w+)(?:\[([^\]]*)\])?")
_BOUND = re.compile(r"(.+?)\s*(<=|≤|<)\s*(.+)")


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a plan, per device and run. axis: a mesh axis, for communication over that axis alone; else
    empty."""

    name: str
    axis: str = ""

    @property
    def is_time(self) -> bool:
        return FIGURES[self.name]

    def __str__(self) -> str:
        return f"{self.name}[{self.axis}]" if self.axis else self.name


@dataclass(frozen=True, slots=True)
class Bound:
    """`figure` is to be at most `limit` (seconds or bytes)."""

    figure: Figure
    limit: float


STEP_TIME = Figure("step_time")
PEAK_MEMORY = Figure("peak_memory")


@dataclass(frozen=True, slots=True)
class Goal:
    """`minimise`: the second figure counts where plans are equal in the first, and so on. Device memory is always a
    bound."""

    minimise: tuple[Figure, ...] = (STEP_TIME,)
    bounds: tuple[Bound, ...] = ()

    @property
    def axes(self) -> frozenset[str]:
        """Mesh axes that some figure names."""
        return frozenset(f.axis for f in (*self.minimise, *(b.figure for b in self.bounds)) if f.axis)

    def check_axes(self, mesh_axes: Iterable[str]) -> None:
        """Raises UsageError for an axis that is none of `mesh_axes`."""
        names = list(dict.fromkeys(mesh_axes))
        for axis in sorted(self.axes.difference(names)):
            raise UsageError(
                f"unknown mesh axis {axis!r}",
                where="--minimise or --subject-to",
                hint=f"this mesh has {', '.join(names)}",
            )


FASTEST = Goal()


def parse_goal(minimise: Iterable[str] = (), subject_to: Iterable[str] = ()) -> Goal:
    """The goal these options state. Raises UsageError for unknown metrics and limits that cannot be read."""
    figures = [
        _figure(part.strip(), "--minimise") for text in minimise for part in text.split(",")
    ]  # "a,b" is as good as two options
    doubled = next((f for k, f in enumerate(figures) if f in figures[:k]), None)
    if doubled is not None:
        raise UsageError(f"{doubled} is given twice", where="--minimise", hint="give each metric once")
    return Goal(tuple(figures) or (STEP_TIME,), tuple(_bound(text) for text in subject_to))


def _figure(text: str, where: str) -> Figure:
    matched = _FIGURE.fullmatch(text)
    if matched is None or matched[1] not in FIGURES:
        raise UsageError(
            f"unknown metric {text!r}", where=where, hint=f"choose from {', '.join(FIGURES)}, communication[AXIS]"
        )
    name, axis = matched[1], matched[2]
    if axis is not None and (name != "communication" or not axis.strip()):
        raise UsageError(
            f"{text!r} has no meaning", where=where, hint="communication[AXIS] is the one metric that takes an axis"
        )
    return Figure(name, (axis or "").strip())


def _bound(text: str) -> Bound:
    where = "--subject-to"
    matched = _BOUND.fullmatch(text.strip())
    if matched is None:
        raise UsageError(f"cannot read {text!r}", where=where, hint="write e.g. 'peak_memory<=24GiB'")
    figure = _figure(matched[1], where)
    parse = parse_seconds if figure.is_time else parse_bytes
    return Bound(figure, float(parse(matched[3], where=where)))
