"""A comparison as one HTML page: time against memory with the Pareto front, and the table.

In: a `Comparison`. Out: bytes.
"""

from __future__ import annotations

from toast_cli.quantities import format_bytes, format_count, format_seconds
from toast_cli.report.comparison import ANNOTATED, Comparison, Contender, decisions, figures
from toast_cli.report.html.charts import front_line, plan_point, plans_chart
from toast_cli.report.html.frame import WIDE, frame, from_terminal, section


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
    every = len(found.contenders) * 2
    rows = section(
        "Plans",
        "The search's first, the others from the fastest that fits on.",
        from_terminal(figures(found, WIDE), every),
    )
    differ = section(
        "Decisions",
        "That a strategy has and the search's plan has not, and the other way round.",
        from_terminal(decisions(found), every),
    )
    title = f"{found.program.name} on {found.mesh.name}: plans compared"
    return frame(title, about, f"{chart}\n{rows}\n{differ}")


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
