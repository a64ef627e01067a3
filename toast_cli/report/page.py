"""One run as an HTML page that needs no network: what was chosen, and pictures of memory, time, arithmetic, arrays
and the search.

Enters: a `Report`, and the numbers of its `Pictures`. Leaves: bytes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from html import escape
from math import log10
from typing import Any

from toast_cli.folding import NamedArray, fold
from toast_cli.quantities import (
    format_bytes,
    format_count,
    format_flops,
    format_percent,
    format_seconds,
    format_sharding,
    type_bytes,
)
from toast_cli.report import pages
from toast_cli.report.model import ArgumentFacts, LiveValue, Report
from toast_cli.report.pictures import KernelPoint, Pictures
from toast_cli.report.tiles import axis_colours, mesh_grid, tile

_GIB = 2.0**30
_ROLES = {
    "argument": "#0072b2",
    "carry": "#56b4e9",
    "temporary": "#e69f00",
    "gathered": "#009e73",
    "partial": "#cc79a7",
}
_COMPUTE, _COMMUNICATION, _BEST, _LIMIT = "#0072b2", "#e69f00", "#009e73", "#d55e00"
_ARRAYS = 60
_LIVE = 20
_NUMBER = re.compile(r"(?<=[\[_])\d+")  # of a layer: [3], layer_3


def page(report: Report, drawn: Pictures) -> bytes:
    """UTF-8 HTML, scripts and styles inside."""
    mesh = report.mesh
    shape = " × ".join(f"{axis}={size}" for axis, size in mesh.axes.items())
    about = (
        f"{format_count(report.program.ops)} operations, {format_count(report.program.arguments)} arguments; "
        f"{mesh.name}: {mesh.devices} {mesh.chip}, {shape}"
    )
    sections = [
        _figures(report),
        _section(
            "Mesh",
            "Which dimensions lie on which axis; where two want one axis in the same operation, the upper one has it.",
            _mesh(report),
        ),
        _section(
            "Memory over the program",
            "Bytes alive on each device, from the first operation to the last.",
            _memory(report, drawn),
        ),
        _section(
            "Alive at the peak",
            f"At {report.predicted.peak_location or 'the peak'}, the largest first.",
            _alive(report),
        ),
        _section(
            "Time by place in the source",
            "One step on each device; communication may hide behind compute.",
            _places(drawn),
        ),
        _section(
            "Arithmetic and memory traffic",
            "Each dot is one kind of kernel; the lines are what the chip can do.",
            _roofline(drawn),
        ),
        _section(
            "Arguments at rest",
            "The filled piece is what the first device holds; cuts have the colour of their mesh axis.",
            _arrays(report),
        ),
        _section("Beside expert strategies", "Faster is lower, less memory is further left.", _strategies(report)),
        _section(
            "Search",
            f"{report.search.algorithm}: {format_count(report.search.evaluations)} plans in "
            f"{format_seconds(report.search.seconds)}.",
            _search(drawn),
        ),
    ]
    return pages.frame(f"{report.program.name} on {mesh.name}", about, "\n".join(sections))


def _section(title: str, about: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p class='faint'>{escape(about)}</p>{body}</section>" if body else ""


def _figures(report: Report) -> str:
    predicted = report.predicted
    share = format_percent(predicted.peak_bytes / predicted.limit_bytes) if predicted.limit_bytes else ""
    fits = (
        f"{share} of {format_bytes(predicted.limit_bytes)}"
        if predicted.fits
        else "<span class='bad'>does not fit</span>"
    )
    figures = [
        (
            "step time",
            format_seconds(predicted.step_seconds),
            f"at least {format_seconds(predicted.step_seconds_lower)} if communication hides",
        ),
        ("compute", format_seconds(predicted.compute_seconds), ""),
        ("communication", format_seconds(predicted.communication_seconds), ""),
        ("peak memory", format_bytes(predicted.peak_bytes), fits),
        ("MFU", format_percent(predicted.mfu), "of the chips' peak arithmetic rate"),
    ]
    cells = "".join(
        f"<div>{name}<b>{value}</b><span class='faint'>{note}</span></div>" for name, value, note in figures
    )
    return f"<p>{escape(report.plan.summary)}</p><div class='figures'>{cells}</div>"


def _mesh(report: Report) -> str:
    axes, colours = report.mesh.axes, axis_colours(report.mesh.axes)
    rows = "".join(
        f"<tr><td class='n'>{number}</td><td>{_axis(one.axis, colours)}</td><td>{escape(one.target)}</td>"
        f"<td>{escape(one.text)}</td></tr>"
        for number, one in enumerate(report.plan.decisions, 1)
    )
    idle = [name for name in axes if all(one.axis != name for one in report.plan.decisions)]
    rows += "".join(
        f"<tr><td></td><td>{_axis(name, colours)}</td><td class='faint'>not used</td><td></td></tr>" for name in idle
    )
    return f"<div class='mesh'>{mesh_grid(axes)}<div class='scroll'><table>{rows}</table></div></div>"


def _axis(name: str, colours: dict[str, str]) -> str:
    return f"<span class='axis' style='background:{colours[name]}'>{escape(name)}</span>"


def _memory(report: Report, drawn: Pictures) -> str:
    import plotly.graph_objects as go

    figure: Any = go.Figure()
    for role, colour in _ROLES.items():
        if role in drawn.memory:
            figure.add_trace(
                go.Scatter(
                    x=drawn.moments,
                    y=[size / _GIB for size in drawn.memory[role]],
                    name=role,
                    stackgroup="all",
                    mode="lines",
                    line={"width": 0.5, "color": colour, "shape": "hv"},
                    hovertemplate="%{y:.3g} GiB",
                )
            )
    limit, peak = report.predicted.limit_bytes / _GIB, report.predicted.peak_bytes / _GIB
    if limit < 4 * peak:
        figure.add_hline(limit, line={"dash": "dash", "color": _LIMIT}, annotation_text="limit")
    figure.update_layout(xaxis_title="operation", yaxis_title="GiB a device", hovermode="x unified")
    return pages.plot(figure, "memory", 380, first=True)


def _alive(report: Report) -> str:
    alike: dict[tuple[str, ...], list[LiveValue]] = defaultdict(list)
    for one in report.predicted.live_at_peak:
        alike[one.role, one.type, *(_NUMBER.sub("*", text) for text in (one.name, one.location))].append(one)
    rows = "".join(
        f"<tr><td class='n'>{format_bytes(sum(one.bytes for one in ones))}</td><td>{role}</td>"
        f"<td><code>{escape(type_)}</code>{f' × {len(ones)}' if len(ones) > 1 else ''}</td><td>"
        f"<code>{escape(ones[0].name if len(ones) == 1 else name)}</code></td>"
        f"<td class='faint'>{escape(ones[0].location if len(ones) == 1 else location)}</td></tr>"
        for (role, type_, name, location), ones in sorted(
            alike.items(), key=lambda item: -sum(one.bytes for one in item[1])
        )[:_LIVE]
    )
    return f"<div class='scroll'><table>{rows}</table></div>"


def _places(drawn: Pictures) -> str:
    import plotly.graph_objects as go

    shown = [*drawn.places, *([drawn.elsewhere] if drawn.elsewhere.compute + drawn.elsewhere.communication else [])]
    figure: Any = go.Figure()
    for name, colour, seconds in (
        ("compute", _COMPUTE, [place.compute for place in shown]),
        ("communication", _COMMUNICATION, [place.communication for place in shown]),
    ):
        figure.add_trace(
            go.Bar(
                y=[place.location for place in shown], x=[1e3 * value for value in seconds], orientation="h", name=name,
                marker={"color": colour}, hovertemplate="%{x:.4g} ms",
            )
        )  # fmt: skip
    figure.update_layout(barmode="stack", xaxis_title="ms a step")
    figure.update_yaxes(autorange="reversed")
    return pages.plot(figure, "places", 120 + 24 * len(shown), first=False)


def _roofline(drawn: Pictures) -> str:
    import plotly.graph_objects as go

    kernels = drawn.kernels
    if not kernels:
        return ""
    intensity = [one.flops / one.bytes for one in kernels]
    low, high = min(intensity) / 2, max([*intensity, drawn.matrix_flops / drawn.memory_rate]) * 2
    ridge = drawn.matrix_flops / drawn.memory_rate
    figure: Any = go.Figure()
    figure.add_trace(
        go.Scatter(
            x=[low, ridge, high], y=[low * drawn.memory_rate, drawn.matrix_flops, drawn.matrix_flops], mode="lines",
            line={"color": "#868e96"}, name="chip", hoverinfo="skip",
        )
    )  # fmt: skip
    longest = max(one.seconds for one in kernels)
    figure.add_trace(
        go.Scatter(
            x=intensity,
            y=[one.flops / one.seconds for one in kernels],
            mode="markers",
            name="kernels",
            marker={
                "color": _COMPUTE,
                "opacity": 0.6,
                "size": [5 + 25 * (one.seconds / longest) ** 0.5 for one in kernels],
            },
            hovertext=[_kernel(one) for one in kernels],
            hoverinfo="text",
        )
    )
    figure.update_layout(xaxis_title="FLOPs per byte", yaxis_title="FLOP/s")
    figure.update_xaxes(type="log", range=[log10(low), log10(high)])
    figure.update_yaxes(type="log", exponentformat="SI")
    return pages.plot(figure, "roofline", 420, first=False)


def _kernel(one: KernelPoint) -> str:
    name = one.name.removeprefix("stablehlo.")
    return "<br>".join(
        [
            f"<b>{escape(name)}</b> × {one.runs:,.0f}",
            escape(one.location),
            f"{format_seconds(one.seconds)}, {format_flops(one.flops)}, {format_bytes(one.bytes)}",
        ]
    )


def _arrays(report: Report) -> str:
    entries = [
        NamedArray(one.name or f"#{one.index}", (one.type, format_sharding(one.sharding))) for one in report.arguments
    ]
    folded = [(row.pattern, len(row.members), report.arguments[row.members[0]]) for row in fold(entries)]
    folded.sort(key=lambda row: -row[1] * type_bytes(row[2].type))
    drawings = "".join(_array(pattern, count, one, report.mesh.axes) for pattern, count, one in folded[:_ARRAYS])
    more = f"<p class='faint'>and {len(folded) - _ARRAYS} smaller patterns</p>" if len(folded) > _ARRAYS else ""
    colours = axis_colours(report.mesh.axes)
    legend = " ".join(_axis(name, colours) for name in report.mesh.axes)
    return f"<p>{legend}</p><div class='arrays'>{drawings}</div>{more}"


def _array(pattern: str, count: int, one: ArgumentFacts, axes: dict[str, int]) -> str:
    times = f" × {count}" if count > 1 else ""
    text = f"<code>{escape(pattern)}</code>{times}<br>{escape(one.type)}<br>{escape(format_sharding(one.sharding))}"
    return f"<figure>{tile(_shape(one.type), one.sharding, axes)}<figcaption>{text}</figcaption></figure>"


def _shape(type_: str) -> list[int]:
    """`f32[16,8]` -> [16, 8]."""
    inside = type_.partition("[")[2].rstrip("]")
    return [int(size) for size in inside.split(",")] if inside else []


def _strategies(report: Report) -> str:
    import plotly.graph_objects as go

    points = [(name, one.peak_bytes, one.step_seconds, one.fits, _COMPUTE) for name, one in report.baselines.items()]
    points.append(
        ("this plan", report.predicted.peak_bytes, report.predicted.step_seconds, report.predicted.fits, _BEST)
    )
    figure: Any = go.Figure(
        go.Scatter(
            x=[point[1] / _GIB for point in points],
            y=[1e3 * point[2] for point in points],
            mode="markers+text",
            text=[point[0] for point in points],
            cliponaxis=False,
            showlegend=False,
            textposition=[("middle right", "middle left")[number % 2] for number in range(len(points))],
            marker={
                "size": 11,
                "color": [point[4] for point in points],
                "symbol": ["circle" if point[3] else "x" for point in points],
            },
            hovertemplate="%{text}<br>%{x:.3g} GiB<br>%{y:.4g} ms<extra></extra>",
        )
    )
    pages.memory_limit(figure, report.predicted.limit_bytes / _GIB, _LIMIT)
    figure.update_layout(xaxis_title="peak memory, GiB a device", yaxis_title="step time, ms")
    for axis, sizes in ((figure.update_xaxes, [p[1] for p in points]), (figure.update_yaxes, [p[2] for p in points])):
        axis(type="log", **({"dtick": "D2"} if _narrow(sizes) else {}))
    return pages.plot(figure, "strategies", 420, first=False)


def _narrow(sizes: Iterable[float]) -> bool:
    """Whether these span so little that powers of ten alone would hardly label an axis."""
    found = [size for size in sizes if size > 0]
    return bool(found) and max(found) < 100 * min(found)


def _search(drawn: Pictures) -> str:
    import plotly.graph_objects as go

    if len(drawn.trail) < 2:
        return ""
    figure: Any = go.Figure()
    for fits, name, colour in ((False, "does not fit", _LIMIT), (True, "fits", _BEST)):
        steps = [(number, seconds) for number, seconds, _, met in drawn.trail if met is fits]
        if steps:
            figure.add_trace(
                go.Scatter(
                    x=[number for number, _ in steps], y=[1e3 * seconds for _, seconds in steps], name=name,
                    mode="lines+markers", line={"shape": "hv", "color": colour},
                )
            )  # fmt: skip
    figure.update_layout(
        xaxis_title="plans looked at", yaxis_title="step time of the best plan so far, ms", showlegend=True
    )
    figure.update_yaxes(type="log")
    return pages.plot(figure, "search", 320, first=False)
