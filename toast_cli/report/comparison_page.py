"""A comparison as one HTML page that needs no network: time against memory with the Pareto front, and the table.

Enters: a `Comparison`. Leaves: bytes. plotly draws; it comes with the extra `html` and is imported only here, when a page is asked for.
"""

from __future__ import annotations

from html import escape
from importlib.util import find_spec
from typing import Any

from toast_cli.errors import MissingExtraError
from toast_cli.report.comparison import Comparison, Contender
from toast_cli.report.format import format_bytes, format_seconds

_GIB = 2.0**30
_COLOURS = {"search": "#d6336c", "strategy": "#1c7ed6", "unsharded": "#868e96"}
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --faint: #8a919a; --line: #d9dde3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --paper: #16191d; --faint: #8d96a0; --line: #343a42; } }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
       background: var(--paper); }
h1 { font-size: 1.25rem; margin: 0; } p { color: var(--faint); margin: .2rem 0 1rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 500; color: var(--faint); } td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.bad { color: #d6336c; } .best td { font-weight: 600; }
"""


def check() -> None:
    """Raises MissingExtraError before the long work where plotly is not installed."""
    if find_spec("plotly") is None:
        raise MissingExtraError(
            "pages are drawn by plotly, which is not installed", where="--html", hint="pip install 'toast-cli[html]'"
        )


def page(found: Comparison) -> bytes:
    """UTF-8 HTML, scripts and styles inside."""
    title = f"{found.program.name} on {found.mesh.name}"
    shape = " × ".join(f"{axis}={size}" for axis, size in found.mesh.axes.items())
    about = (
        f"{shape}, {found.mesh.devices} devices ({found.mesh.chip}), {format_bytes(found.limit_bytes)} usable on each"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1><p>{escape(about)}</p>\n"
        f"{_plot(found)}\n<div class='scroll'>{_table(found)}</div></body></html>\n"
    ).encode()


def _plot(found: Comparison) -> str:
    import plotly.graph_objects as go
    import plotly.io

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
    figure.add_vline(found.limit_bytes / _GIB, line={"dash": "dash", "color": "#d6336c"}, annotation_text="limit")
    figure.update_layout(
        xaxis_title="peak memory, GiB a device", yaxis_title="step time, ms", height=520, hovermode="closest",
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font={"color": "#8a919a"},
        legend={"orientation": "h", "y": 1.08}, margin={"l": 60, "r": 20, "t": 30, "b": 50},
    )  # fmt: skip
    log = {"type": "log", "gridcolor": "rgba(128,128,128,.25)", "dtick": "D2"}
    figure.update_xaxes(**log)
    figure.update_yaxes(**log)
    return str(
        plotly.io.to_html(
            figure,
            full_html=False,
            include_plotlyjs=True,
            div_id="plot",
            config={"displaylogo": False, "responsive": True},
        )
    )


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
