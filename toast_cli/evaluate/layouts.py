"""Bytes of arrays in the compiler's layouts: in tiles, in the layouts that convolutions require, and in gathered
pieces.

In: array items with their shardings. Out: bytes on one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, prod

from toast_cli.compiler.convolutions import ConvolvedArgument
from toast_cli.compiler.layouts import (
    UNPADDED,
    RowCopy,
    Sides,
    Tiling,
    copied_rows,
    growth_in,
    innermost_dims,
    pieces_are_copied,
    tile_of,
)
from toast_cli.compiler.layouts import growth as growth_of_tiles
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.evaluate.array_items import ArrayItem, reader_op
from toast_cli.plan.problem import Problem
from toast_cli.plan.reshard import GATHER, Copy
from toast_cli.plan.sharding import Sharding, shards


class Layouts:
    """Layouts of the arrays of one problem."""

    def __init__(self, problem: Problem, profile: CompilerProfile) -> None:
        self._problem, self._profile = problem, profile
        self._sizes, self._tile = problem.mesh.sizes, tile_of(profile)
        self._growths: dict[tuple[tuple[int, ...], Tiling, Sharding, Sharding], float] = {}

    def kept(self, item: ArrayItem, made: Sharding) -> float:
        """Bytes on one device of the item's array where it is made, including tile padding and all layouts that are
        kept."""
        shape = self._local_shape(item.shape, made) if item.images else ()
        if not item.images or not item.images.applies(shape):
            return self.laid_out(item, item.written_bytes, made, made)
        return item.images.kept(shape, item.tiling.dims, self._tile) * item.written_bytes / prod(item.shape)

    def convolved(self, item: ArrayItem, copied: ConvolvedArgument, made: Sharding) -> float:
        """Bytes on one device of the copy of an argument that convolutions read."""
        shape, dims = self._local_shape(item.shape, made), item.tiling.dims
        few = copied.images.applies(shape)
        elements = copied.images.kept(shape, dims, self._tile) if few else prod(shape)
        return elements * (1.0 if few else growth_of_tiles(shape, dims, self._tile)) * copied.bits / 8

    def row_copies(self, item: ArrayItem, made: Sharding) -> Iterator[tuple[RowCopy, float, float]]:
        """(copy, its bytes on one device, its tiles) of each copy into tiles of rows."""
        local = self._local_shape(item.shape, made)
        for copy in item.row_copies:
            wasted, tiles = copied_rows(local, copy, self._tile, 8 * item.bytes // max(1, prod(item.shape)))
            if tiles:
                yield copy, wasted * item.written_bytes / shards(made, self._sizes), tiles

    def is_copied_to_return(self, item: ArrayItem, sides: Sides, made: Sharding) -> bool:
        """Whether a contraction's result is returned in tiles that the contraction does not write."""
        local, bits = self._local_shape(item.shape, made), 8 * item.bytes // max(1, prod(item.shape))
        return self._tile != UNPADDED and not any(
            innermost_dims(local, self._tile, bits) in ((a, b), (b, a)) for a in sides[0] for b in sides[1]
        )

    def laid_out(self, item: ArrayItem, size: float, sharding: Sharding, made: Sharding) -> float:
        """Bytes on one device of the item's array, `size` bytes when whole, including tile padding. made: its sharding
        where it is made, whose tiles copies keep."""
        tiling = item.tiling
        dims = tuple(range(len(item.shape))) if tiling.copies and sharding == made else tiling.dims
        if not dims:
            return size / shards(sharding, self._sizes) * tiling.fixed
        key = item.shape, replace(tiling, dims=dims), sharding, made
        found = self._growths.get(key)
        if found is None:
            cut, source = (self._local_shape(item.shape, at) for at in (sharding, made))
            found = self._growths[key] = growth_in(cut, key[1], self._tile, source)
        return size / shards(sharding, self._sizes) * found

    def is_put_together(self, item: ArrayItem, copy: Copy, made: Sharding) -> bool:
        """Whether the last gather of a copy copies its pieces, see `pieces_are_copied`."""
        before, last = made, None
        for step, after in copy.steps:
            if step.kind == GATHER:
                last = before, after
            before = after
        if last is None:
            return False
        piece, ops = self._local_shape(item.shape, last[0]), self._problem.program.ops
        readers = (item.readers[place] for place in copy.places)
        looked_up = any(
            reader.position == 0 and ops[reader_op(self._problem, item, reader.pattern, 0)].kind.lookup
            for reader in readers
        )
        return any(
            pieces_are_copied(self._profile, piece, dim, looked_up=looked_up)
            for dim, (there, left) in enumerate(zip(*last, strict=True))
            if len(left) < len(there)
        )

    def _local_shape(self, shape: tuple[int, ...], sharding: Sharding) -> tuple[int, ...]:
        return tuple([ceil(n / shards((axes,), self._sizes)) for n, axes in zip(shape, sharding, strict=True)])
