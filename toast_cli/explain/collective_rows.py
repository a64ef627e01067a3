"""Collectives as reports list them, and as `toast explain --collective` counts them.

Enters: collectives of a plan, the most expensive first. Leaves: those that run as a whole, and rows of those that look
alike to a reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from toast_cli.cost.model import BY_HAND, CollectiveUse


@dataclass(frozen=True)
class WholeUse:
    """A collective with the runs and the seconds that it is listed with."""

    use: CollectiveUse
    count: int
    seconds: float


def whole_uses(uses: Sequence[CollectiveUse]) -> list[WholeUse]:
    """Whole collectives: of those in branches, which run in a part of all steps, the ones named first have the
    others'."""
    owed: dict[tuple[object, ...], tuple[float, float]] = {}  # runs and seconds not yet listed
    found = []
    for use in uses:
        written = (use.written[0], round(use.written[1]))
        key = (use.kind, round(use.bytes), written, tuple(use.axes), use.group, use.reason == BY_HAND)
        count, seconds = owed.get(key, (0.0, 0.0))
        count, seconds = count + use.count, seconds + use.seconds
        whole = round(count)
        owed[key] = (count - whole, 0.0 if whole else seconds)
        if whole:
            found.append(WholeUse(use, whole, seconds))
    return found


def rows_of(looks: Sequence[Hashable], seconds: Sequence[float]) -> list[list[int]]:
    """Positions of what looks alike, the rows that take longest first.

    Args:
        looks, seconds: [collectives] what a reader sees of each (see `look`), and the time it takes.
    """
    rows: dict[Hashable, list[int]] = defaultdict(list)
    for position, look in enumerate(looks):
        rows[look].append(position)
    return sorted(rows.values(), key=lambda row: -sum(seconds[position] for position in row))


def look(kind: str, over: Sequence[str], size: int, by_hand: bool, location: str) -> Hashable:
    """What a reader sees of a collective: `location` up to the names in brackets."""
    return kind, tuple(over), size, by_hand, location.partition(" (")[0]
