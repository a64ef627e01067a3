"""Image copies: an argument that convolutions read is copied into the tiles and the type that they require.

An argument is stored in the tiles that waste least; a convolution requires batch and features in the tiles, and bf16 if
it multiplies in bf16. So XLA:TPU makes one copy of a program's images before the first convolution that reads them,
directly or elementwise, and keeps it for the last: the gradient of the kernel, at the end of the step. Three colours
fill four rows, 8 images a device fill 128 lanes: 4.6 MiB of pixels become 49. Making it takes as long as writing it.
Seen for 2 to 64 images of 3 to
32 features, in single convolutions (patches, strides, batch first and features first, f32 and bf16) compiled by libtpu
0.0.42.1 for v4 and v5e; with 128 features there is none. Without this pass convolutions read arguments in place.

Enters: a program, its written values and its schedule. Leaves: the copied arguments, with the copies' lifetimes.
"""

from __future__ import annotations

from typing import NamedTuple

from toast_cli.compiler.liveness import Interval, Lives
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.compiler.tiling import Dims
from toast_cli.program.model import DTYPE_BITS, Op, Program
from toast_cli.program.ops import ARGUMENT

NAME = "image-copies"


class ImageCopy(NamedTuple):
    """A copy of an argument for convolutions. part: fraction of its bits. dims: dimensions in the tiles, batch and
    features. interval: from the first convolution that reads it to the last. reader: the first one."""

    part: float
    dims: Dims
    interval: Interval
    reader: int


def image_copies(program: Program, stored: list[bool], lives: Lives, profile: CompilerProfile) -> dict[int, ImageCopy]:
    """Argument -> the copy of it that convolutions read, unless they can read it in place."""
    found: dict[int, ImageCopy] = {}
    if NAME not in profile.passes:
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
