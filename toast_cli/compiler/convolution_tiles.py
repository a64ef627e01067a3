"""Convolution tiles: a convolution multiplies pixel by pixel, with images and features in the tiles of the matrix unit.

Spatial dimensions stay outside of the tiles, so each pixel at each position of the kernel is a separate product:
[images, one kind of features] by [that, the other kind]. Both kinds fill lanes, and their padding to 128 is wasted at
every position, however many pixels there are; also on v6e's unit of 256. Where no more than 16 features are summed
over, positions of the kernel share a tile. The gradient of a kernel is summed over images and pixels, which fill tiles
together; the two kinds of features fill theirs. Seen in some 440 single convolutions that libtpu 0.0.42.1 compiled for
v5e and v6e (1 to 256 features, 8 to 128 images, kernels of 1 to 7, strides of 1 to 4). A single spatial dimension may
be in the tiles, and then none of this holds. Without this pass a convolution fills tiles as a product of all pixels and
positions would.

Results of less than 4 bytes an element are packed as they are written, which takes time even if they stay on the chip
(`CompilerProfile.packed_part`); other results that stay there cost nothing. If images are in the lanes on one side,
where they waste less than features, and features on the other, each pixel is transposed
(`CompilerProfile.turning_cycles`): colours that become features, and features that become colours.

Enters: a convolution, and the shards of its operands. Leaves: the growth of its flops, and the number of
transpositions.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.compiler.space_to_batch import is_gradient_of_weights
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import CONVOLUTION

NAME = "convolution-tiles"
LANES, ROWS = 128, 8
FEW = 16  # features whose positions share a tile
Pieces = tuple[int, ...]  # number of shards of each dimension of an operand


@dataclass(frozen=True, slots=True)
class PixelProducts:
    """The products of one convolution: [rows, depth] and [depth, columns] at each of `positions` of the kernel.

    Attributes:
        rows, depth: (elements, dimension of the first operand). columns: (elements, dimension of the second).
        summed: over pixels as well as over `depth`: the gradient of a kernel.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    depth: tuple[int, int]
    positions: int
    summed: bool

    def growth(self, image: Pieces, kernel: Pieces) -> float:
        """Flops done over flops needed."""
        rows, columns, depth = self._local(image, kernel)
        if self.summed:
            return _wasted(rows, LANES if rows > FEW else ROWS) * _wasted(columns, LANES if columns > FEW else ROWS)
        deep = depth * self.positions if depth <= FEW else depth
        streamed = (_wasted(rows, ROWS) if rows >= ROWS else 1.0) * _wasted(columns, LANES)
        swapped = _wasted(rows, LANES) * _wasted(columns, ROWS)
        return min(streamed, swapped) * _wasted(deep, LANES)

    def turned(self, image: Pieces, kernel: Pieces) -> int:
        """Transpositions of each output pixel: one for every 128 images, or 0."""
        rows, columns, depth = self._local(image, kernel)
        if self.summed or _images_in_lanes(rows, depth) == _images_in_lanes(rows, columns):
            return 0
        return ceil(rows / LANES)

    def _local(self, image: Pieces, kernel: Pieces) -> tuple[int, int, int]:
        """Rows, columns and depth on one device."""
        columns, along = self.columns
        rows, depth = (ceil(size / image[dim]) for size, dim in (self.rows, self.depth))
        return rows, ceil(columns / kernel[along]), depth


def _images_in_lanes(images: int, features: int) -> bool:
    """Whether images in the lanes waste less than features in the lanes."""
    rows = next((r for r in (1, 2, 4) if features <= r), ceil(features / ROWS) * ROWS)
    return rows * ceil(images / LANES) * LANES < ceil(images / ROWS) * ROWS * ceil(features / LANES) * LANES


def _wasted(size: int, tile: int) -> float:
    return ceil(size / tile) * tile / size


def packs(op: Op, profile: CompilerProfile) -> bool:
    """Whether packing an op's result takes time even if it stays on the chip."""
    return NAME in profile.passes and _has_pixels(op)


def _has_pixels(op: Op) -> bool:
    return op.name == CONVOLUTION and len(op.windows) > 1


def pixel_products(program: Program, op: Op, profile: CompilerProfile) -> PixelProducts | None:
    """The products of a convolution; None for other ops, one or grouped dimensions, and without this pass."""
    if NAME not in profile.passes or not _has_pixels(op) or len(op.rule.operands) != 2:
        return None
    image, kernel, result = *op.rule.operands, op.rule.results[0]
    of_image, of_kernel, of_result = ({f for dim in dims for f in dim} for dims in (image, kernel, result))
    space = {w.operand_dim for w in op.windows}
    over = {w.kernel_dim for w in op.windows}
    depth = [d for d, factors in enumerate(image) if d not in space and of_kernel.intersection(factors)]
    rows = [d for d, factors in enumerate(image) if d not in space and d not in depth]
    columns = [d for d, factors in enumerate(kernel) if d not in over and not of_image.intersection(factors)]
    if not (len(depth) == len(rows) == len(columns) == 1) or of_image & of_kernel & of_result:
        return None
    shapes = [program.values[v].shape for v in op.operands]
    return PixelProducts(
        (shapes[0][rows[0]], rows[0]),
        (shapes[1][columns[0]], columns[0]),
        (shapes[0][depth[0]], depth[0]),
        prod(w.size for w in op.windows),
        is_gradient_of_weights(op),
    )
