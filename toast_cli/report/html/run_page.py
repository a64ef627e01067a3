"""One run as an HTML page: the chosen plan, and charts of memory, time, arithmetic, arrays and the search.

In: a `Report`, and the numbers of its `Pictures`. Out: bytes.
"""

from __future__ import annotations

from html import escape

from toast_cli.quantities import format_bytes, format_count, format_percent, format_plural, format_seconds
from toast_cli.report.alternatives import alternatives
from toast_cli.report.arrays import live_at_peak
from toast_cli.report.collectives import collectives
from toast_cli.report.confirmation import confirmation
from toast_cli.report.html import charts
from toast_cli.report.html.frame import WIDE, fold, frame, from_terminal, section, table
from toast_cli.report.html.pictures import Pictures
from toast_cli.report.html.tiles import arguments, axis_badge, axis_colours, mesh_grid
from toast_cli.report.model import UNSURE, YES, Report
from toast_cli.report.sections import decision_name, overlap_text, peak_share


def page(report: Report, drawn: Pictures) -> bytes:
    """UTF-8 HTML, scripts and styles inside."""
    mesh, search = report.mesh, report.search
    shape = " × ".join(f"{axis}={size}" for axis, size in mesh.axes.items())
    about = (
        f"{format_count(report.program.ops)} operations, {format_count(report.program.arguments)} arguments; "
        f"{mesh.name}: {mesh.devices} {mesh.chip}, {shape}"
    )
    peak = report.predicted.peak_location or "the peak"
    looked = f"{format_plural(search.evaluations, 'plan')} in {format_seconds(search.seconds)}"
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
        section("Arguments", "How each is sharded between steps, the largest first.", arguments(report)),
        section("Collectives", "The ones that take longest, and what causes them.", traffic),
        section(
            "Arithmetic and memory traffic",
            "Each dot is one kind of kernel; the lines are what the chip can do at most.",
            charts.roofline_chart(drawn),
        ),
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
        section("Search", f"{search.algorithm}, seed {search.seed}: {looked}.", charts.search_chart(report, drawn)),
        section("Notes", "", "".join(f"<p>{escape(note)}</p>" for note in report.analysis.notes)),
    ]
    return frame(f"{report.program.name} on {mesh.name}", about, "\n".join(filter(None, sections)))


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
    axes = report.mesh.axes
    colours = axis_colours(axes)
    rows = [
        f"<tr><td class='n'>{number}</td><td>{axis_badge(one.axis, colours)}</td><td>{escape(decision_name(one))}</td>"
        f"<td class='text'>{escape(one.text)}</td></tr>"
        for number, one in enumerate(report.plan.decisions, 1)
    ]
    idle = [name for name in axes if all(one.axis != name for one in report.plan.decisions)]
    rows += [
        f"<tr><td></td><td>{axis_badge(name, colours)}</td><td class='faint'>not used</td><td></td></tr>"
        for name in idle
    ]
    return f"<div class='mesh'>{mesh_grid(axes)}{table((), rows)}</div>"
