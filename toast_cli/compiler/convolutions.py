"""Convolutions: the tiles that they fill, and the copies of images and kernels that they read.

Enters: a program and a convolution. Leaves: the growth of its flops, and the arrays that are copied for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

from toast_cli.compiler.layouts import Dims
from toast_cli.compiler.liveness import Interval, Lives
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.compiler.space_to_batch import is_gradient_of_weights
from toast_cli.program.model import DTYPE_BITS, Op, Program
from toast_cli.program.ops import ARGUMENT, CONVOLUTION

LANES, ROWS = 128, 8
FEW = 16  # features whose positions share a tile
Pieces = tuple[int, ...]  # number of shards of each dimension of an operand


@dataclass(frozen=True, slots=True)
class PixelProducts:
    """The products of one convolution: [rows, depth] and [depth, columns] at each of `positions` of the kernel.

    A convolution multiplies pixel by pixel, with images and features in the tiles of the matrix unit: spatial
    dimensions stay outside of them, so each pixel at each position of the kernel is a separate product. Both kinds of
    features fill lanes, and their padding to 128 is wasted at every position, also on v6e's unit of 256. Where no more
    than 16 features are summed over, positions of the kernel share a tile. The gradient of a kernel is summed over
    images and pixels, which fill tiles together. If images are in the lanes on one side, where they waste less than
    features, and features on the other, each pixel is transposed (`CompilerProfile.turning_cycles`). Seen in some 440
    single convolutions that libtpu 0.0.42.1 compiled for v5e and v6e (1 to 256 features, 8 to 128 images, kernels of 1
    to 7, strides of 1 to 4). A single spatial dimension may be in the tiles, and then none of this holds.

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


def packs_result(op: Op, profile: CompilerProfile) -> bool:
    """Whether packing a convolution's result of less than 4 bytes an element takes time even if it stays on the chip
    (`CompilerProfile.packed_part`).
    """
    return "convolution-tiles" in profile.passes and _has_pixels(op)


def _has_pixels(op: Op) -> bool:
    return op.name == CONVOLUTION and len(op.windows) > 1


def pixel_products(program: Program, op: Op, profile: CompilerProfile) -> PixelProducts | None:
    """The products of a convolution; None for other ops, one or grouped dimensions, and without this pass."""
    if "convolution-tiles" not in profile.passes or not _has_pixels(op) or len(op.rule.operands) != 2:
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


def is_reversed(op: Op, profile: CompilerProfile) -> bool:
    """Whether the second operand of an op is reversed in memory.

    XLA's algebraic simplifier swaps the operands of a convolution whose kernel has more pixels than its image, as in
    the gradient of a transposed convolution's kernel, and reverses the new image first (`SwapConvOperands`; seen in
    steps of autoencoders on v4, v5e and v6e, where reversing took up to a third of the time).
    """
    if "swapped-convolutions" not in profile.passes or op.name != CONVOLUTION:
        return False
    return prod(w.size for w in op.windows) > prod(w.inputs for w in op.windows)


class ImageCopy(NamedTuple):
    """A copy of an argument for convolutions. part: fraction of its bits. dims: dimensions in the tiles, batch and
    features. interval: from the first convolution that reads it to the last. reader: the first one."""

    part: float
    dims: Dims
    interval: Interval
    reader: int


def image_copies(program: Program, stored: list[bool], lives: Lives, profile: CompilerProfile) -> dict[int, ImageCopy]:
    """Argument -> the copy of it that convolutions read, unless they can read it in place.

    An argument is stored in the tiles that waste least; a convolution requires batch and features in the tiles, and
    bf16 if it multiplies in bf16. So XLA:TPU makes one copy of a program's images before the first convolution that
    reads them, directly or elementwise, and keeps it for the last: the gradient of the kernel, at the end of the step.
    Three colours fill four rows, 8 images a device fill 128 lanes: 4.6 MiB of pixels become 49. Making it takes as long
    as writing it. Seen for 2 to 64 images of 3 to 32 features in single convolutions on v4 and v5e; with 128 features
    there is none.
    """
    found: dict[int, ImageCopy] = {}
    if "image-copies" not in profile.passes:
        return found
    for number, op in enumerate(program.ops):
        read = _argument_read(program, stored, op) if op.kind.convolution else None
        if read is None:
            continue
        source, dims = read
        dtype, time = program.values[op.operands[0]].dtype, lives.times[number]
        bits = profile.product_bits if dtype == "f32" else DTYPE_BITS.get(dtype, 32)
        part = bits / DTYPE_BITS.get(program.values[source].dtype, 32)
        known = found.get(source, ImageCopy(part, dims, (time, time), number))
        first, last = known.interval
        found[source] = ImageCopy(max(part, known.part), dims, (min(first, time), max(last, time)), known.reader)
    return found


def _argument_read(program: Program, stored: list[bool], convolution: Op) -> tuple[int, Dims] | None:
    """(argument that is a convolution's operand, or that it is computed from elementwise; its dimensions that are not
    spatial), or None."""
    value, dims = convolution.operands[0], convolution.rule.operands[0]
    kept = {d for d, factors in enumerate(dims) if convolution.rule.permutation.isdisjoint(factors)}
    elements = program.values[value].elements
    while (op := program.ops[program.producer[value]]).name != ARGUMENT:
        if stored[value] or not (op.kind.elementwise or op.kind.view_or_convert) or not op.rule.results:
            return None
        like = next((k for k, v in enumerate(op.operands) if program.values[v].elements == elements), None)
        if like is None:
            return None
        factors = {f for d in kept for f in op.rule.results[0][d]}
        kept = {d for d, of in enumerate(op.rule.operands[like]) if not factors.isdisjoint(of)}
        value = op.operands[like]
    return value, tuple(sorted(kept))
