"""Convolutions: the tiles that they fill, kernels that are reversed, and arguments that are copied for them.

In: a program and a convolution. Out: the growth of its flops, or which arguments are copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod

from toast_cli.compiler.liveness import Interval, Lives
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.compiler.space_to_batch import Images, is_gradient_of_weights
from toast_cli.program.model import DTYPE_BITS, Op, Program
from toast_cli.program.ops import CONVERT, CONVOLUTION, TRANSPOSE

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
    return ceil(size / tile) * tile / size if size else 1.0


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


@dataclass(frozen=True, slots=True)
class ConvolvedArgument:
    """The copy of an argument that convolutions read. interval: from the first that reads it to the last. images: its
    form where a device has few images. bits: of each element."""

    interval: Interval
    images: Images
    bits: int


def convolved_arguments(
    program: Program, stored: list[bool], lives: Lives, profile: CompilerProfile
) -> dict[int, ConvolvedArgument]:
    """Argument -> the copy of it that convolutions read.

    An argument is laid out for its shape, with its last two dimensions in the tiles; a convolution reads images and
    features in the tiles. So XLA:TPU copies the images that a step starts from, in the type that is multiplied, and
    keeps the copy for the gradient of the first kernel: 8 images of 3 x 224 x 224 f32 take 5 MiB, and their copy
    49 MiB in bf16, with 8 of 128 lanes in use. Seen in ViT, CLIP and RegNet on v4 and v5e.
    """
    if "convolved-arguments" not in profile.passes:
        return {}
    found = {}
    for value in (argument.value for argument in program.arguments):
        reads = list(_convolutions_of(program, stored, value))
        places = [
            (dims[batch], dims[max(window.operand_dim for window in program.ops[number].windows)])
            for number, dims in reads
            if (batch := _batch(program.ops[number])) >= 0
        ]
        if places:
            times = [lives.times[number] for number, _ in reads]
            bits = min(DTYPE_BITS.get(program.values[value].dtype, 32), profile.product_bits)
            found[value] = ConvolvedArgument((min(times), max(times)), Images(places[0], True, 1.0, 1.0), bits)
    return found


def _batch(op: Op) -> int:
    """The dimension of a convolution's image that has the images; -1 for gradients of weights."""
    image, kernel = op.rule.operands
    outside = {w.operand_dim for w in op.windows}
    features = {factor for dim in kernel for factor in dim}
    found = [d for d, factors in enumerate(image) if d not in outside and not features.intersection(factors)]
    return -1 if len(found) != 1 or is_gradient_of_weights(op) else found[0]


def _convolutions_of(program: Program, stored: list[bool], argument: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(number of a convolution outside of loops that reads an argument as its image, also transposed or converted,
    dimension of the argument for each of the image)."""
    waiting = [(argument, tuple(range(len(program.values[argument].shape))))]
    while waiting:
        value, dims = waiting.pop()
        for number, position in program.users[value]:
            op = program.ops[number]
            if op.loop < 0 and position == 0 and _has_pixels(op) and len(op.rule.operands) == 2:
                yield number, dims
            elif op.name in (CONVERT, TRANSPOSE) and not stored[op.results[0]]:
                given = list(op.rule.operands[0])
                waiting.append((op.results[0], tuple(dims[given.index(factors)] for factors in op.rule.results[0])))
