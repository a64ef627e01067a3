"""Shared parts of all pages: the frame with inlined styles and scripts, sections, tables, and chart data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

_SCRIPTS = ("draw.js", "points.js", "trees.js", "step.js")
_DIGITS = 7


def frame(title: str, about: str, body: str) -> bytes:
    """UTF-8 HTML."""
    scripts = "\n".join(map(_part, _SCRIPTS)) if "data-chart=" in body else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_part('page.css')}</style></head>\n<body><h1>{escape(title)}</h1>"
        f"<p class='faint'>{escape(about)}</p>\n{body}\n<script>{scripts}</script></body></html>\n"
    ).encode("utf-8", "backslashreplace")


def section(title: str, about: str, body: str) -> str:
    """A heading, a sentence that describes the body, and the body; empty for an empty body."""
    return f"<section><h2>{escape(title)}</h2><p class='faint'>{escape(about)}</p>{body}</section>" if body else ""


def chart(kind: str, label: str, data: Any) -> str:
    """The data of a chart, for the script of this kind; `label` is its text for screen readers."""
    numbers = json.dumps(_short(data), separators=(",", ":"), allow_nan=False)
    safe = numbers.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return (
        f'<figure class="chart" data-chart="{kind}" role="img" aria-label="{escape(label)}">'
        f'<script type="application/json">{safe}</script></figure>'
    )


def table(heads: Sequence[str], rows: Iterable[str], figures: Iterable[int] = ()) -> str:
    """A table of rows in markup (see `row`). heads: texts; figures: numbers of the numeric columns."""
    right = set(figures)
    cells = "".join(
        f"<th{' class=n' if number in right else ''}>{escape(head)}</th>" for number, head in enumerate(heads)
    )
    head = f"<tr>{cells}</tr>" if any(heads) else ""
    return f"<div class='scroll'><table>{head}{''.join(rows)}</table></div>"


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
