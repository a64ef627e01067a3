"""Sections of a terminal report about arrays: shardings of arguments and results, folded by pattern; collectives and
their causes; constraints to paste.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rich.console import RenderableType
from rich.text import Text

from toast_cli.frontend.places import around, folded
from toast_cli.plan.partitioned import CollectiveFacts
from toast_cli.program.names import slash_path
from toast_cli.program.quantities import (
    NamedArray,
    fold,
    format_bytes,
    format_count,
    format_percent,
    format_plural,
    format_seconds,
    format_sharding,
    join_location,
    shorten_location,
    split_location,
    type_bytes,
)
from toast_cli.report import style
from toast_cli.report.model import ArgumentFacts, LiveValue, Report, ResultFacts
from toast_cli.report.step import NOWHERE
from toast_cli.report.words import rows_of

# ---------------------------------------------------------------- shardings
# The sections of a terminal report about shardings of arguments and results, folded by pattern.

# What a report shows without --verbose.
SHORT_ARGUMENTS = 12

# Rows without --verbose.
SHORT_LIVE = 10
_NUMBER = re.compile(r"\d+")


def arguments(report: Report, verbose: bool = False) -> RenderableType:
    """Shardings of the stored arguments: the largest ones, folded by pattern, or all with `verbose`."""
    if verbose:
        rows = style.table([("", "right"), ("argument", "fold"), ("type", "left"), ("", "left"), ("sharding", "left")])
        for a in report.arguments:
            donated = "donated" if a.donated else ""
            rows.add_row(str(a.index), slash_path(a.name), a.type, donated, _sharding(a, report))
        return style.section("arguments", rows)
    return _folded("arguments", report.arguments, SHORT_ARGUMENTS, report)


def results(report: Report) -> RenderableType:
    return _folded("results", report.results, len(report.results), report)


def _folded(title: str, entries: Sequence[ArgumentFacts | ResultFacts], limit: int, report: Report) -> RenderableType:
    """One row per pattern of equal type and sharding; of more than `limit`, those with the most bytes, in order."""
    folded = fold(
        [
            NamedArray(slash_path(entry.name) or f"#{entry.index}", (entry.type, format_sharding(entry.sharding)))
            for entry in entries
        ]
    )
    sizes = [type_bytes(entries[row.members[0]].type) * len(row.members) for row in folded]
    largest = sorted(sorted(range(len(folded)), key=lambda number: -sizes[number])[:limit])
    drawn = style.table([("", "fold"), ("", "left"), ("", "right"), ("", "fold")])
    for row, entry in ((folded[number], entries[folded[number].members[0]]) for number in largest):
        drawn.add_row(row.pattern, entry.type, style.times(len(row.members)), _sharding(entry, report))
    hidden = len(folded) - len(largest)
    more = style.more(hidden, "smaller pattern")
    return style.section(f"{title}, {format_count(len(entries))} in all", drawn, *more)


def _sharding(entry: ArgumentFacts | ResultFacts, report: Report) -> Text:
    if not any(entry.sharding):
        return Text(format_sharding(entry.sharding), style.LABEL)
    return style.with_axes(format_sharding(entry.sharding), list(report.mesh.axes))


def live_at_peak(report: Report, width: int, verbose: bool) -> RenderableType | None:
    """The arrays live at the memory peak: similar ones in one row, most bytes first."""
    paths = {array.name: slash_path(array.name) for array in report.arguments}
    live = [replace(array, name=paths.get(array.name, array.name)) for array in report.predicted.live_at_peak]
    if not live:
        return None
    peak = report.predicted.peak_bytes or 1
    folded = [(row.pattern, len(row.members), live[row.members[0]]) for row in fold([_alike(array) for array in live])]
    folded.sort(key=lambda row: -row[1] * row[2].bytes)
    shown = folded if verbose else folded[:SHORT_LIVE]
    rows = [
        (
            format_bytes(count * array.bytes),
            format_percent(count * array.bytes / peak),
            style.times(count),
            array.role,
            array.type,
            name,
        )
        for name, count, array in shown
    ]
    room = style.room(width, rows)
    heads = [("bytes", "right"), ("", "right"), ("", "right"), ("role", "left"), ("type", "left"), ("array", "fold")]
    cells = [[*row, shorten_location(array.location, room)] for (_, _, array), row in zip(shown, rows, strict=True)]
    drawn = style.fitted([*heads, ("from", "fold")], cells, width, spare=((1,), (3,), (6,)))
    where = f" ({report.predicted.peak_location})" if report.predicted.peak_location else ""
    rest = sum(count for _, count, _ in folded[len(shown) :])
    return style.section(f"alive at the peak{where}", drawn, *style.more(rest, "smaller one"))


def _alike(array: LiveValue) -> NamedArray:
    """The key of a row: arrays that are equal but for numbers in their path, or in the name stack of their maker."""
    return NamedArray(array.name, (array.role, array.type, array.bytes, _NUMBER.sub("*", array.location)))


# ---------------------------------------------------------------- collectives
# The section of a terminal report about collectives: those that take longest, and their causes in the source.

# What a report shows without --verbose.
SHORT_COLLECTIVES = 6
# Lines of the source that a report shows without --verbose.
SHORT_LINES = 5
# Prefix of the place of collectives in manual regions.
BY_HAND = "manual: "


def time_by_line(report: Report, width: int, verbose: bool) -> RenderableType | None:
    """The modules and lines of the source that take longest."""
    shown = report.time_by_line if verbose else report.time_by_line[:SHORT_LINES]
    if not shown:
        return None
    columns = [("", "right"), ("time", "right"), ("line", "name"), ("module", "name"), ("mostly", "left")]
    rows = [
        [format_percent(line.share), format_seconds(line.seconds), line.location or NOWHERE, line.module, line.mostly]
        for line in shown
    ]
    return style.section(
        "where the time goes, compute and communication before overlap", style.fitted(columns, rows, width, [(4,)])
    )


def collectives(report: Report, width: int, verbose: bool) -> RenderableType:
    """The collectives that take longest, numbered as in `toast explain --collective`, and their causes."""
    ordered = merged_collectives(report.collectives)
    if not ordered:
        return style.section("collectives", Text("none: the devices never communicate"))
    shown = ordered if verbose else ordered[:SHORT_COLLECTIVES]
    heads = [("", "right"), ("kind", "left"), ("axes", "left"), ("", "right"), ("time", "right"), ("result", "right")]
    rows = [
        (
            str(number),
            collective.kind,
            "+".join(collective.axes),
            f"×{format_count(collective.count)}",
            format_seconds(collective.seconds),
            format_bytes(collective.bytes),
        )
        for number, collective in enumerate(shown, start=1)
    ]
    room = style.room(width, rows)
    cells: list[list[str | Text]] = []
    for collective, (number, kind, axes, *figures) in zip(shown, rows, strict=True):
        hand = BY_HAND if collective.by_hand else ""
        cause = hand + _cause(collective, room - len(hand))
        cells.append([number, kind, style.with_axes(axes, list(report.mesh.axes)), *figures, cause])
    drawn = style.fitted([*heads, ("caused by", "fold")], cells, width, spare=((5,),))
    total = f"{format_count(sum(collective.count for collective in ordered))} a step"
    rest = "" if len(shown) == len(ordered) else ", those that take longest"
    return style.section(f"collectives, {total}{rest}", drawn)


def _cause(collective: CollectiveFacts, room: int) -> str:
    """`layer_*/mlp (bwd dot_general), model.py:51 ffn`: the module, and the user's own line on the same line or the
    next if it fits there; the line alone if the program has no modules."""
    place, passes, path = split_location(collective.location)
    if not collective.module:
        return shorten_location(collective.location or "(unknown)", room)
    names, line = join_location(collective.module, passes, path.rpartition("/")[2]), place.partition(" → ")[0]
    if collective.in_library or max(len(names), len(line)) > room:
        return names
    return f"{names}, {line}" if len(f"{names}, {line}") <= room else f"{names}\n{line}"


def merged_collectives(collectives: Sequence[CollectiveFacts]) -> list[CollectiveFacts]:
    """Collectives merged that look the same to a reader, those that take longest first."""
    rows = [[collectives[k] for k in row] for row in rows_of(collectives)]
    return [
        replace(
            row[0],
            count=sum(collective.count for collective in row),
            seconds=sum(collective.seconds for collective in row),
            location=_shared_location([collective.location for collective in row]),
            module=around(path.split("/") for collective in row for path in collective.module.split(", ")),
        )
        for row in rows
    ]


def _shared_location(locations: Sequence[str]) -> str:
    """The common place of collectives of one row: one place, all passes, and the path if it differs only in layers."""
    if len(set(locations)) == 1:
        return locations[0]
    places, passes, paths = zip(*map(split_location, locations), strict=True)
    path, *others = {"/".join(folded(path.split("/"))) for path in paths}
    return join_location(places[0], "+".join(filter(None, dict.fromkeys(passes))), "" if others else path)


# ---------------------------------------------------------------- constraints
# The section of a terminal report about constraints: the lines to paste.

# Lines of kernels that a report shows.
SHORT_CONSTRAINTS = 6
# Prefix of every line to paste; a report has no room for it.
JAX = "x = jax.lax."
KERNEL = "kernel"


def constraints(report: Report, verbose: bool) -> RenderableType | None:
    """The number of constraints in the written program; with `verbose`, the lines to paste for users who keep their own
    program, without duplicates."""
    placed = [constraint for constraint in report.constraints if constraint.place != KERNEL]
    if not placed:
        return None
    title = f"{format_plural(len(placed), 'sharding constraint')} inside the written program"
    if not verbose:
        return Text(f"{title}, nothing to do by hand; --verbose lists them", style.LABEL)
    alike = Counter((_place(constraint.location), constraint.type, constraint.line) for constraint in placed)
    rows = [(style.times(count), _line_to_paste(report, *key)) for key, count in alike.items()]
    drawn = style.table([("", "right"), ("", "fold")], rows)
    return style.section(title, drawn)


def _place(location: str) -> str:
    """The source line without the name stack."""
    return location.partition(" (")[0] or "(unknown)"


def _line_to_paste(report: Report, place: str, type_: str, line: str) -> Text:
    """The place of a constraint, and its line."""
    return Text(f"{place}, {type_}\n").append_text(style.with_axes(line.removeprefix(JAX), list(report.mesh.axes)))


def kernels(report: Report) -> RenderableType | None:
    """The sharded kernels, and the equivalent lines of JAX."""
    calls = [call for call in report.constraints if call.place == KERNEL]
    if not calls:
        return None
    rows = [[_line_to_paste(report, _place(call.location), call.type, call.line)] for call in calls[:SHORT_CONSTRAINTS]]
    drawn = style.table([("", "fold")], rows)
    rest = len(calls) - SHORT_CONSTRAINTS
    more = [Text(f"and {format_count(rest)} more; the JSON report lists all", style.LABEL)] if rest > 0 else []
    return style.section("hand-written kernels on parts, and the same in JAX", drawn, *more)
