"""The goal and whether it was met: the goal's facts go in, a section of the terminal report comes out."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from toast_cli.quantities import format_bytes, format_ratio, format_seconds
from toast_cli.report import style
from toast_cli.report.model import NO, BoundFacts, GoalFacts, Report


def goal(report: Report) -> RenderableType | None:
    """What was minimised and which bounds hold; None for the default goal."""
    asked = report.goal
    if asked == GoalFacts():
        return None
    rows = style.table([("", "left"), ("", "fold")])
    rows.add_row("minimised", ", then ".join(asked.minimised))
    for bound in asked.bounds:
        rows.add_row(Text("✓ holds", style.GOOD) if bound.holds else Text("✗ broken", style.BAD), bound_text(bound))
    return style.section("goal", rows)


def bound_text(bound: BoundFacts) -> str:
    """`communication[data] 12.0 ms, at most 20.0 ms`, and by how much it is exceeded if it is."""
    value, limit = written(bound)
    excess = f": {format_ratio(bound.value / bound.limit)} as much" if not bound.holds and bound.limit else ""
    return f"{bound.figure} {value}, at most {limit}{excess}"


def written(bound: BoundFacts) -> tuple[str, str]:
    """The figure and its limit with their units: `12.0 ms`, `20.0 ms`."""
    write = format_bytes if bound.figure.endswith("memory") else format_seconds
    return write(bound.value), write(bound.limit)


def broken(report: Report) -> RenderableType | None:
    """A line for a plan that fits but breaks a bound; None for others."""
    bounds = [bound for bound in report.goal.bounds if not bound.holds]
    if not bounds or report.fit == NO:
        return None
    return Text(
        f"✗ no plan found keeps all bounds; this one exceeds them least: {'; '.join(map(bound_text, bounds))}",
        style.BAD,
    )
