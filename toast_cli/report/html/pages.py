"""The HTML pages of a run, of a comparison and of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from toast_cli.price.memory_fit import UNSURE, YES
from toast_cli.program.quantities import (
    format_bytes,
    format_count,
    format_percent,
    format_plural,
    format_price,
    format_seconds,
)
from toast_cli.report.arrays import arguments, collectives, live_at_peak
from toast_cli.report.command_tables import DOES_NOT_FIT, FITS, SweepRow, rows_table
from toast_cli.report.comparison import ANNOTATED, Comparison, Contender, alternatives, confirmation, decisions, figures
from toast_cli.report.html import charts
from toast_cli.report.html.charts import MEMORY_AXIS, TIME_AXIS, front_line, plan_point, plans_chart
from toast_cli.report.html.frame import WIDE, fold, frame, from_terminal, section, table
from toast_cli.report.html.pictures import Pictures
from toast_cli.report.model import Report
from toast_cli.report.terminal import decision_name, overlap_text, peak_share

# ---------------------------------------------------------------- a run
# One run as an HTML page: the chosen plan, and charts of memory, time, arithmetic, arrays and the search.


def run_page(report: Report, drawn: Pictures) -> bytes:
    """UTF-8 HTML, scripts and styles inside."""
    mesh, search = report.mesh, report.search
    shape = " × ".join(f"{axis}={size}" for axis, size in mesh.axes.items())
    looked = f"{search.algorithm}, {format_plural(search.evaluations, 'plan')} in {format_seconds(search.seconds)}"
    about = (
        f"{format_count(report.program.ops)} operations, {format_count(report.program.arguments)} arguments; "
        f"{mesh.name}: {mesh.devices} {mesh.chip}, {shape}; {looked}"
    )
    peak = report.predicted.peak_location or "the peak"
    alive = from_terminal(live_at_peak(report, WIDE, verbose=True), 20)
    traffic = from_terminal(collectives(report, WIDE, verbose=True)) if mesh.devices > 1 else ""
    sections = [
        _figures(report),
        section(
            "Plan",
            "Which dimensions each mesh axis splits. Where two want one axis in the same operation, the upper has it.",
            _plan(report),
        ),
        section(
            "One step",
            "On each device, in the program's order and with nothing overlapped; a loop is there once, as long as all "
            "its trips. What is lighter may hide behind compute. Drag to zoom, double click for the whole step.",
            charts.step_chart(report, drawn),
        ),
        section(
            "Time by module",
            "Where a step's time goes: by module, place in the source and operation. Blue computes, orange "
            "communicates. Click to go in.",
            charts.time_chart(drawn),
        ),
        section(
            "Alive at the peak",
            f"At {peak}. Click to go in.",
            charts.alive_chart(drawn) and charts.alive_chart(drawn) + fold("as a table", alive),
        ),
        section(
            "Arguments",
            "How each is sharded between steps.",
            from_terminal(arguments(report, WIDE, shown=len(report.arguments)), 16),
        ),
        section("Collectives", "The ones that take longest, and what causes them.", traffic),
        section(
            "Compared with known strategies",
            "Faster is lower, less memory is further left; a cross does not fit.",
            charts.strategies_chart(report),
        ),
        section(
            "Other plans",
            "The best that differ from the one taken, by the share of the step that only one of the two spends so.",
            from_terminal(alternatives(report)),
        ),
        section(
            "What the compiler says",
            report.confirmation.compiler if report.confirmation else "",
            from_terminal(confirmation(report)),
        ),
        section("Notes", "", "".join(f"<p>{escape(note)}</p>" for note in report.analysis.notes)),
    ]
    return frame(f"{report.program.title} on {mesh.name}", about, "\n".join(filter(None, sections)))


def _figures(report: Report) -> str:
    predicted = report.predicted
    share = format_percent(predicted.peak_bytes / predicted.limit_bytes) if predicted.limit_bytes else ""
    fits = (
        f"{share} of {format_bytes(predicted.limit_bytes)}"
        if report.fit == YES
        else f"<span class='bad'>{'may' if report.fit == UNSURE else 'does'} not fit</span>"
    )
    figures = [
        ("step time", format_seconds(predicted.step_seconds), overlap_text(predicted)),
        ("compute", format_seconds(predicted.compute_seconds), ""),
        ("communication", format_seconds(predicted.communication_seconds), ""),
        ("peak memory", format_bytes(predicted.peak_bytes), fits),
        ("MFU", format_percent(predicted.mfu), peak_share(predicted)),
    ]
    cells = "".join(
        f"<div>{name}<b>{value}</b><span class='faint'>{note}</span></div>" for name, value, note in figures
    )
    return f"<p>{escape(report.plan.summary or 'unsharded')}</p><div class='figures'>{cells}</div>"


def _plan(report: Report) -> str:
    rows = [
        f"<tr><td class='n'>{number}</td><td>{escape(one.axis)}</td><td>{escape(decision_name(one))}</td>"
        f"<td class='text'>{escape(one.text)}</td></tr>"
        for number, one in enumerate(report.plan.decisions, 1)
    ]
    idle = [name for name in report.mesh.axes if all(one.axis != name for one in report.plan.decisions)]
    rows += [f"<tr><td></td><td>{escape(name)}</td><td class='faint'>not used</td><td></td></tr>" for name in idle]
    return table((), rows)


# ---------------------------------------------------------------- a comparison
# A comparison as one HTML page: time against memory with the Pareto front, and the table.


def comparison_page(found: Comparison) -> bytes:
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
        _comparison_chart(found),
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
    title = f"{found.program.title} on {found.mesh.name}: plans compared"
    return frame(title, about, f"{chart}\n{rows}\n{differ}")


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


# ---------------------------------------------------------------- a sweep
# A sweep as one HTML page: for each program time against memory of all its points, and their table.

_COLOURS = 8  # meshes with a colour of their own


def sweep_page(rows: Sequence[SweepRow]) -> bytes:
    """UTF-8 HTML, scripts and styles inside."""
    meshes = list(dict.fromkeys(row.mesh for row in rows))
    colours = {mesh: f"k{number}" if number < _COLOURS else "others" for number, mesh in enumerate(meshes)}
    about = (
        "Each point is a row of the table: the faster the lower, the cheaper the further left; a cross does not fit."
    )
    body = section("Points", about, _sweep_chart(rows, colours) + from_terminal(rows_table(rows, WIDE), len(rows)))
    return frame("Sweep", format_plural(len(rows), "point"), body)


def _sweep_chart(rows: Sequence[SweepRow], colours: dict[str, str]) -> str:
    """Time against price, or against memory where prices are unknown; the time of a token where sizes differ."""
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
