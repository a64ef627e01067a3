"""Groups collectives into rows, for reports and for the numbering of `toast explain --collective`.

Enters: collectives of a plan, the most expensive first. Leaves: rows of those that look alike to a reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence


def rows_of(looks: Sequence[Hashable], seconds: Sequence[float]) -> list[list[int]]:
    """Positions of equal entries, the rows that take longest first.

    Args:
        looks, seconds: [collectives] the visible properties of each (see `look`), and its time.
    """
    rows: dict[Hashable, list[int]] = defaultdict(list)
    for position, look in enumerate(looks):
        rows[look].append(position)
    return sorted(rows.values(), key=lambda row: -sum(seconds[position] for position in row))


def look(kind: str, over: Sequence[str], size: int, by_hand: bool, location: str) -> Hashable:
    """The visible properties of a collective: `location` without the names in brackets."""
    return kind, tuple(over), size, by_hand, location.partition(" (")[0]
