"""Workarounds: shardings that plans avoid because the partitioner computes wrong results for them.

Enters: the axes of an op's slots. Leaves: the same without those that would come out wrong. `compiler.partitioner` says
which workarounds a version needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from toast_cli.plan.iteration import SlotAxes, Space


@dataclass(frozen=True, slots=True)
class Workarounds:
    """The workarounds in use. split_space: see `without_split_space`."""

    split_space: bool = True


ALL = Workarounds()


def without_split_space(space: Space, slot_axes: SlotAxes, sizes: tuple[int, ...]) -> SlotAxes:
    """The axes of a convolution's slots without those that split space where XLA's partitioner computes a wrong result.

    Where image and kernel are both split, and space is, it splits the kernel in space as well and sums over all
    devices. Devices that hold the same pieces, because an axis does not split the summed dimensions, then count several
    times: a gradient comes out doubled (jaxlib 0.10.2).
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
