"""A report for people: a `Report` goes in, text for a terminal (or a log) comes out.

`print_report` shows all of it, `one_line` is the output of --quiet.
"""

from __future__ import annotations

from typing import TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from toast_cli.quantities import format_bytes, format_ratio, format_seconds
from toast_cli.report import arrays, sections, style
from toast_cli.report.alternatives import alternatives
from toast_cli.report.arrays import live_at_peak
from toast_cli.report.collectives import collectives
from toast_cli.report.confirmation import confirmation
from toast_cli.report.constraints import constraints, kernels
from toast_cli.report.model import NO, UNSURE, BoundFacts, GoalFacts, Report


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


def print_report(report: Report, stream: TextIO, *, verbose: bool = False, width: int | None = None) -> None:
    """Write the report to `stream`, as wide as it is (60 to 200 columns) unless `width` says otherwise."""
    stream.write(render_report(report, style.make_console(stream, width), verbose=verbose))
    stream.flush()


def render_report(report: Report, console: Console, *, verbose: bool = False) -> str:
    """The report as `console` would show it."""
    blocks = [block for block in _blocks(report, console.width, verbose) if block is not None]
    spaced: list[RenderableType] = []
    for block in blocks:
        spaced += [block, Text()]
    return style.render(spaced[:-1], console)


def one_line(report: Report) -> str:
    """Program, mesh, step time, memory and strategy on one line."""
    predicted = report.predicted
    words = {NO: "DOES NOT FIT, ", UNSURE: "MAY NOT FIT, "}
    verdict = words.get(report.fit, "") if report.met or report.fit == NO else "BREAKS A BOUND, "
    return (
        f"{report.program.name} on {report.mesh.name}: {verdict}{format_seconds(predicted.step_seconds)} a step, "
        f"{format_bytes(predicted.peak_bytes)} of {format_bytes(predicted.limit_bytes)}; "
        f"{report.plan.summary or 'unsharded'}"
    )


def _blocks(report: Report, width: int, verbose: bool) -> list[RenderableType | None]:
    """The sections in reading order; None for an empty one."""
    fits = report.fit != NO
    return [
        sections.header(report),
        sections.verdict(report),
        broken(report),
        sections.decisions(report, width),
        sections.prediction(report, width),
        goal(report),
        sections.comparison(report, width) if report.baselines else None,
        alternatives(report),
        confirmation(report),
        live_at_peak(report, width, verbose) if verbose or not fits else None,
        collectives(report, width, verbose),
        arrays.arguments(report, width, verbose),
        arrays.results(report, width) if verbose else None,
        kernels(report),
        constraints(report, verbose),
        sections.groups(report) if verbose else None,
        sections.notes(report, verbose),
        sections.statistics(report, verbose),
    ]
