"""The HTML page of a run: the sections of the terminal's report, with a chart of the step above them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from toast_cli.frontend.places import folded
from toast_cli.program.quantities import format_plural, format_seconds
from toast_cli.report import terminal
from toast_cli.report.html.pictures import OTHERS, Pictures
from toast_cli.report.model import Report
from toast_cli.report.step import Slice, Step
from toast_cli.report.style import BAD, BAR, GOOD, TITLE
from toast_cli.report.words import ALIVE

WIDE = 10_000  # columns: nothing of a terminal's section is left out
_SHOWN = 16  # rows of a table
_SCRIPTS = ("draw.js", "step.js")
_DIGITS = 7
_STEP = (
    "One step on each device, in the program's order and with nothing overlapped; a loop is there once, as long as all "
    "its trips. What is lighter may hide behind compute. Drag to zoom, double click for the whole step."
)


def run_page(report: Report, drawn: Pictures) -> bytes:
    """UTF-8 HTML, scripts and styles inside."""
    picture = step_chart(report, drawn)
    body = []
    for block in terminal.blocks(report, WIDE, verbose=True):
        heading, parts = titled(block)
        markup = "".join(from_terminal(part) for part in parts)
        about, above = (_STEP, picture) if picture and heading.startswith("predicted") else ("", "")
        body.append(section(heading, about, above + markup))
    return frame(f"{report.program.title} on {report.mesh.name}", "\n".join(filter(None, body)))


# ---------------------------------------------------------------- the chart
# Its data: facts in, markup with JSON out (`step.js` documents the field names).

# Maximum number of separate slices of a step; shorter slices than this fraction are merged with their neighbours.
_SLICES = 8000


def step_chart(report: Report, drawn: Pictures) -> str:
    """Memory over one step, with its compute and communication."""
    step, memory = drawn.step, drawn.memory
    if not step.slices:
        return ""
    names, places, modules = dict[str, int](), dict[str, int](), dict[str, int]()  # text -> its number
    bands: list[str] = []
    tops: list[str] = []
    kinds = {name: f"k{number}" for number, name in enumerate(name for name in memory.by_module if name != OTHERS)}
    columns: dict[str, list[Any]] = {
        name: [] for name in ("lane", "start", "long", "name", "place", "module", "runs", "hides")
    }
    for part in sorted(_merged(step), key=lambda part: part.start):
        path = drawn.modules.of(part.op)
        module = modules.setdefault("/".join(path), len(modules))
        if module == len(bands):
            shown = folded(path)  # in the band of the smallest module around it that has one
            heads = ("/".join(shown[:depth]) for depth in range(len(shown), 0, -1))
            bands.append(next((kinds[head] for head in heads if head in kinds), "others"))
            tops.append(next((name for name in path if folded((name,)) != (name,)), path[-1]))
        name = names.setdefault(part.name, len(names))
        place = places.setdefault(drawn.places[part.op], len(places))
        row = (part.lane, part.start, part.seconds, name, place, module, part.runs, int(part.hides))
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    role_kinds = {words: role for role, words in ALIVE.items()}
    views = {
        "by module": {name: {"k": kinds.get(name, "others"), "v": sizes} for name, sizes in memory.by_module.items()},
        "by kind": {name: {"k": role_kinds[name], "v": sizes} for name, sizes in memory.by_role.items()},
    }
    predicted = report.predicted
    data = {
        "seconds": step.seconds, "lanes": step.lanes, "names": list(names), "places": list(places),
        "modules": list(modules), "bands": bands, "tops": tops, "slices": columns,
        "memory": {"moments": memory.moments, "limit": predicted.limit_bytes, "peak": predicted.peak_bytes,
                   "views": {name: view for name, view in views.items() if view}},
    }  # fmt: skip
    label = f"memory, compute and communication over one step of {format_seconds(step.seconds)}"
    return chart(label, data)


def _merged(step: Step) -> Iterator[Slice]:
    """The slices; those too short to be visible at any useful zoom are merged, lane by lane."""
    least = step.seconds / _SLICES
    waiting: dict[int, Slice] = {}
    for part in step.slices:
        last = waiting.pop(part.lane, None)
        if last is not None and last.seconds < least and part.seconds < least:
            part = replace(last, seconds=last.seconds + part.seconds, runs=last.runs + part.runs, name="several")
        elif last is not None:
            yield last
        waiting[part.lane] = part
    yield from waiting.values()


# ---------------------------------------------------------------- the frame, sections, tables, and data of charts


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
