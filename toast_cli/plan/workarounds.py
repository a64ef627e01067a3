"""What plans keep away from because a partitioner gets it wrong.

Enters: what an op has spent axes on. Leaves: the same without what would come out wrong. Which work-arounds a version
needs is told by `compiler.partitioner`; here they are data.
"""

from __future__ import annotations

from dataclasses import dataclass

from toast_cli.plan.iteration import SlotAxes, Space


@dataclass(frozen=True, slots=True)
class Workarounds:
    """Which are needed. split_space: see `without_split_space`."""

    split_space: bool = True


ALL = Workarounds()


def without_split_space(space: Space, slot_axes: SlotAxes, sizes: tuple[int, ...]) -> SlotAxes:
    """The axes of a convolution without those that split space where XLA's partitioner would not go along.

    Where image and kernel are both split, and space is, it splits the kernel in space as well and adds up over all
    devices. Those that hold the same pieces, because an axis does not split what is added up, then count several times:
    a gradient comes out doubled (jaxlib 0.10.2).
    """

    def spent(slots: frozenset[int]) -> set[int]:
        return {axis for slot in slots for axis in slot_axes[slot]}

    away: frozenset[int] = frozenset()
    if spent(space.tiled) and (spent(space.kernel) or spent(space.summed)):
        away = space.tiled
    if spent(space.summed):
        added_up = spent(space.summed | space.contracted)
        if away or any(size > 1 and axis not in added_up for axis, size in enumerate(sizes)):
            away |= space.summed
    return tuple([() if slot in away else axes for slot, axes in enumerate(slot_axes)])
