"""Convolutions: the tiles that they fill, kernels that are reversed, arguments that are copied for them, and
space-to-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod

from toast_cli.price.layouts import Dims, tile_growth
from toast_cli.price.liveness import Interval, Lives
from toast_cli.price.profile import CompilerProfile, TileShape
from toast_cli.program.model import Op, Program, ValueFactors, factors_of
from toast_cli.program.ops import (
    ARGUMENT,
    BROADCAST_IN_DIM,
    CONCATENATE,
    CONVERT,
    CONVOLUTION,
    REDUCE,
    RESHAPE,
    TRANSPOSE,
)

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
    of_image, of_kernel, of_result = factors_of(image, kernel, result)
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
    copies = {}
    for value in (argument.value for argument in program.arguments):
        reads = list(_convolutions_of(program, stored, value))
        places = [
            (dims[batch], dims[max(window.operand_dim for window in program.ops[number].windows)])
            for number, dims in reads
            if (batch := _batch(program.ops[number])) >= 0
        ]
        if places:
            times = [lives.times[number] for number, _ in reads]
            bits = min(program.values[value].bits, profile.product_bits)
            copies[value] = ConvolvedArgument((min(times), max(times)), Images(places[0], True, 1.0, 1.0), bits)
    return copies


def _batch(op: Op) -> int:
    """The dimension of a convolution's image that has the images; -1 for gradients of weights."""
    image, kernel = op.rule.operands
    outside = {w.operand_dim for w in op.windows}
    (features,) = factors_of(kernel)
    batch = [d for d, factors in enumerate(image) if d not in outside and not features.intersection(factors)]
    return -1 if len(batch) != 1 or is_gradient_of_weights(op) else batch[0]


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


# ---------------------------------------------------------------- space-to-batch
# Space-to-batch: for convolutions of few images XLA:TPU turns pieces of space into pieces of the batch.
#
# Tiles have 8 rows, which hold the batch. Where a device has fewer images, XLA:TPU (libtpu 0.0.42.1 for v4 to v6e)
# cuts the last dimension of space, if it is 16 or more, into 8 pieces, each one element longer than an eighth, and
# makes them part of the batch. Elementwise work on a convolution's result goes on in that form where all that it reads
# of this size has it. But nothing is fused where the form changes or windows reach into other pieces:
#
# * what a convolution reads of an array is written, and, if the array has the form itself, once more with what windows
#   reach;
# * a norm after which the form ends writes intermediates in the type it computes in: a group norm three of them (none
#   for a single image), a norm that is added to an array without the form two.
#
# Cutting and reassembling takes dozens of kernels, in sum `PASSES` passes through either array.

IMAGES, PIECES = 8, 8  # from so many images on it does not apply; pieces, of two elements at least
GROUPED_STEPS, JOINED_STEPS = 3, 2  # arrays written by a group norm, and by a norm that is added to what has no pieces
# Reads and writes of a convolution's operand and result: fitted to the steps with 4 images of the family "convolution
# step" of `benchmarks/op_cases.py` on v4, v5e and v6e.
PASSES = 18.0
ImageDims = tuple[int, int]  # dimensions of an image: batch, and the last of space


@dataclass(frozen=True, slots=True)
class Images:
    """The copies of a value of images that are kept, if a device has few images.

    Attributes:
        place: batch dimension and last spatial dimension.
        pieces: the value is in space-to-batch form.
        forms, single: size of all kept copies over the value's own, on a device with few images and with one.
    """

    place: ImageDims
    pieces: bool
    forms: float
    single: float

    def applies(self, shape: tuple[int, ...]) -> bool:
        """Whether a device that holds an array of this local shape has few images."""
        return _are_few(shape, self.place)

    def kept(self, shape: tuple[int, ...], dims: Dims, tile: TileShape) -> float:
        """Elements in memory of all kept copies. dims: see `Tiling`; only pieces keep space out of the tiles."""
        batch, width = self.place
        forms, given = self.forms if shape[batch] > 1 else self.single, list(shape)
        if self.pieces:
            count = PIECES
            given[batch], given[width] = count * shape[batch], shape[width] // count + 1
        else:
            dims = tuple(range(len(shape)))
        return forms * prod(given) * (tile_growth(tuple(given), dims, tile) if dims else 1.0)


