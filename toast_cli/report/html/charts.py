"""The data of the charts of a run: facts in, markup with JSON out (`*.js` in this folder documents the field names);
and the drawings in SVG that no plotting library has: arrays cut into tiles, and the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from html import escape
from math import prod
from typing import Any

from toast_cli.frontend.places import folded
from toast_cli.program.names import slash_path
from toast_cli.program.quantities import (
    NamedArray,
    fold,
    format_bytes,
    format_flops,
    format_plural,
    format_seconds,
    format_sharding,
    type_bytes,
)
from toast_cli.report.html import frame
from toast_cli.report.html.frame import chart
from toast_cli.report.html.pictures import OTHERS, ROLES, Branch, KernelPoint, Pictures, plain
from toast_cli.report.model import ArgumentFacts, DimensionAxes, Report, strategy_label
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


def roofline_chart(drawn: Pictures) -> str:
    """Kernels below the rooflines of the matrix unit, the vector unit and the memory."""
    kernels, chip = drawn.kernels, drawn.ceilings
    if not kernels:
        return ""
    intensity = [one.flops / one.bytes for one in kernels]
    ridge = chip.matrix_flops / chip.memory_bytes
    low, high = min([*intensity, ridge]), max([*intensity, ridge])
    top, vector = chip.matrix_flops, chip.vector_flops
    far = high * _FAR
    lines = [
        {"n": "memory", "k": "roof", "at": [low, low * chip.memory_bytes],
         "points": [[low / _FAR, low / _FAR * chip.memory_bytes], [ridge, top]]},
        {"n": "matrix unit", "k": "roof", "at": [far, top], "points": [[ridge, top], [far, top]]},
        {"n": "vector unit", "k": "roof", "at": [far, vector],
         "points": [[vector / chip.memory_bytes, vector], [far, vector]]},
    ]  # fmt: skip
    points = [
        {"x": x, "y": one.flops / one.seconds, "size": one.seconds, "k": "compute", "lines": _kernel(one)}
        for x, one in zip(intensity, kernels, strict=True)
    ]
    data = {
        "x": {"words": "FLOPs for each byte moved", "unit": ""}, "y": {"words": "arithmetic rate", "unit": "FLOP/s"},
        "points": points, "lines": lines, "seen": [[ridge, top], [low, low * chip.memory_bytes]],
        "legend": [["a kind of kernel, as large as its time", "compute"]],
    }  # fmt: skip
    return chart("points", "kernels by arithmetic intensity and rate", data)


def _kernel(one: KernelPoint) -> list[str]:
    return [
        f"{one.name.removeprefix('stablehlo.')} × {one.runs:,.0f}",
        one.location,
        f"{format_seconds(one.seconds)}, {format_flops(one.flops)}, {format_bytes(one.bytes)}",
    ]


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


def search_chart(report: Report, drawn: Pictures) -> str:
    """The best plan so far over the number of plans evaluated."""
    if not drawn.trail or report.search.evaluations < 2:
        return ""
    trail = [[number, seconds, fits] for number, seconds, _, fits in drawn.trail]
    total = max(report.search.evaluations, trail[-1][0])
    return chart("trail", "step time of the best plan so far", {"total": total, "trail": trail})


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


# ---------------------------------------------------------------- tiles
# Drawings in SVG that no plotting library has: arrays cut into tiles, and the mesh. Facts in, markup out.

# Colours of mesh axes, in order, distinguishable for the colour-blind (Okabe and Ito, "Color universal design", 2008).
AXIS_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_WIDTH, _HEIGHT = 56, 36
_MOST_LINES = 32

_SHOWN = 16  # rows that are not folded away


def axis_colours(axes: dict[str, int]) -> dict[str, str]:
    """Mesh axis -> colour."""
    return {name: AXIS_COLOURS[number % len(AXIS_COLOURS)] for number, name in enumerate(axes)}


def tile(shape: list[int], sharding: DimensionAxes, axes: dict[str, int]) -> str:
    """An array as a rectangle, its last two sharded dimensions cut into shards; the first device's shard is filled.

    Cuts have the colour of the mesh axis that makes them; a replicated array is one grey piece.
    """
    colours = axis_colours(axes)
    split = [dim for dim, names in enumerate(sharding) if names][-2:]
    # The last dimension is horizontal, the one before it vertical.
    last = split[-1] if split and (len(split) > 1 or split[-1] == len(shape) - 1) else None
    rows = next((dim for dim in split if dim != last), None)
    columns = last
    pieces = []
    ways = {dim: prod(axes[name] for name in sharding[dim]) for dim in split}
    wide = ways.get(columns, 1) if columns is not None else 1
    high = ways.get(rows, 1) if rows is not None else 1
    first = columns if columns is not None else rows
    fill = colours[sharding[first][0]] if first is not None else "var(--faint)"
    pieces.append(
        f'<rect x="1" y="1" width="{(_WIDTH - 2) / wide:.2f}" height="{(_HEIGHT - 2) / high:.2f}" '
        f'fill="{fill}" opacity=".45"/>'
    )
    if columns is not None:
        pieces += _cuts(sharding[columns], axes, colours, upright=True)
    if rows is not None:
        pieces += _cuts(sharding[rows], axes, colours, upright=False)
    frame = f'<rect x="1" y="1" width="{_WIDTH - 2}" height="{_HEIGHT - 2}" fill="none" stroke="var(--faint)"/>'
    label = " by ".join(map(str, shape)) or "scalar"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{escape(label)}">'
        f"{''.join(pieces)}{frame}</svg>"
    )


def _cuts(names: list[str], axes: dict[str, int], colours: dict[str, str], *, upright: bool) -> list[str]:
    """Lines between the pieces of one dimension: the first axis's thick, each further axis's thinner between them."""
    lines = []
    ways = 1
    length = (_WIDTH if upright else _HEIGHT) - 2
    for depth, name in enumerate(names):
        before, ways = ways, ways * axes[name]
        if ways > _MOST_LINES:
            break
        for k in range(1, ways):
            if k * before % ways:
                at = 1 + length * k / ways
                ends = (
                    f'x1="{at:.2f}" x2="{at:.2f}" y1="1" y2="{_HEIGHT - 1}"'
                    if upright
                    else f'y1="{at:.2f}" y2="{at:.2f}" x1="1" x2="{_WIDTH - 1}"'
                )
                lines.append(f'<line {ends} stroke="{colours[name]}" stroke-width="{max(0.6, 2 - depth)}"/>')
    return lines


def mesh_grid(axes: dict[str, int]) -> str:
    """The devices as a grid: the last axis to the right, the others downwards, device 0 filled; axes in their
    colours."""
    sizes = list(axes.items())
    (across, columns), downs = sizes[-1], sizes[:-1]
    rows = prod(size for _, size in downs)
    side = max(6, min(26, 480 // max(columns, 1), 260 // max(rows, 1)))
    colours = axis_colours(axes)
    shown_rows, shown_columns = min(rows, 43), min(columns, 80)
    width, height = shown_columns * side + 2, shown_rows * side + 2
    cells = "".join(
        f'<rect x="{1 + c * side}" y="{1 + r * side}" width="{side - 2}" height="{side - 2}" rx="2" '
        f'fill="{colours[across]}" opacity="{0.3 + 0.6 * (r * columns + c == 0)}"/>'
        for r in range(shown_rows)
        for c in range(shown_columns)
    )
    label = " by ".join(f"{name} {size}" for name, size in sizes)
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(label)}">{cells}</svg>'
    )


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
