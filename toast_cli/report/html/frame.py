"""Shared parts of all pages: the frame with inlined styles and scripts, sections, tables, and chart data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from toast_cli.program.quantities import format_plural
from toast_cli.report.style import BAD, BAR, GOOD, TITLE

WIDE = 10_000  # columns: nothing of a terminal's section is left out
_SHOWN = 16  # rows of a table
_SCRIPTS = ("draw.js", "step.js")
_DIGITS = 7


def frame(title: str, body: str) -> bytes:
    """UTF-8 HTML."""
    scripts = "\n".join(map(_part, _SCRIPTS)) if "data-chart=" in body else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_part('page.css')}</style></head>\n<body><h1>{escape(title)}</h1>"
        f"\n{body}\n<script>{scripts}</script></body></html>\n"
    ).encode("utf-8", "backslashreplace")


def section(title: str, about: str, body: str) -> str:
    """The body beneath a heading and a sentence, if there are these; empty for an empty body."""
    heading = f"<h2>{escape(title)}</h2>" if title else ""
    words = f"<p class='faint'>{escape(about)}</p>" if about else ""
    return f"<section>{heading}{words}{body}</section>" if body else ""


def chart(label: str, data: Any) -> str:
    """The data of the step's chart, for `step.js`; `label` is its text for screen readers."""
    numbers = json.dumps(_short(data), separators=(",", ":"), allow_nan=False)
    safe = numbers.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return (
        f'<figure class="chart" data-chart="step" role="img" aria-label="{escape(label)}">'
        f'<script type="application/json">{safe}</script></figure>'
    )


def titled(drawn: RenderableType | None) -> tuple[str, Sequence[RenderableType | None]]:
    """The title of a section of the terminal's report, empty if it has none, and what stands beneath it."""
    if isinstance(drawn, Group) and isinstance(first := drawn.renderables[0], Text):
        return first.plain, drawn.renderables[1:]
    return "", [drawn]


def from_terminal(drawn: RenderableType | None) -> str:
    """A part of the terminal's report in markup; rows of a table beyond `_SHOWN` are folded away."""
    if isinstance(drawn, Group):
        return "".join(from_terminal(part) for part in drawn.renderables)
    if isinstance(drawn, Padding):
        return from_terminal(drawn.renderable)
    if isinstance(drawn, Text):
        return f"<p class='faint'>{_cell(drawn)}</p>" if drawn else ""
    if not isinstance(drawn, Table):
        return ""
    kinds = [
        " class='n'" if c.justify == "right" else " class='wide'" if c.overflow == "fold" else "" for c in drawn.columns
    ]
    heads = [escape(str(column.header)) for column in drawn.columns]

    def row(tag: str, cells: Iterable[str]) -> str:
        return f"<tr>{''.join(f'<{tag}{kind}>{cell}</{tag}>' for kind, cell in zip(kinds, cells, strict=True))}</tr>"

    def table(rows: Sequence[str]) -> str:
        return f"<div class='scroll'><table>{row('th', heads) if any(heads) else ''}{''.join(rows)}</table></div>"

    rows = [row("td", map(_cell, cells)) for cells in zip(*(column.cells for column in drawn.columns), strict=True)]
    rest = rows[_SHOWN:]
    return table(rows[:_SHOWN]) + (fold(format_plural(len(rest), "more row"), table(rest)) if rest else "")


def _cell(cell: RenderableType) -> str:
    if set(str(cell)) <= set(BAR):  # drawn for a terminal
        return ""
    text = escape(str(cell)).replace("\n", "<br>")
    look = str(cell.style) if isinstance(cell, Text) else ""
    kind = {BAD: "bad", GOOD: "good", TITLE: "best"}.get(look)
    return f"<span class='{kind}'>{text}</span>" if kind else text


def fold(summary: str, body: str) -> str:
    """A body that is folded away until opened."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _short(data: Any) -> Any:
    """Rounds numbers to the digits that a picture needs; NaN and infinity become null."""
    if isinstance(data, float):
        return float(f"{data:.{_DIGITS}g}") if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _short(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_short(value) for value in data]
    return data
