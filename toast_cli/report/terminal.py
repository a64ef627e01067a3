"""A report for people: a `Report` goes in, text for a terminal (or a log) comes out.

`print_report` shows all of it, `one_line` is the output of --quiet.
"""

from __future__ import annotations

from typing import TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from toast_cli.quantities import format_bytes, format_seconds
from toast_cli.report import arrays, sections, style
from toast_cli.report.alternatives import alternatives
from toast_cli.report.collectives import collectives
from toast_cli.report.confirmation import confirmation
from toast_cli.report.constraints import constraints, kernels
from toast_cli.report.goal import broken, goal
from toast_cli.report.live import live_at_peak
from toast_cli.report.model import NO, UNSURE, Report


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
