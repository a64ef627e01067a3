"""One HTML page for a run, a comparison or a sweep: the sections of the terminal's report, with charts above them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import RenderableType

from toast_cli.program.quantities import format_plural, format_price, format_seconds
from toast_cli.report import terminal
from toast_cli.report.command_tables import DOES_NOT_FIT, FITS, SweepRow, sweep_blocks
from toast_cli.report.comparison import ANNOTATED, Comparison, Contender, comparison_blocks
from toast_cli.report.html import charts
from toast_cli.report.html.charts import MEMORY_AXIS, TIME_AXIS, front_line, plan_point, plans_chart
from toast_cli.report.html.frame import WIDE, frame, from_terminal, section, titled
from toast_cli.report.html.pictures import Pictures
from toast_cli.report.model import Report

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
            charts.step_chart(report, drawn),
        ),
        "where the time goes": (
            "By module, place in the source and operation. Blue computes, orange communicates. Click to go in.",
            charts.time_chart(drawn),
        ),
        "alive at the peak": ("By kind and module. Click to go in.", charts.alive_chart(drawn)),
        "compared with": (_PLANS, charts.strategies_chart(report)),
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
        about, chart = ("", "") if start is None else waiting.pop(start)
        markup = "".join(from_terminal(part, shown) for part in parts)
        body.append(section(heading, about if chart else "", chart + markup))
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
