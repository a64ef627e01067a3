"""Accumulator windows: a product accumulates into an array that a loop keeps on the chip window by window, and windows
that do not fit become small ones.

The gradient of a recurrence's weights is read and written in every step of the loop. XLA:TPU divides it into the fewest
equal windows of whole tiles, of at most `OnChip.window_bytes`. Three of them must fit into a kernel's scratch memory;
otherwise XLA recompiles the kernel with small windows (`retry_count` in its text), which are six times slower, as slow
as elementwise work on the same bytes. So 1024 x 4096 and 2048 x 8192 elements are added to at 5.5 TB/s on v5e, and 1536
x 4096 at 0.9. Arrays that fit in there whole are unaffected. Seen in loops compiled by libtpu 0.0.42.1 for v5e: all of
85 shapes of 640 to 4,096 rows, and 15 of 18 others, follow this rule, with up to 128 rows of a batch (`python -m
benchmarks.resident v5e-16` has some of each). v4 and v5p have no such effect, and on v6e windows become small later and
cost less.

The dimensions of rows, and those of columns, count as one. Without this pass all of them are updated at the speed of
on-chip memory. Enters: the local result of a product. Leaves: whether its windows are small.
"""

from __future__ import annotations

from math import ceil, inf

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.compiler.tiling import tile_of

NAME = "accumulator-windows"
BUFFERED = 3  # windows that a kernel holds in its own memory at once


def has_small_windows(profile: CompilerProfile, rows: float, columns: float, bits: int) -> bool:
    """Whether a product that accumulates into [rows, columns] elements of `bits` bits is compiled with small
    windows."""
    most, own = profile.on_chip.window_bytes, profile.on_chip.own_bytes
    if NAME not in profile.passes or not most:
        return False
    tile = tile_of(profile)
    tiles = ceil(rows / tile[0]), ceil(columns / tile[1])
    size = tiles[0] * tiles[1] * tile[0] * tile[1] * bits / 8
    return size > own and BUFFERED * size / _fewest_pieces(tiles, size / most) > own


def _fewest_pieces(tiles: tuple[int, int], least: float) -> float:
    """The least number of equal pieces, at least `least`, into which the tiles divide."""
    found = inf
    for one in _divisors(tiles[0]):
        found = min([found, *(one * other for other in _divisors(tiles[1]) if one * other >= least)])
    return found


def _divisors(count: int) -> list[int]:
    return [k for k in range(1, count + 1) if count % k == 0]
