"""`Pins`: shardings that a program itself fixes, in axis names of the chosen mesh.

Manual regions always do; other shardings stated by a program are pins only if the user asks to keep them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Per dimension the mesh axis names, or None for a dimension left open.
PinnedAxes = tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True)
class Pins:
    """`values` [value number], `uses` [(op number, operand position)]; `notices`: messages about shardings that could
    not be kept; `manual` [op number]: axes of manual regions, where their own names differ."""

    values: dict[int, PinnedAxes] = field(default_factory=dict)
    uses: dict[tuple[int, int], PinnedAxes] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    manual: dict[int, tuple[str, ...]] = field(default_factory=dict)


NO_PINS = Pins()
