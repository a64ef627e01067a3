"""The section of a terminal report about collectives: those that take longest, and their causes in the source."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from rich.console import RenderableType
from rich.text import Text

from toast_cli.explain.words import look, rows_of
from toast_cli.quantities import (
    format_bytes,
    format_count,
    format_seconds,
    join_location,
    shorten_location,
    split_location,
)
from toast_cli.report import style
from toast_cli.report.model import CollectiveFacts, Report

# What a report shows without --verbose.
SHORT_COLLECTIVES = 6
_NUMBER = re.compile(r"(?<=[/_])\d+")
# Prefix of the place of collectives in manual regions.
BY_HAND = "manual: "


def collectives(report: Report, width: int, verbose: bool) -> RenderableType:
    """The collectives that take longest, numbered as in `toast explain --collective`, and their causes."""
    ordered = together(report.collectives)
    if not ordered:
        return style.section("collectives", Text("none: the devices never communicate"))
    shown = ordered if verbose else ordered[:SHORT_COLLECTIVES]
    with_bytes = width >= style.NARROW
    heads = [
        ("", "right"),
        ("kind", "left"),
        ("axes", "left"),
        ("", "right"),
        ("time", "right"),
        *([("result", "right")] if with_bytes else []),
    ]
    rows = [
        (
            str(number),
            one.kind,
            "+".join(one.axes),
            f"×{format_count(one.count)}",
            format_seconds(one.seconds),
            *([format_bytes(one.bytes)] if with_bytes else []),
        )
        for number, one in enumerate(shown, start=1)
    ]
    room = style.room(width, rows)
    drawn = style.table([*heads, ("caused by", "fold")])
    for one, (number, kind, axes, *figures) in zip(shown, rows, strict=True):
        hand = BY_HAND if one.by_hand else ""
        location = hand + shorten_location(one.location or "(unknown)", room - len(hand))
        drawn.add_row(number, kind, style.with_axes(axes, list(report.mesh.axes)), *figures, location)
    total = f"{format_count(sum(one.count for one in ordered))} a step"
    rest = "" if len(shown) == len(ordered) else ", those that take longest"
    return style.section(f"collectives, {total}{rest}", drawn)


def together(collectives: Sequence[CollectiveFacts]) -> list[CollectiveFacts]:
    """Collectives merged that look the same to a reader, those that take longest first."""
    looks = [look(one.kind, one.axes, one.bytes, one.by_hand, one.location) for one in collectives]
    rows = [[collectives[k] for k in row] for row in rows_of(looks, [one.seconds for one in collectives])]
    return [
        replace(
            row[0],
            count=sum(one.count for one in row),
            seconds=sum(one.seconds for one in row),
            location=_shared_location([one.location for one in row]),
        )
        for row in rows
    ]


def _shared_location(locations: Sequence[str]) -> str:
    """The common place of collectives of one row: one place, all passes, and the path if it differs only in layers."""
    if len(set(locations)) == 1:
        return locations[0]
    places, passes, paths = zip(*map(split_location, locations), strict=True)
    path = _NUMBER.sub("*", paths[0])
    shared = all(_NUMBER.sub("*", one) == path for one in paths)
    return join_location(places[0], "+".join(filter(None, dict.fromkeys(passes))), path if shared else "")