@dataclass(frozen=True, slots=True)
class ConvolvedImage:
    """The operand or result of a convolution. bits: of each element while it is cut. shape: of the whole array. place:
    batch dimension and last spatial dimension."""

    bits: int
    shape: tuple[int, ...]
    place: ImageDims

    def moved(self, shape: tuple[int, ...]) -> float:
        """Bytes read and written to cut an array of this local shape into pieces or to reassemble it; 0 if it stays
        whole."""
        if not _are_few(shape, self.place):
            return 0.0
        return PASSES * 2 * prod(shape) * self.bits / 8


def _are_few(shape: tuple[int, ...], place: ImageDims) -> bool:
    batch, width = place
    return shape[batch] < IMAGES and shape[width] >= 2 * PIECES


def space_to_batch(program: Program, stored: list[bool], profile: CompilerProfile) -> list[Images | None]:
    """[values] the kept copies; None for values that are no images of convolutions, and without this pass."""
    if "space-to-batch" not in profile.passes or all(op.name != CONVOLUTION for op in program.ops):
        return [None] * len(program.values)
    pieces: list[ImageDims | None] = [None] * len(program.values)
    images: dict[int, ImageDims] = {}  # operands of convolutions
    for op in program.ops:
        if op.name == CONVOLUTION and len(op.rule.operands) == 2 and not is_gradient_of_weights(op):
            # In space-to-batch form; a 1 x 1 convolution keeps its operand's form.
            cut = pieces[op.operands[0]] or any(w.size > 1 for w in op.windows)
            pieces[op.results[0]] = _place(op.rule.results[0], op.rule.operands[1]) if cut else None
            place = _place(op.rule.operands[0], op.rule.operands[1])
            if pieces[op.results[0]] and place:
                images[op.operands[0]] = place
        elif len(op.results) == 1:
            pieces[op.results[0]] = _of_operands(program, op, pieces)
    places = list(pieces)
    read: Counter[int] = Counter()
    ops, producer = program.ops, program.producer
    sources = _sources(program, stored)
    for value, place in images.items():
        for source in sources[value]:
            if ops[producer[source]].name != ARGUMENT and _alike(program, source, value, place):
                read[source] += (source != value) + (pieces[source] is not None)
                places[source] = pieces[source] or place
    copies: list[Images | None] = []
    for value, place in enumerate(places):
        if place is None or not stored[value] or not program.values[value].elements:
            copies.append(None)
            continue
        grouped, joined = _norm_steps(program, stored, pieces, value) if pieces[value] else (0.0, 0.0)
        forms, single = (
            steps + (not steps or len(program.users[value]) > 1) + read[value] for steps in (grouped or joined, joined)
        )
        copies.append(Images(place, pieces[value] is not None, forms, single))
    return copies


def convolved_images(program: Program, number: int, profile: CompilerProfile) -> Iterator[ConvolvedImage]:
    """The operand and the result of a windowed convolution that may be cut into pieces; none for gradients of
    weights."""
    op = program.ops[number]
    windows = any(w.size > 1 for w in op.windows) and not is_gradient_of_weights(op)
    if "space-to-batch" not in profile.passes or not windows or len(op.rule.operands) != 2:
        return
    sides = ((op.operands[0], op.rule.operands[0]), (op.results[0], op.rule.results[0]))
    places = [_place(dims, op.rule.operands[1]) for _, dims in sides]
    for (value, _), place in zip(sides, places, strict=True):
        if place and all(places):
            yield ConvolvedImage(profile.product_bits, program.values[value].shape, place)


def _alike(program: Program, source: int, image: int, place: ImageDims) -> bool:
    """Whether a value has the same batch and spatial dimensions as an image, which may be a reshape of it."""
    shape, of_image = (program.values[v].shape for v in (source, image))
    return len(shape) == len(of_image) and all(shape[d] == of_image[d] for d in place)


