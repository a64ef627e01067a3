"""`Pins`: shardings that a program itself insists on, in axis names of the mesh chosen.

Manual regions always do; other shardings a program states are pins when they are kept on request.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Per dimension the mesh axis names, or None for a dimension left open.
PinnedAxes = tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True)
class Pins:
    """`values` [value number], `uses` [(op number, operand position)]; `notices` say what could not be carried over;
    `manual`: axes of regions over some axes [op number], where the regions call them otherwise."""

    values: dict[int, PinnedAxes] = field(default_factory=dict)
    uses: dict[tuple[int, int], PinnedAxes] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    manual: dict[int, tuple[str, ...]] = field(default_factory=dict)


NO_PINS = Pins()
