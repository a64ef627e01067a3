"""One run as an HTML page: the chosen plan, and charts of memory, time, arithmetic, arrays and the search.

Enters: a `Report`, and the numbers of its `Pictures`. Leaves: bytes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from html import escape

from toast_cli.quantities import format_bytes, format_count, format_percent, format_plural, format_seconds
from toast_cli.report.arrays import with_slashes
from toast_cli.report.collectives import BY_HAND, together
from toast_cli.report.html import charts
from toast_cli.report.html.frame import fold, frame, section, table
from toast_cli.report.html.pictures import Pictures
from toast_cli.report.html.tiles import arguments, axis_badge, axis_colours, mesh_grid
from toast_cli.report.model import UNSURE, YES, CollectiveFacts, ConfirmedPlanFacts, LiveValue, Report
from toast_cli.report.sections import decision_name, overlap_text, peak_share

_LIVE = 20
_COLLECTIVES = 12
_NUMBER = re.compile(r"(?<=[/_])\d+")  # of a layer: /3, layer_3


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
            charts.alive_chart(drawn) and charts.alive_chart(drawn) + fold("as a table", alive(report)),
        ),
        section("Arguments", "How each is sharded between steps, the largest first.", arguments(report)),
        section("Collectives", "The ones that take longest, and what causes them.", collectives(report)),
        section(
            "Arithmetic and memory traffic",
            "Each dot is one kind of kernel; the lines are what the chip can do at most.",
            charts.roofline_chart(drawn),
        ),
        section(
            "Beside expert strategies",
            "Faster is lower, less memory is further left; a cross does not fit.",
            charts.strategies_chart(report),
        ),
        section(
            "Other plans",
            "The best that differ from the one taken, by the share of the step that only one of the two spends so.",
            alternatives(report),
        ),
        section(
            "What the compiler says",
            report.confirmation.compiler if report.confirmation else "",
            confirmed(report),
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


def alive(report: Report) -> str:
    """Arrays live at the peak, those of all layers merged, the largest first."""
    alike: dict[tuple[str, ...], list[LiveValue]] = defaultdict(list)
    for one in with_slashes(report):
        alike[one.role, one.type, *(_NUMBER.sub("*", text) for text in (one.name, one.location))].append(one)
    ordered = sorted(alike.items(), key=lambda item: -sum(one.bytes for one in item[1]))
    rows = [
        f"<tr><td class='n'>{format_bytes(sum(one.bytes for one in ones))}</td><td>{role}</td>"
        f"<td><code>{escape(type_)}</code>{f' × {len(ones)}' if len(ones) > 1 else ''}</td><td>"
        f"<code>{escape(ones[0].name if len(ones) == 1 else name)}</code></td>"
        f"<td class='faint wide'>{escape(ones[0].location if len(ones) == 1 else location)}</td></tr>"
        for (role, type_, name, location), ones in ordered[:_LIVE]
    ]
    return table(("", "", "type", "array", "made at"), rows, (0,)) if rows else ""


def collectives(report: Report) -> str:
    """The collectives that take longest, those that look alike merged."""
    rows = [_collective(number, one) for number, one in enumerate(together(report.collectives), start=1)]
    if not rows:
        return "<p>None: the devices never talk to each other.</p>" if report.mesh.devices > 1 else ""
    heads = ("", "kind", "over", "runs", "time", "result", "caused by")
    rest = rows[_COLLECTIVES:]
    folded = fold(f"{format_plural(len(rest), 'more row')}", table(heads, rest, (0, 3, 4, 5))) if rest else ""
    return table(heads, rows[:_COLLECTIVES], (0, 3, 4, 5)) + folded


def _collective(number: int, one: CollectiveFacts) -> str:
    figures = (format_count(one.count), format_seconds(one.seconds), format_bytes(one.bytes))
    cells = "".join(f"<td class='n'>{figure}</td>" for figure in figures)
    place = (BY_HAND if one.by_hand else "") + one.location.partition(" (")[0]
    return (
        f"<tr><td class='n'>{number}</td><td>{escape(one.kind)}</td><td>{escape(', '.join(one.axes))}</td>{cells}"
        f"<td class='wide' title='{escape(one.location)}'>{escape(place)}</td></tr>"
    )


def alternatives(report: Report) -> str:
    """The best plans that differ from the chosen one, if requested."""
    rows = [
        f"<tr><td>{escape(one.name)}</td><td class='n'>{format_seconds(one.step_seconds)}</td>"
        f"<td class='n{'' if one.fits else ' bad'}'>{format_bytes(one.peak_bytes)}</td>"
        f"<td class='n'>{format_percent(one.differs)}</td><td class='text'>{escape(one.summary)}</td></tr>"
        for one in report.alternatives
    ]
    return table(("", "step time", "peak memory", "differs", "strategy"), rows, (1, 2, 3)) if rows else ""


def confirmed(report: Report) -> str:
    """The compiler's figures of each compiled plan."""
    if report.confirmation is None:
        return ""
    heads = ("plan", "predicted step", "compiled step", "predicted peak", "compiled peak", "")
    chosen = report.confirmation.chosen
    return table(heads, [_confirmed(one, one.name == chosen) for one in report.confirmation.plans], (1, 2, 3, 4))


def _confirmed(one: ConfirmedPlanFacts, taken: bool) -> str:
    figures = [
        format_seconds(one.predicted_step_seconds),
        "" if one.step_seconds is None else format_seconds(one.step_seconds),
        format_bytes(one.predicted_peak_bytes),
        "" if one.peak_bytes is None else format_bytes(one.peak_bytes),
    ]
    words = one.reason or ("" if one.fits is not False else "does not fit")
    return (
        f"<tr{' class=best' if taken else ''}><td>{escape(one.name)}</td>"
        + "".join(f"<td class='n'>{figure}</td>" for figure in figures)
        + f"<td class='text'>{escape('taken' if taken else words or one.outcome)}</td></tr>"
    )
