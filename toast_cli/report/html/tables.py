"""Tables of a run: arrays alive at the peak, collectives. Facts in, markup out."""

from __future__ import annotations

import re
from collections import defaultdict
from html import escape

from toast_cli.quantities import format_bytes, format_count, format_percent, format_plural, format_seconds
from toast_cli.report.collectives import BY_HAND, together
from toast_cli.report.html.frame import fold, table
from toast_cli.report.live import with_slashes
from toast_cli.report.model import CollectiveFacts, ConfirmedPlanFacts, LiveValue, Report

_LIVE = 20
_COLLECTIVES = 12
_NUMBER = re.compile(r"(?<=[/_])\d+")  # of a layer: /3, layer_3


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
