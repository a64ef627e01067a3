"""The section of a terminal report about collectives: what takes longest, and what in the source causes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from rich.console import RenderableType
from rich.text import Text

from toast_cli.quantities import format_bytes, format_count, format_seconds, shorten_location
from toast_cli.report import style
from toast_cli.report.model import CollectiveFacts, Report

# What a report shows without --verbose.
SHORT_COLLECTIVES = 6
# Before the place of what the program does itself.
BY_HAND = "by hand: "


def collectives(report: Report, width: int, verbose: bool) -> RenderableType:
    """The ones that take longest, and what in the source causes them."""
    ordered = together(report.collectives)
    if not ordered:
        return style.section("collectives", Text("none: the devices never communicate"))
    shown = ordered if verbose else ordered[:SHORT_COLLECTIVES]
    with_bytes = width >= style.NARROW
    heads = [
        ("kind", "left"),
        ("axes", "left"),
        ("", "right"),
        ("time", "right"),
        *([("result", "right")] if with_bytes else []),
    ]
    rows = [
        (
            one.kind,
            "+".join(one.axes),
            f"×{format_count(one.count)}",
            format_seconds(one.seconds),
            *([format_bytes(one.bytes)] if with_bytes else []),
        )
        for one in shown
    ]
    room = style.room(width, rows)
    drawn = style.table([*heads, ("caused by", "fold")])
    for one, (kind, axes, *figures) in zip(shown, rows, strict=True):
        hand = BY_HAND if one.by_hand else ""
        location = hand + shorten_location(one.location or "(unknown)", room - len(hand))
        drawn.add_row(kind, style.with_axes(axes, list(report.mesh.axes)), *figures, location)
    total = f"{format_count(sum(one.count for one in ordered))} a step"
    rest = "" if len(shown) == len(ordered) else ", those that take longest"
    return style.section(f"collectives, {total}{rest}", drawn)


def together(collectives: Sequence[CollectiveFacts]) -> list[CollectiveFacts]:
    """Those that differ in nothing a reader sees as one, the ones that take longest first."""
    alike: dict[tuple[object, ...], list[CollectiveFacts]] = defaultdict(list)
    for one in collectives:
        alike[one.kind, *one.axes, one.bytes, one.by_hand, one.location.split(" (")[0]].append(one)
    merged = [
        replace(ones[0], count=sum(one.count for one in ones), seconds=sum(one.seconds for one in ones))
        for ones in alike.values()
    ]
    return sorted(merged, key=lambda one: -one.seconds)
