"""Arguments of a run as one table, folded by pattern; sharded arrays have a drawing, replicated ones none."""

from __future__ import annotations

from html import escape
from math import prod

from toast_cli.folding import NamedArray, fold
from toast_cli.program.paths import slash_path
from toast_cli.quantities import format_bytes, format_plural, format_sharding, type_bytes
from toast_cli.report.html import frame
from toast_cli.report.html.tiles import axis_colours, tile
from toast_cli.report.model import ArgumentFacts, Report

_SHOWN = 16  # rows that are not folded away


def arguments(report: Report) -> str:
    """The largest patterns, and the others folded away."""
    entries = [
        NamedArray(slash_path(one.name) or f"#{one.index}", (one.type, format_sharding(one.sharding)))
        for one in report.arguments
    ]
    folded = [(row.pattern, len(row.members), report.arguments[row.members[0]]) for row in fold(entries)]
    folded.sort(key=lambda row: -row[1] * type_bytes(row[2].type))
    rows = [_row(pattern, count, one, report.mesh.axes) for pattern, count, one in folded]
    if not rows:
        return ""
    colours = axis_colours(report.mesh.axes)
    legend = " ".join(axis_badge(name, colours) for name in report.mesh.axes)
    shown, rest = rows[:_SHOWN], rows[_SHOWN:]
    if len(rest) == 1:
        shown, rest = rows, []
    more = frame.fold(f"{format_plural(len(rest), 'smaller pattern')}", _table(rest)) if rest else ""
    return f"<p>cut by {legend}</p>{_table(shown)}{more}"


def axis_badge(name: str, colours: dict[str, str]) -> str:
    """The name of a mesh axis on its colour."""
    return f"<span class='axis' style='background:{colours[name]}'>{escape(name)}</span>"


def _table(rows: list[str]) -> str:
    return frame.table(("", "argument", "", "type", "sharding", "whole", "on each device"), rows, (5, 6))


def _row(pattern: str, count: int, one: ArgumentFacts, axes: dict[str, int]) -> str:
    whole = type_bytes(one.type) * count
    pieces = prod(axes[name] for names in one.sharding for name in names)
    drawing = tile(_shape(one.type), one.sharding, axes) if pieces > 1 else ""
    sharding = escape(format_sharding(one.sharding)) if pieces > 1 else "<span class='faint'>whole</span>"
    return (
        f"<tr><td>{drawing}</td><td class='wide'><code>{escape(pattern)}</code></td>"
        f"<td class='n'>{f'× {count}' if count > 1 else ''}</td><td><code>{escape(one.type)}</code></td>"
        f"<td>{sharding}</td><td class='n'>{format_bytes(whole)}</td>"
        f"<td class='n'>{format_bytes(whole / pieces)}</td></tr>"
    )


def _shape(type_: str) -> list[int]:
    """`f32[16,8]` -> [16, 8]."""
    inside = type_.partition("[")[2].rstrip("]")
    return [int(size) for size in inside.split(",")] if inside else []
