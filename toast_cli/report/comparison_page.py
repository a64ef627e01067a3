"""A comparison as one HTML page that needs no network: time against memory with the Pareto front, and the table.

Enters: a `Comparison`. Leaves: bytes. Drawn as all `pages` are.
"""

from __future__ import annotations

from html import escape
from math import log10
from typing import Any

from toast_cli.quantities import format_bytes, format_seconds
from toast_cli.report import pages
from toast_cli.report.comparison import Comparison, Contender

_GIB = 2.0**30
_COLOURS = {"strategy": "#1c7ed6", "unsharded": "#868e96", "search": "#d6336c"}
_NAMES = {"strategy": "strategies", "unsharded": "unsharded", "search": "the search"}


def page(found: Comparison) -> bytes:
    """UTF-8 HTML, scripts and styles inside."""
    title = f"{found.program.name} on {found.mesh.name}"
    shape = " × ".join(f"{axis}={size}" for axis, size in found.mesh.axes.items())
    about = (
        f"{shape}, {found.mesh.devices} devices ({found.mesh.chip}), {format_bytes(found.limit_bytes)} usable on each"
    )
    return pages.frame(title, about, f"{_plot(found)}\n<div class='scroll'>{_table(found)}</div>")


def _plot(found: Comparison) -> str:
    import plotly.graph_objects as go

    figure: Any = go.Figure()
    rows = found.contenders
    limit = found.limit_bytes / _GIB
    memory, time = (
        _range([*(one.peak_bytes / _GIB for one in rows), limit]),
        _range([1e3 * one.step_seconds for one in rows]),
    )
    front = sorted((one for one in rows if one.front), key=lambda one: one.peak_bytes)
    figure.add_trace(
        go.Scatter(
            x=[*(one.peak_bytes / _GIB for one in front), memory[1]],
            y=[*(1e3 * one.step_seconds for one in front), 1e3 * front[-1].step_seconds], mode="lines",
            line={"shape": "hv", "dash": "dot", "color": "#2f9e44"}, name="Pareto front", hoverinfo="skip",
        )
    )  # fmt: skip
    figure.add_trace(
        go.Scatter(
            x=[limit, limit],
            y=list(time),
            mode="lines",
            line={"dash": "dash", "color": "#e8590c"},
            name="limit",
            hoverinfo="skip",
        )
    )
    named = {one.name for one in rows if one.front or one.best or one.kind != "strategy"}
    for kind, colour in _COLOURS.items():
        ones = [one for one in rows if one.kind == kind]
        figure.add_trace(
            go.Scatter(
                x=[one.peak_bytes / _GIB for one in ones],
                y=[1e3 * one.step_seconds for one in ones],
                mode="markers+text",
                text=[one.name if one.name in named else "" for one in ones],
                textposition="bottom center",
                name=_NAMES[kind],
                marker={"size": 11, "color": colour, "symbol": ["circle" if one.fits else "x" for one in ones]},
                hovertext=[_hover(one) for one in ones],
                hoverinfo="text",
            )
        )
    figure.update_xaxes(title="peak memory, GiB a device", **_log(memory))
    figure.update_yaxes(title="step time, ms", **_log(time))
    return pages.plot(figure, "plot", 480, first=True)


def _range(values: list[float]) -> tuple[float, float]:
    """All of them, and some room around."""
    low, high = max(min(values), 1e-9), max(values)
    room = max(high / low, 2.0) ** 0.08
    return low / room, high * room


def _log(span: tuple[float, float]) -> dict[str, Any]:
    """A logarithmic axis marked at 1, 2, 5, 10, …; more closely where that leaves fewer than three marks."""
    marks = [m * 10.0**e for e in range(-9, 10) for m in (1, 2, 5) if span[0] <= m * 10.0**e <= span[1]]
    if len(marks) < 3:
        marks = [m / 2 * 10.0**e for e in range(-9, 10) for m in range(2, 20) if span[0] <= m / 2 * 10.0**e <= span[1]]
    return {
        "type": "log", "range": [log10(span[0]), log10(span[1])], "tickvals": marks,
        "ticktext": [f"{mark:g}" for mark in marks], "minor": {"ticks": ""},
    }  # fmt: skip


def _hover(one: Contender) -> str:
    lines = [
        f"<b>{escape(one.name)}</b>",
        f"{format_seconds(one.step_seconds)}: compute {format_seconds(one.compute_seconds)}, "
        f"communication {format_seconds(one.communication_seconds)}",
        format_bytes(one.peak_bytes),
        escape(one.summary),
    ]
    return "<br>".join(lines)


def _table(found: Comparison) -> str:
    heads = ("plan", "step time", "compute", "communication", "peak memory", "", "strategy")
    rows = []
    for one in found.contenders:
        verdict = "" if one.met else "<span class='bad'>does not fit</span>" if not one.fits else "breaks a bound"
        figures = (one.step_seconds, one.compute_seconds, one.communication_seconds)
        cells = "".join(f"<td class='n'>{escape(format_seconds(figure))}</td>" for figure in figures)
        rows.append(
            f"<tr{' class=best' if one.best else ''}><td>{escape(one.name)}</td>{cells}"
            f"<td class='n'>{escape(format_bytes(one.peak_bytes))}</td><td>{verdict}</td>"
            f"<td>{escape(one.summary)}</td></tr>"
        )
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{''.join(rows)}</table>"