def is_gradient_of_weights(op: Op) -> bool:
    """Whether an op is a convolution whose windows span the image, as for gradients of weights."""
    return bool(op.windows) and all(2 * ((w.size - 1) * w.spread + 1) > w.inputs for w in op.windows)


def _place(dims: ValueFactors, weights: ValueFactors) -> ImageDims | None:
    """Batch and last spatial dimension of an image: the first and last that are not features, which the weights
    share."""
    (features,) = factors_of(weights)
    image = [d for d, factors in enumerate(dims) if not features.intersection(factors)]
    return (image[0], image[-1]) if len(image) > 1 else None


def _of_operands(program: Program, op: Op, pieces: list[ImageDims | None]) -> ImageDims | None:
    """Place of an op's result in space-to-batch form, or None: elementwise ops keep it if all operands of their size
    have it, sums over features if their operand has it."""
    if op.name == REDUCE:
        return _left(op, pieces[op.operands[0]])
    if not _is_pointwise(op):
        return None
    elements, ops, producer = program.values[op.results[0]].elements, program.ops, program.producer
    places = {
        pieces[v]
        for v in op.operands
        if op.name == CONCATENATE
        or (program.values[v].elements == elements and ops[producer[v]].name != BROADCAST_IN_DIM)
    }
    return places.pop() if len(places) == 1 else None


def _left(op: Op, place: ImageDims | None) -> ImageDims | None:
    """Batch and last spatial dimension in the result of a reduction of an image."""
    if not place or not op.rule.results:
        return None
    terms, sums = op.rule.operands[0], op.rule.results[0]
    dims = [d for dim in place for d, factors in enumerate(sums) if factors and factors == terms[dim]]
    return (dims[0], dims[1]) if len(dims) == 2 else None


def _norm_steps(
    program: Program, stored: list[bool], pieces: list[ImageDims | None], value: int
) -> tuple[float, float]:
    """(sizes of the written steps of a group norm, of a norm that is added to an array in another form), over the size
    of the value that the norm reads; 0 if there is none."""
    pending, seen = [(value, False)], {value}
    grouped = joined = False
    widest = 0.0
    while pending:
        array, reshaped = pending.pop()
        for reader, _ in program.users[array]:
            op, result = program.ops[reader], program.ops[reader].results[0] if program.ops[reader].results else array
            if op.name == REDUCE:
                widest = max(widest, _bytes_each(program, array))
            shapes = op.name == RESHAPE
            goes_on = shapes or (_is_pointwise(op) and (reshaped or pieces[result] is not None))
            joins = _is_pointwise(op) and all(
                v == array or program.producer[v] < program.producer[value] for v in op.operands
            )
            grouped |= shapes
            joined |= joins and not goes_on
            if goes_on and result not in seen and not stored[result]:
                seen.add(result)
                pending.append((result, reshaped or shapes))
    wider = widest / _bytes_each(program, value)
    return grouped * GROUPED_STEPS * wider, joined * JOINED_STEPS * wider


def _is_pointwise(op: Op) -> bool:
    return op.name == CONCATENATE or op.kind.elementwise


def _bytes_each(program: Program, value: int) -> float:
    return program.values[value].bytes / max(1, program.values[value].elements)


def _sources(program: Program, stored: list[bool]) -> list[tuple[int, ...]]:
    """[values] the latest stored array of its size that each is computed from; for concatenations, those of all
    operands."""
    sources: list[tuple[int, ...]] = [()] * len(program.values)
    for op in program.ops:
        for value in op.results:
            if stored[value]:
                sources[value] = (value,)
            elif op.name == CONCATENATE:
                sources[value] = tuple(dict.fromkeys(source for v in op.operands for source in sources[v]))
            else:
                elements = program.values[value].elements
                same = [sources[v] for v in op.operands if sources[v] and program.values[v].elements == elements]
                sources[value] = max(same, key=lambda arrays: program.producer[arrays[-1]], default=())
    return sources
