"""A comparison as one HTML page that needs no network: time against memory with the Pareto front, and the table.

Enters: a `Comparison`. Leaves: bytes. Drawn as all `pages` are.
"""

from __future__ import annotations

from html import escape
from typing import Any

from toast_cli.report import pages
from toast_cli.report.comparison import Comparison, Contender
from toast_cli.report.format import format_bytes, format_seconds

_GIB = 2.0**30
_COLOURS = {"search": "#d6336c", "strategy": "#1c7ed6", "unsharded": "#868e96"}


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
    front = sorted((one for one in found.contenders if one.front), key=lambda one: one.peak_bytes)
    figure.add_trace(
        go.Scatter(
            x=[one.peak_bytes / _GIB for one in front], y=[1e3 * one.step_seconds for one in front], mode="lines",
            line={"shape": "hv", "dash": "dot", "color": "#2f9e44"}, name="Pareto front", hoverinfo="skip",
        )
    )  # fmt: skip
    for kind, colour in _COLOURS.items():
        ones = [one for one in found.contenders if one.kind == kind]
        figure.add_trace(
            go.Scatter(
                x=[one.peak_bytes / _GIB for one in ones], y=[1e3 * one.step_seconds for one in ones], mode="markers+text",
                text=[one.name for one in ones], textposition="top center", name=kind, textfont={"size": 11},
                marker={"size": 11, "color": colour, "symbol": ["circle" if one.fits else "x" for one in ones]},
                hovertext=[_hover(one) for one in ones], hoverinfo="text",
            )
        )  # fmt: skip
    pages.memory_limit(figure, found.limit_bytes / _GIB, "#d6336c")
    figure.update_layout(xaxis_title="peak memory, GiB a device", yaxis_title="step time, ms")
    for axis in (figure.update_xaxes, figure.update_yaxes):
        axis(type="log", dtick="D2")
    return pages.plot(figure, "plot", 520, first=True)


def _hover(one: Contender) -> str:
    lines = [
        f"<b>{escape(one.name)}</b>", f"{format_seconds(one.step_seconds)}: compute {format_seconds(one.compute_seconds)}, "
        f"communication {format_seconds(one.communication_seconds)}", format_bytes(one.peak_bytes), escape(one.summary)
    ]  # fmt: skip
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
            f"<td class='n'>{escape(format_bytes(one.peak_bytes))}</td><td>{verdict}</td><td>{escape(one.summary)}</td></tr>"
        )
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{''.join(rows)}</table>"
