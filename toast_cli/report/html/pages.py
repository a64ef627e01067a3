"""One HTML page for a run, a comparison or a sweep: the sections of the terminal's report, with charts above them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import RenderableType

from toast_cli.frontend.places import folded
from toast_cli.program.quantities import format_bytes, format_plural, format_price, format_seconds
from toast_cli.report import terminal
from toast_cli.report.command_tables import DOES_NOT_FIT, FITS, SweepRow, sweep_blocks
from toast_cli.report.comparison import ANNOTATED, Comparison, Contender, comparison_blocks
from toast_cli.report.html.frame import WIDE, chart, frame, from_terminal, section, titled
from toast_cli.report.html.pictures import OTHERS, ROLES, Branch, Pictures, plain
from toast_cli.report.model import Report, strategy_label
from toast_cli.report.step import Slice, Step

_PLANS = (
    "Each point is a plan: the faster the lower, the less memory or the cheaper the further left; a cross does not fit."
)


def run_page(report: Report, drawn: Pictures) -> bytes:
    """UTF-8 HTML, scripts and styles inside."""
    above = {
        "predicted": (
            "One step on each device, in the program's order and with nothing overlapped; a loop is there once, as "
            "long as all its trips. What is lighter may hide behind compute. Drag to zoom, double click for the whole "
            "step.",
            step_chart(report, drawn),
        ),
        "where the time goes": (
            "By module, place in the source and operation. Blue computes, orange communicates. Click to go in.",
            time_chart(drawn),
        ),
        "alive at the peak": ("By kind and module. Click to go in.", alive_chart(drawn)),
        "compared with": (_PLANS, strategies_chart(report)),
    }
    return _page(f"{report.program.title} on {report.mesh.name}", terminal.blocks(report, WIDE, verbose=True), above)


def comparison_page(found: Comparison) -> bytes:
    """The same for a comparison: time against memory with the Pareto front, and the tables."""
    head = f"{found.program.title} on {found.mesh.name}"
    above = {head: (_PLANS, _comparison_chart(found))}
    return _page(
        f"{head}: plans compared", comparison_blocks(found, WIDE, verbose=True), above, 2 * len(found.contenders)
    )


def sweep_page(rows: Sequence[SweepRow]) -> bytes:
    """The same for a sweep: all its points."""
    about = f"{format_plural(len(rows), 'point')}. {_PLANS}"
    return _page("Sweep", sweep_blocks(rows, WIDE), {"": (about, _sweep_chart(rows))}, len(rows))


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


def _comparison_chart(found: Comparison) -> str:
    points = [
        {
            **plan_point(one.label, one.peak_bytes, one.step_seconds, one.fits, one.kind, _more(one)),
            "big": one.best or one.kind == "search",
        }
        for one in found.contenders
    ]
    front = front_line((one.peak_bytes, one.step_seconds) for one in found.contenders if one.front)
    legend = [["the search", "search"], ["strategies", "strategy"], ["unsharded", "unsharded"], ["front", "front"]]
    if any(one.kind == ANNOTATED for one in found.contenders):
        legend.insert(2, ["as annotated", ANNOTATED])
    return plans_chart(points, found.limit_bytes, legend, front)


def _more(one: Contender) -> list[str]:
    split = f"compute {format_seconds(one.compute_seconds)}, communication {format_seconds(one.communication_seconds)}"
    return [split, one.summary]


_COLOURS = 8  # meshes with a colour of their own


def _sweep_chart(rows: Sequence[SweepRow]) -> str:
    """Time against price, or against memory where prices are unknown; the time of a token where sizes differ."""
    meshes = dict.fromkeys(row.mesh for row in rows)
    colours = {mesh: f"k{number}" if number < _COLOURS else "others" for number, mesh in enumerate(meshes)}
    done = [row for row in rows if row.step_seconds is not None and row.peak_bytes is not None]
    priced, sized = any(row.step_price for row in done), len({row.dims for row in done}) > 1

    def place(row: SweepRow) -> tuple[float, float]:
        cost = row.million_price or row.step_price if priced else row.peak_bytes
        return float(cost or 0), (row.token_seconds if sized else row.step_seconds) or 0.0

    points = [
        {
            **plan_point(
                " ".join(filter(None, (row.mesh_shape or row.mesh, row.dims))), row.peak_bytes or 0,
                row.step_seconds or 0.0, row.status != DOES_NOT_FIT, colours[row.mesh], [row.mesh, *_figures_of(row)],
            ),
            **dict(zip("xy", place(row), strict=True)),
            "big": row.best,
        }
        for row in done
    ]  # fmt: skip
    limits = {row.limit_bytes for row in done}
    limit = limits.pop() or 0 if len(limits) == 1 and not priced else 0
    front = front_line(place(row) for row in done if row.status == FITS)
    legend = [[mesh, colour] for mesh, colour in colours.items() if any(row.mesh == mesh for row in done)]
    million = "a million tokens or samples" if any(row.million_price for row in done) else "a step"
    axes = ((f"price of {million}", "") if priced else MEMORY_AXIS, ("time of a token", "s") if sized else TIME_AXIS)
    return plans_chart(points, limit, legend, front, axes)


def _figures_of(row: SweepRow) -> list[str]:
    price = f"{format_price(row.step_price)} a step" if row.step_price else ""
    return [
        text for text in (row.program, f"{format_seconds(row.step_seconds or 0.0)} a step", price, row.summary) if text
    ]


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
