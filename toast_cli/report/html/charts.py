"""The data of the charts: facts in, markup with JSON out (`*.js` in this folder documents the field names)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from toast_cli.frontend.places import folded
from toast_cli.program.quantities import format_bytes, format_seconds
from toast_cli.report.html.frame import chart
from toast_cli.report.html.pictures import OTHERS, ROLES, Branch, Pictures, plain
from toast_cli.report.model import Report, strategy_label
from toast_cli.report.step import Slice, Step

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


def time_chart(drawn: Pictures) -> str:
    """Time by module, place and operation, in layers."""
    if not drawn.time.below:
        return ""
    return chart("icicle", "time of a step by module, place in the source and operation", _tree(drawn.time, "s"))


def alive_chart(drawn: Pictures) -> str:
    """The arrays live at the peak, as areas."""
    if not drawn.alive.below:
        return ""
    shown = {part.kind for part in drawn.alive.below.values()}
    legend = [[words, role] for role, words in ROLES.items() if role in shown]
    return chart(
        "treemap", "arrays alive at the peak by kind and module", {**_tree(drawn.alive, "B"), "legend": legend}
    )


def _tree(root: Branch, unit: str) -> dict[str, Any]:
    return {"unit": unit, "root": plain(root)}


def strategies_chart(report: Report) -> str:
    """The plan and the known strategies: memory to the right, time upwards."""
    predicted = report.predicted
    rows = [
        (strategy_label(name, one.axes, one.mesh), one.peak_bytes, one.step_seconds, one.fits)
        for name, one in report.baselines.items()
    ]
    points = [plan_point(name, peak, seconds, fits, "strategy") for name, peak, seconds, fits in rows]
    own = plan_point("this plan", predicted.peak_bytes, predicted.step_seconds, predicted.fits, "search")
    legend = [["this plan", "search"], ["strategies", "strategy"]]
    return plans_chart([*points, {**own, "big": True}], predicted.limit_bytes, legend)


def plan_point(
    name: str, peak: float, seconds: float, fits: bool, kind: str, more: Sequence[str] = ()
) -> dict[str, Any]:
    """One plan between memory and time; a cross where it does not fit."""
    words = [name, f"{format_seconds(seconds)} a step", f"{format_bytes(peak)} at the peak", *more]
    return {"x": peak, "y": seconds, "n": name, "k": kind, "bad": not fits, "lines": words}


MEMORY_AXIS, TIME_AXIS = ("peak memory of a device", "B"), ("step time", "s")  # of a chart: words, unit


def plans_chart(
    points: Sequence[dict[str, Any]],
    limit: float,
    legend: list[list[str]],
    lines: Sequence[dict[str, Any]] = (),
    axes: tuple[tuple[str, str], tuple[str, str]] = (MEMORY_AXIS, TIME_AXIS),
) -> str:
    """Plans by peak memory and step time, or by what `axes` says, with a limit of the first (0: none)."""
    seen = [point for point in points if point["x"] > 0 and point["y"] > 0]
    if not seen:
        return ""
    times = [point["y"] for point in seen]
    near = 0 < limit < _NEAR * max(point["x"] for point in seen)
    bound = {"n": "limit", "k": "limit", "at": [limit, max(times)],
             "points": [[limit, min(times) / _FAR], [limit, max(times) * _FAR]]}  # fmt: skip
    data: dict[str, Any] = {
        **{name: {"words": words, "unit": unit} for name, (words, unit) in zip("xy", axes, strict=True)},
        "points": seen, "lines": [*lines, *([bound] if near else [])],
        "seen": [[limit, max(times)]] if near else [], "legend": legend,
    }  # fmt: skip
    return chart("points", "plans by peak memory and step time", data)


def front_line(plans: Iterable[tuple[float, float]]) -> list[dict[str, Any]]:
    """The Pareto front of plans, each as (peak bytes, step seconds), as a line of steps."""
    best: list[tuple[float, float]] = []
    for peak, seconds in sorted(plans):
        if not best or seconds < best[-1][1]:
            best.append((peak, seconds))
    if not best:
        return []
    path: list[list[float]] = []
    for peak, seconds in best:
        path += [*([[peak, path[-1][1]]] if path else []), [peak, seconds]]
    return [{"n": "", "k": "front", "points": [*path, [best[-1][0] * _FAR, best[-1][1]]]}]
