"""The arrays live at the memory peak: facts go in, a section of the terminal report comes out."""

from __future__ import annotations

import re
from dataclasses import replace

from rich.console import RenderableType
from rich.text import Text

from toast_cli.folding import NamedArray, fold
from toast_cli.program.paths import slash_path
from toast_cli.quantities import format_bytes, format_count, format_percent, format_plural, shorten_location
from toast_cli.report import style
from toast_cli.report.model import LiveValue, Report

# Rows without --verbose.
SHORT_LIVE = 10
_NUMBER = re.compile(r"\d+")


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
