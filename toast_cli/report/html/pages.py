"""The HTML page of a run: the sections of the terminal's report, with charts above them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rich.console import RenderableType

from toast_cli.frontend.places import folded
from toast_cli.program.quantities import format_bytes, format_seconds
from toast_cli.report import terminal
from toast_cli.report.html.frame import WIDE, chart, frame, from_terminal, section, titled
from toast_cli.report.html.pictures import OTHERS, ROLES, Pictures
from toast_cli.report.model import Report, strategy_label
from toast_cli.report.step import Slice, Step

_PLANS = "Each point is a plan: the faster the lower, the less memory the further left; a cross does not fit."


def run_page(report: Report, drawn: Pictures) -> bytes:
    """UTF-8 HTML, scripts and styles inside."""
    above = {
        "predicted": (
            "One step on each device, in the program's order and with nothing overlapped; a loop is there once, as "
            "long as all its trips. What is lighter may hide behind compute. Drag to zoom, double click for the whole "
            "step.",
            step_chart(report, drawn),
        ),
        "compared with": (_PLANS, strategies_chart(report)),
    }
    return _page(f"{report.program.title} on {report.mesh.name}", terminal.blocks(report, WIDE, verbose=True), above)


def _page(
    title: str, blocks: Iterable[RenderableType | None], above: Mapping[str, tuple[str, str]], shown: int = 16
) -> bytes:
    """A page of the terminal's blocks.

    Args:
        above: start of a block's title -> a sentence, and the chart that stands above the block; in the first such
            block. shown: rows of each table; the rest is folded away.
    """
    body, waiting = [], dict(above)
    for block in blocks:
        heading, parts = titled(block)
        start = next((start for start in waiting if heading.startswith(start)), None)
        about, drawn = ("", "") if start is None else waiting.pop(start)
        markup = "".join(from_terminal(part, shown) for part in parts)
        body.append(section(heading, about if drawn else "", drawn + markup))
    return frame(title, "\n".join(filter(None, body)))


# ---------------------------------------------------------------- charts
# The data of the charts: facts in, markup with JSON out (`*.js` in this folder documents the field names).

# Maximum number of separate slices of a step; shorter slices than this fraction are merged with their neighbours.
_SLICES = 8000
# Lines extend beyond the visible range. A limit is shown if the largest plan takes at least this fraction of it.
_FAR, _NEAR = 1e6, 6.0


class _Numbers:
    """Interns texts as numbers."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def of(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]


def step_chart(report: Report, drawn: Pictures) -> str:
    """Memory over one step, with its compute and communication."""
    step, memory = drawn.step, drawn.memory
    if not step.slices:
        return ""
    names, places, modules = _Numbers(), _Numbers(), _Numbers()
    bands: list[str] = []
    tops: list[str] = []
    kinds = {name: f"k{number}" for number, name in enumerate(name for name in memory.by_module if name != OTHERS)}
    columns: dict[str, list[Any]] = {
        name: [] for name in ("lane", "start", "long", "name", "place", "module", "runs", "hides")
    }
    for one in sorted(_merged(step), key=lambda one: one.start):
        path = drawn.modules.of(one.op)
        module = modules.of("/".join(path))
        if module == len(bands):
            bands.append(_band(folded(path), kinds))
            tops.append(next((name for name in path if folded((name,)) != (name,)), path[-1]))
        row = (one.lane, one.start, one.seconds, names.of(one.name), places.of(drawn.places[one.op]), module)
        for column, value in zip(columns.values(), (*row, one.runs, int(one.hides)), strict=True):
            column.append(value)
    role_kinds = {words: role for role, words in ROLES.items()}
    views = {
        "by module": {name: {"k": kinds.get(name, "others"), "v": sizes} for name, sizes in memory.by_module.items()},
        "by kind": {name: {"k": role_kinds[name], "v": sizes} for name, sizes in memory.by_role.items()},
    }
    predicted = report.predicted
    data = {
        "seconds": step.seconds, "lanes": step.lanes, "names": names.texts, "places": places.texts,
        "modules": modules.texts, "bands": bands, "tops": tops, "slices": columns,
        "memory": {"moments": memory.moments, "limit": predicted.limit_bytes, "peak": predicted.peak_bytes,
                   "views": {name: view for name, view in views.items() if view}},
    }  # fmt: skip
    label = f"memory, compute and communication over one step of {format_seconds(step.seconds)}"
    return chart("step", label, data)


def _band(path: tuple[str, ...], kinds: dict[str, str]) -> str:
    """The colour of the memory band that contains the module."""
    heads = ("/".join(path[:depth]) for depth in range(len(path), 0, -1))
    return next((kinds[head] for head in heads if head in kinds), "others")


def _merged(step: Step) -> Iterator[Slice]:
    """The slices; those too short to be visible at any useful zoom are merged, lane by lane."""
    least = step.seconds / _SLICES
    waiting: dict[int, Slice] = {}
    for one in step.slices:
        held = waiting.pop(one.lane, None)
        if held is not None and held.seconds < least and one.seconds < least:
            one = replace(held, seconds=held.seconds + one.seconds, runs=held.runs + one.runs, name="several")
        elif held is not None:
            yield held
        waiting[one.lane] = one
    yield from waiting.values()


def strategies_chart(report: Report) -> str:
    """The plan and the known strategies: memory to the right, time upwards, with the limit of memory."""
    predicted, limit = report.predicted, report.predicted.limit_bytes
    points = [
        _point(strategy_label(name, one.axes, one.mesh), one.peak_bytes, one.step_seconds, one.fits, "strategy")
        for name, one in report.baselines.items()
    ]
    points.append(
        _point("this plan", predicted.peak_bytes, predicted.step_seconds, predicted.fits, "search") | {"big": True}
    )
    seen = [point for point in points if point["x"] > 0 and point["y"] > 0]
    if not seen:
        return ""
    times = [point["y"] for point in seen]
    near = 0 < limit < _NEAR * max(point["x"] for point in seen)
    bound = {"n": "limit", "k": "limit", "at": [limit, max(times)],
             "points": [[limit, min(times) / _FAR], [limit, max(times) * _FAR]]}  # fmt: skip
    data: dict[str, Any] = {
        "x": {"words": "peak memory of a device", "unit": "B"}, "y": {"words": "step time", "unit": "s"},
        "points": seen, "lines": [bound] if near else [], "seen": [[limit, max(times)]] if near else [],
        "legend": [["this plan", "search"], ["strategies", "strategy"]],
    }  # fmt: skip
    return chart("points", "plans by peak memory and step time", data)


def _point(name: str, peak: float, seconds: float, fits: bool, kind: str) -> dict[str, Any]:
    words = [name, f"{format_seconds(seconds)} a step", f"{format_bytes(peak)} at the peak"]
    return {"x": peak, "y": seconds, "n": name, "k": kind, "bad": not fits, "lines": words}
