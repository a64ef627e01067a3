"""The sections of a terminal report about shardings of arguments and results, folded by pattern."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from rich.console import RenderableType
from rich.text import Text

from toast_cli.folding import NamedArray, fold
from toast_cli.program.paths import slash_path
from toast_cli.quantities import (
    format_bytes,
    format_count,
    format_percent,
    format_plural,
    format_sharding,
    shorten_location,
    type_bytes,
)
from toast_cli.report import style
from toast_cli.report.model import ArgumentFacts, LiveValue, Report, ResultFacts

# What a report shows without --verbose.
SHORT_ARGUMENTS = 12

# Rows without --verbose.
SHORT_LIVE = 10
_NUMBER = re.compile(r"\d+")


def arguments(report: Report, width: int, verbose: bool) -> RenderableType:
    """Shardings of the stored arguments: the largest ones, folded by pattern, or all with `verbose`."""
    if verbose:
        rows = style.table([("", "right"), ("argument", "fold"), ("type", "left"), ("", "left"), ("sharding", "left")])
        for one in report.arguments:
            donated = "donated" if one.donated else ""
            rows.add_row(str(one.index), slash_path(one.name), one.type, donated, _sharding(one, report))
        return style.section("arguments", rows)
    return _folded("arguments", report.arguments, SHORT_ARGUMENTS, report, width)


def results(report: Report, width: int) -> RenderableType:
    return _folded("results", report.results, len(report.results), report, width)


def _folded(
    title: str, entries: Sequence[ArgumentFacts | ResultFacts], limit: int, report: Report, width: int
) -> RenderableType:
    """One row per pattern of equal type and sharding; of more than `limit`, those with the most bytes, in order."""
    folded = fold(
        [
            NamedArray(slash_path(one.name) or f"#{one.index}", (one.type, format_sharding(one.sharding)))
            for one in entries
        ]
    )
    sizes = [type_bytes(entries[row.members[0]].type) * len(row.members) for row in folded]
    largest = sorted(sorted(range(len(folded)), key=lambda number: -sizes[number])[:limit])
    facts = [
        (folded[number].pattern, len(folded[number].members), entries[folded[number].members[0]]) for number in largest
    ]
    rows = [
        (one.type, f"×{format_count(count)}" if count > 1 else "", format_sharding(one.sharding))
        for _, count, one in facts
    ]
    room = style.room(width, rows)
    drawn = style.table([("", "fold"), ("", "left"), ("", "right"), ("", "left")])
    stacked: list[RenderableType] = []
    for (pattern, _, one), (type_, times, _) in zip(facts, rows, strict=True):
        sharding = _sharding(one, report)
        drawn.add_row(_broken(pattern, room), type_, times, sharding)
        stacked += [pattern, style.indented(Text(" ").join([Text(f"{type_} {times}".strip()), sharding]))]
    hidden = len(folded) - len(largest)
    more = [Text(f"and {format_plural(hidden, 'smaller pattern')}; --verbose lists all", style.LABEL)] if hidden else []
    body = [drawn] if width >= style.NARROW else stacked
    return style.section(f"{title}, {format_count(len(entries))} in all", *body, *more)


def _broken(pattern: str, room: int) -> str:
    """A pattern too long for its column continues after its braces on a second line."""
    head, brace, tail = pattern.partition("}")
    return pattern if len(pattern) <= room or not tail else f"{head}{brace}\n  {tail}"


def _sharding(one: ArgumentFacts | ResultFacts, report: Report) -> Text:
    if not any(one.sharding):
        return Text(format_sharding(one.sharding), style.LABEL)
    return style.with_axes(format_sharding(one.sharding), list(report.mesh.axes))


def live_at_peak(report: Report, width: int, verbose: bool) -> RenderableType | None:
    """The arrays live at the memory peak: similar ones in one row, most bytes first."""
    live = with_slashes(report)
    if not live:
        return None
    peak = report.predicted.peak_bytes or 1
    folded = [(row.pattern, len(row.members), live[row.members[0]]) for row in fold([_alike(one) for one in live])]
    folded.sort(key=lambda row: -row[1] * row[2].bytes)
    shown = folded if verbose else folded[:SHORT_LIVE]
    rows = [
        (
            format_bytes(count * one.bytes),
            format_percent(count * one.bytes / peak),
            f"×{format_count(count)}" if count > 1 else "",
            one.role,
            one.type,
            name,
        )
        for name, count, one in shown
    ]
    room = style.room(width, rows)
    drawn = style.table(
        [
            ("bytes", "right"),
            ("", "right"),
            ("", "right"),
            ("role", "left"),
            ("type", "left"),
            ("array", "fold"),
            ("from", "fold"),
        ]
    )
    for (_, _, one), cells in zip(shown, rows, strict=True):
        drawn.add_row(*cells, shorten_location(one.location, room))
    where = f" ({report.predicted.peak_location})" if report.predicted.peak_location else ""
    rest = sum(count for _, count, _ in folded[len(shown) :])
    more = [Text(f"and {format_plural(rest, 'smaller one')}; --verbose lists all", style.LABEL)] if rest else []
    return style.section(f"alive at the peak{where}", drawn, *more)


def with_slashes(report: Report) -> list[LiveValue]:
    """The live values, with slashes in the paths of arguments."""
    paths = {one.name: slash_path(one.name) for one in report.arguments}
    return [replace(one, name=paths.get(one.name, one.name)) for one in report.predicted.live_at_peak]


def _alike(one: LiveValue) -> NamedArray:
    """The key of a row: arrays that are equal but for numbers in their path, or in the name stack of their maker."""
    return NamedArray(one.name, (one.role, one.type, one.bytes, _NUMBER.sub("*", one.location)))
