"""A comparison as one HTML page: time against memory with the Pareto front, and the table.

Enters: a `Comparison`. Leaves: bytes.
"""

from __future__ import annotations

from html import escape

from toast_cli.quantities import format_bytes, format_count, format_seconds
from toast_cli.report.comparison import ANNOTATED, Comparison, Contender, compiled_texts
from toast_cli.report.html.charts import front_line, plan_point, plans_chart
from toast_cli.report.html.frame import frame, section, table

_HEADS = ("plan", "step time", "compute", "communication", "peak memory")
_COMPILED = ("compiled step", "compiled peak")


def page(found: Comparison) -> bytes:
    """UTF-8 HTML, scripts and styles inside."""
    shape = " × ".join(f"{axis}={size}" for axis, size in found.mesh.axes.items())
    about = (
        f"{format_count(found.program.ops)} operations; {found.mesh.name}: {found.mesh.devices} {found.mesh.chip}, "
        f"{shape}, {format_bytes(found.limit_bytes)} usable per device"
    )
    chart = section(
        "Time against memory",
        "Faster is lower, less memory is further left; a cross does not fit. No plan is better in both than those on "
        "the front.",
        _chart(found),
    )
    rows = section("Plans", "The search's first, the others from the fastest that fits on.", _table(found))
    return frame(f"{found.program.name} on {found.mesh.name}: plans compared", about, f"{chart}\n{rows}")


def _chart(found: Comparison) -> str:
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


def _table(found: Comparison) -> str:
    rows = []
    asked = bool(found.compiler)
    for one in found.contenders:
        verdict = "" if one.met else "<span class='bad'>does not fit</span>" if not one.fits else "breaks a bound"
        compiled = "".join(f"<td class='n'>{escape(text)}</td>" for text in compiled_texts(one)) if asked else ""
        figures = (one.step_seconds, one.compute_seconds, one.communication_seconds)
        cells = "".join(f"<td class='n'>{escape(format_seconds(figure))}</td>" for figure in figures)
        rows.append(
            f"<tr{' class=best' if one.best else ''}><td>{escape(one.label)}</td>{cells}"
            f"<td class='n'>{escape(format_bytes(one.peak_bytes))}</td>{compiled}<td>{verdict}</td>"
            f"<td class='text'>{escape(one.summary)}</td></tr>"
        )
    heads = (*_HEADS, *(_COMPILED if asked else ()), "", "strategy")
    return table(heads, rows, range(1, len(heads) - 2))
