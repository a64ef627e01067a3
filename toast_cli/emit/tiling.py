"""Writes shardings in GSPMD's notation.

`{devices=[4,1,2]<=[8] last_tile_dim_replicate}` means: dimension 0 in four parts, dimension 1 whole, two copies of each
part; devices 0 to 7 in row-major order. `<=[4,2]T(1,0)` numbers them through a 4 x 2 grid column by column. Notation:
xla/hlo/ir/hlo_sharding.h and tile_assignment.h.
"""

from __future__ import annotations

from math import prod

from toast_cli.plan.sharding import Sharding, without

REPLICATED, MANUAL = "{replicated}", "{manual}"


def gspmd_string(sharding: Sharding, axis_sizes: tuple[int, ...], manual: frozenset[int] = frozenset()) -> str:
    """GSPMD's text of `sharding` on a mesh with these axis sizes, devices in row-major order, as XLA itself prints it.

    Args:
        manual: manual axes of the region that the array is in; they are left out of `sharding`.
    """
    by_hand = [axis for axis in sorted(manual) if axis_sizes[axis] > 1]
    if manual and all(size == 1 or axis in manual for axis, size in enumerate(axis_sizes)):
        return MANUAL
    sharding = without(sharding, manual)
    tiles = [prod(axis_sizes[axis] for axis in axes) for axes in sharding]
    if prod(tiles) == 1 and not by_hand:
        return REPLICATED
    used = [axis for axes in sharding for axis in axes] + by_hand
    unused = [axis for axis in range(len(axis_sizes)) if axis not in used]
    copies = prod(axis_sizes[axis] for axis in unused)
    last = " last_tile_dim_replicate" if copies > 1 else ""
    if by_hand:
        tiles.append(prod(axis_sizes[axis] for axis in by_hand))
        last = f" last_tile_dims={{manual{', replicated' if copies > 1 else ''}}}"
    if copies > 1:
        tiles.append(copies)
    dimensions, order = merged([axis for axis in used + unused if axis_sizes[axis] > 1], axis_sizes)
    grid = f"[{commas(dimensions)}]"
    if len(dimensions) > 1:
        grid += f"T({commas(order)})"
    return "{" + f"devices=[{commas(tiles)}]<={grid}" + last + "}"


def merged(order: list[int], axis_sizes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Grid and transposition that list the devices with mesh axes in `order`, in the fewest dimensions.

    Axes that are adjacent both on the mesh and in `order` are merged; axes of size 1 are left out.
    """
    present = sorted(order)
    runs: list[list[int]] = []
    for axis in order:
        if runs and present.index(axis) == present.index(runs[-1][-1]) + 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    by_mesh = sorted(range(len(runs)), key=lambda k: runs[k][0])
    dimensions = [prod(axis_sizes[axis] for axis in runs[k]) for k in by_mesh]
    return dimensions, [by_mesh.index(k) for k in range(len(runs))]


def commas(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))
