"""The HTML page of a run: the sections of the terminal's report, with a chart of the step above them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from toast_cli.frontend.places import folded
from toast_cli.program.quantities import format_seconds
from toast_cli.report import terminal
from toast_cli.report.html.frame import WIDE, chart, frame, from_terminal, section, titled
from toast_cli.report.html.pictures import OTHERS, Pictures
from toast_cli.report.model import Report
from toast_cli.report.step import Slice, Step
from toast_cli.report.words import ALIVE

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
