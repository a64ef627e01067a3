"""XLA:GPU's kernels: convolutions and products that libraries compute, look-ups, and its temporaries.

Seen in programs compiled by jaxlib 0.10.2 ahead of time for H100, and timed with jax 0.11.2 on an H200
(`benchmarks/gpu_timer.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from math import prod
from typing import NamedTuple

from toast_cli.price.liveness import Interval, Lives
from toast_cli.price.profile import CompilerProfile
from toast_cli.program.model import Op, Program, Window, factors_of
from toast_cli.program.ops import SCATTER, SELECT, TRANSPOSE
from toast_cli.program.values import scatters_into


def is_read_by_convolution(program: Program, kernels: Iterable[int]) -> bool:
    """Whether one of the kernels, given by their last ops, is a convolution.

    XLA:GPU hands convolutions to cuDNN, which knows nothing of other operations: what is elementwise before one (an
    activation, a conversion, padding) is a kernel of its own that writes what the convolution reads, and so is what
    comes after it. Only changes of form that leave the elements where they are, and a reversed kernel, cost nothing.
    cuDNN wants the features that are added up to lie innermost, in the kernel too: the smallest of the three arrays is
    transposed before it or after it, at half the rate of other copies. XLA:TPU computes all that in the convolution's
    kernel.
    """
    return any(program.ops[number].kind.convolution for number in kernels)


# Convolutions of fewer features do not use the matrix units; fractions of the f32 units' rate.
FEW_FEATURES, FEW_PART, GROUPED_PART = 8, 0.6, 0.075
SLOW_GRADIENT = 2.0
RESULT_TILE = 128  # rows and columns of a tile of results there


def f32_part(program: Program, op: Op) -> float:
    """Fraction of the f32 units' rate that a convolution attains there, 0 if it runs on the matrix units.

    Convolutions of less than eight features run on the f32 units (an image of 224 x 224 x 3 by 7 x 7 at 34 TFLOP/s),
    and those of feature groups with little use of them (3 x 3 and 7 x 7 at 4 to 6 TFLOP/s).
    """
    left, right, out = factors_of(*op.rule.operands[:2], op.rule.results[0])
    if any(op.rule.sizes[factor] > 1 for factor in left & right & out):
        return GROUPED_PART
    space = {w.kernel_dim for w in op.windows}
    kernel = zip(program.values[op.operands[1]].shape, op.rule.operands[1], strict=True)
    features = [n for dim, (n, fs) in enumerate(kernel) if dim not in space and not (left | out).isdisjoint(fs)]
    forward = all(w.size <= w.outputs for w in op.windows)
    return FEW_PART if forward and min(features) < FEW_FEATURES else 0.0


def gradient_slowdown(op: Op, bits: int) -> float:
    """Factor by which the gradient of a kernel is slower than another product of the same size: twice, in f32 (100 to
    167 TFLOP/s on an H200).
    """
    gradient = bool(op.windows) and all(w.size > w.outputs for w in op.windows)
    return SLOW_GRADIENT if gradient and bits > 16 else 1.0


def terms_of_whole_images(op: Op) -> int:
    """Spatial terms of each result element, if a convolution's window is a whole image; else 0.

    XLA:GPU sees the gradient of a kernel only in convolutions of stride 1 over images without gaps. That of a
    transposed or of a dilated convolution runs as a convolution whose window is a whole image: of few results, each of
    so many terms, which cuDNN does on the f32 units, with one multiprocessor for a tile of results. In an autoencoder's
    step on an H200, results of 576 x 128 of 63,504 terms took 3.0 ms; steps in bf16 a third to the whole of that.
    """
    if not op.windows or all(w.stride == 1 and w.dilation == 1 for w in op.windows):
        return 0
    if any(2 * _kernel(w) <= _image(w) or w.outputs >= w.size for w in op.windows):
        return 0
    return min(prod(map(_kernel, op.windows)), prod(map(_image, op.windows)))


def _kernel(window: Window) -> int:
    return (window.size - 1) * window.spread + 1


def _image(window: Window) -> int:
    return (window.inputs - 1) * window.dilation + 1


SMALL = 8  # ratio of bytes from which an array counts as small beside another (a bias)
MOST_GROUPS = 3
FEW_ROWS = 16


def library_finishes(op: Op, size: int, result_bytes: int, others: Iterable[int]) -> bool:
    """Whether an op with that many result bytes is fused into the epilogue of a contraction of `size` bytes. others:
    ranks of the arrays that each other operand is computed from.

    XLA:GPU has contractions computed by cuBLAS or by a Triton kernel of its own. On the way in and out such a kernel
    rearranges, converts, scales, adds a bias or takes the larger of two numbers: whatever reads one large array alone
    and evaluates no function. All else (an activation, a gate, a residual, an optimiser's update, a sum) is a kernel of
    its own that reads what the contraction wrote, or writes what it reads. That counts for time alone: memory is
    counted as if the contraction did it, and one factor stands for what XLA:GPU keeps besides (see `temporary_growth`),
    which is nearer to its buffer assignments.
    """
    other = op.kind.transcendental or op.kind.polynomial or op.name == SELECT
    return not other and not reorders(op) and result_bytes <= size and all(rank <= 1 for rank in others)


def library_computes(effort: int, read: Iterable[int]) -> bool:
    """Whether a contraction fuses the computation of an operand. effort: 0 if that evaluates no function. read: bytes
    of each array that it reads."""
    sizes = sorted(read, reverse=True)
    return effort == 0 and not any(SMALL * size > sizes[0] for size in sizes[1:])


def reorders(op: Op) -> bool:
    """Whether an op transposes more groups of dimensions than a library call can absorb, and is a kernel of its own."""
    if op.name != TRANSPOSE:
        return False
    operand, result = (_factors(op, dims) for dims in (op.rule.operands[0], op.rule.results[0]))
    places = [operand.index(factor) for factor in result]
    return 1 + sum(after != before + 1 for before, after in pairwise(places)) > MOST_GROUPS


def copied_operands(program: Program, op: Op) -> tuple[int, ...]:
    """Positions of a contraction's operands that are copied into another dimension order.

    An array whose rows lie apart in memory (a batch of heads, [batch, sequence, heads, features]) is copied into the
    order that the library wants, unless an elementwise kernel makes it, which then writes it in that order, or the
    other side has so few rows that XLA multiplies without the library (a decoding step).
    """
    if not op.kind.contraction or len(op.operands) != 2:
        return ()
    left, right, out = (set(_factors(op, dims)) for dims in (*op.rule.operands[:2], op.rule.results[0]))
    if min(prod(op.rule.sizes[factor] for factor in side & out) for side in (left - right, right - left)) < FEW_ROWS:
        return ()
    positions = []
    for position, value in enumerate(op.operands):
        sides = [(f in left & right, f in out) for f in _factors(op, op.rule.operands[position])]
        groups = [side for side, _ in groupby(sides)]
        maker = program.ops[program.producer[value]]
        while maker.kind.view:
            maker = program.ops[program.producer[maker.operands[0]]]
        if len(set(groups)) < len(groups) and not maker.kind.elementwise:
            positions.append(position)
    return tuple(positions)


def _factors(op: Op, dims: Sequence[Sequence[int]]) -> list[int]:
    """Factors of more than one element, in the order of an array's dimensions."""
    return [factor for dim in dims for factor in dim if op.rule.sizes[factor] > 1]


def is_fused_lookup(op: Op) -> bool:
    """Whether an op is fused into the kernels that read it, other than contractions.

    XLA:GPU counts a gather among the cheap operations, as it does a slice, and computes it in each kernel that reads
    its rows, forward and backward, unless that is a product or a library's convolution; and a scatter's kernel computes
    the updates that it adds. Messages along the edges of a graph, with attention over them, are never materialised.
    XLA:TPU has kernels of its own for both, which read and write memory.
    """
    return op.kind.lookup and not op.kind.updates


class ScatterStart(NamedTuple):
    """interval: from the array's initialisation to its scatter. added: the scatter adds directly to the other operand
    of an addition (see `scatters_into`), unless its result is partial."""

    interval: Interval
    added: bool


def scatter_starts(
    program: Program, free: tuple[bool, ...], lives: Lives, profile: CompilerProfile
) -> dict[int, ScatterStart]:
    """Result of a scatter -> the early initialisation of its array. free: [values] made of constants alone.

    A scatter into zeros (a sum over the edges of each node, the gradient of a look-up) adds to them in their own
    buffer. XLA:GPU makes the zeros of all scatters of one shape in one kernel, before the first of them, so that the
    arrays of the last ones are live through the whole step: 6 of the 12 of a graph network's training step at its peak
    (`python -m benchmarks.real.quick "jraph network" --split fit --mesh h100-8`). XLA:TPU makes each as its scatter
    runs.
    """
    if "scatter-starts" not in profile.passes:
        return {}
    alike: dict[tuple[tuple[int, ...], str, int], list[int]] = {}
    for number, op in enumerate(program.ops):
        if op.name == SCATTER and len(op.results) == 1 and free[op.operands[0]]:
            value = program.values[op.results[0]]
            alike.setdefault((value.shape, value.dtype, op.loop), []).append(number)
    waits = {}
    for numbers in alike.values():
        first = min(lives.times[number] for number in numbers)
        for number in numbers:
            if first < lives.times[number]:
                result = program.ops[number].results[0]
                added = any(scatters_into(program.ops[user], program) for user, _ in program.users[result])
                waits[result] = ScatterStart((first, lives.times[number] - 1), added)
    return waits


def temporary_growth(program: Program, stored: list[bool], profile: CompilerProfile) -> float:
    """Bytes of temporaries in device memory over those that the rules count. stored: [values] whether each is written
    to memory.

    XLA:GPU has more temporaries than XLA:TPU: gradients wait for the all-reduce they are combined in, kernels of
    contractions and of softmax do not write in place, and its scheduler prefers overlap. One fitted factor
    (`CompilerProfile.temporary_growth`, `python benchmarks/gpu.py`) stands for that.
    """
    growth = profile.temporary_growth if "temporary-growth" in profile.passes else 1.0
    if "bf16-widening" not in profile.passes:
        return growth
    # Chips that cannot compute in bf16 (P100, V100) get it widened to f32; arguments and collectives stay narrow.
    arguments = {argument.value for argument in program.arguments}
    written = [v for number, v in enumerate(program.values) if stored[number] and number not in arguments]
    wide = sum(value.bytes for value in written if value.dtype == "bf16")
    return growth * (1 + wide / max(1, sum(value.bytes for value in written)))
