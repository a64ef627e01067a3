"""Goals: the metrics of a plan to minimise, the most important first, and upper bounds on others.

In: `--minimise` and `--subject-to` as people write them. Out: a `Goal`. `evaluate` computes the figures;
`search.objective` compares plans by them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from toast_cli.errors import UsageError
from toast_cli.units import parse_bytes, parse_seconds

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

    def check_axes(self, known: Iterable[str]) -> None:
        """Raises UsageError for an axis that is none of `known`."""
        names = list(dict.fromkeys(known))
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
