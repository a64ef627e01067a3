"""What all HTML pages share: the frame with styles inside, and plots drawn by plotly (extra `html`), which is
imported only here.

Pages need no network: plotly's script stands in the page once.
"""

from __future__ import annotations

from html import escape
from importlib.util import find_spec
from math import log10
from typing import Any

from toast_cli.errors import MissingExtraError

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --faint: #6b737c; --line: #d9dde3; --bad: #c2255c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --paper: #16191d; --faint: #9aa3ad; --line: #343a42;
  --bad: #f06595; } }
* { box-sizing: border-box; }
body { margin: 2rem auto 4rem; max-width: 76rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif;
  color: var(--ink);
       background: var(--paper); }
h1 { font-size: 1.35rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2.5rem 0 .2rem; }
p { margin: .2rem 0 1rem; } .faint { color: var(--faint); } .bad { color: var(--bad); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 500; color: var(--faint); } td.n { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
td code { font-size: .85em; white-space: nowrap; } .best td { font-weight: 600; }
.figures { display: flex; flex-wrap: wrap; gap: .5rem 2.5rem; margin: 1rem 0; }
.figures div { min-width: 7rem; } .figures b { display: block; font-size: 1.5rem; font-weight: 600; }
.axis { display: inline-block; padding: 0 .45em; border-radius: .3em; color: #fff; font-size: .9em;
  white-space: nowrap; }
.arrays { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: 1rem; }
.arrays figure { margin: 0; display: flex; gap: .7rem; align-items: center; min-width: 0; }
.arrays svg { flex: none; } .arrays figcaption { min-width: 0; overflow-wrap: anywhere; font-size: .85rem;
  line-height: 1.35; }
.mesh { display: flex; flex-wrap: wrap; gap: 1rem 2rem; align-items: flex-start; } .mesh svg { max-width: 100%;
  height: auto; }
.mesh table { width: auto; flex: 1 1 20rem; }
"""
GRID = "rgba(128,128,128,.25)"


def check() -> None:
    """Raises MissingExtraError before the long work where plotly is not installed."""
    if find_spec("plotly") is None:
        raise MissingExtraError(
            "pages are drawn by plotly, which is not installed",
            where="--html",
            hint="pip install 'toast-partitioner[html]'",
        )


def frame(title: str, about: str, body: str) -> bytes:
    """UTF-8 HTML."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1><p class='faint'>{escape(about)}</p>\n"
        f"{body}\n</body></html>\n"
    ).encode("utf-8", "backslashreplace")


def plot(figure: Any, name: str, height: int, *, first: bool) -> str:
    """A figure as markup; `first` brings plotly's script along. It reads on light and on dark paper."""
    import plotly.io

    figure.update_layout(
        height=height, hovermode=figure.layout.hovermode or "closest", margin={"l": 60, "r": 20, "t": 30, "b": 50},
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font={"color": "#858d96"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    )  # fmt: skip
    figure.update_xaxes(gridcolor=GRID, zerolinecolor=GRID, automargin=True)
    figure.update_yaxes(gridcolor=GRID, zerolinecolor=GRID, automargin=True)
    return str(
        plotly.io.to_html(
            figure,
            full_html=False,
            include_plotlyjs=first,
            div_id=name,
            config={"displayModeBar": False, "responsive": True},
        )
    )


def memory_limit(figure: Any, limit: float, colour: str) -> None:
    """An upright line at `limit`, on a logarithmic axis."""
    figure.add_vline(limit, line={"dash": "dash", "color": colour})
    figure.add_annotation(x=log10(limit), y=1, yref="paper", text="limit", showarrow=False, xanchor="left", xshift=4)
