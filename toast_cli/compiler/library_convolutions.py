"""Library convolutions: a convolution reads whole arrays in memory, and writes one.

XLA:GPU hands convolutions to cuDNN, which knows nothing of other operations: what is elementwise before one (an
activation, a conversion, padding) is a kernel of its own that writes what the convolution reads, and so is what comes
after it. Only changes of form that leave the elements where they are cost nothing, and
a reversed kernel. cuDNN wants the features that are added up to lie innermost, in the kernel too: the smallest of the
three arrays is transposed before it or after it, at half the rate of other copies (1 to 17 µs in single convolutions on
an H200). XLA:TPU computes both in the
convolution's kernel. Seen in an autoencoder and in networks of residual, gated and dilated convolutions, compiled by
jaxlib 0.10.2 for H100. Without this pass convolutions are fused as other products are.

XLA:GPU sees the gradient of a kernel only in convolutions of stride 1 over images without gaps. That of a transposed or
of a dilated convolution runs as a convolution whose window is a whole image: of few results, each of so many terms,
which cuDNN does on the f32 units, with one multiprocessor for a tile of results. In an autoencoder's step on an H200,
results of 576 x 128 of 63,504 terms took 3.0 ms, 1,152 x 256 of 15,376 terms 0.94 ms; steps in bf16 took a third to the
whole of that.

Convolutions of less than eight features run on the f32 units, too (an image of 224 x 224 x 3 by 7 x 7 at 34 TFLOP/s),
and those of feature groups with little use of them (3 x 3 and 7 x 7 at 4 to 6 TFLOP/s). Kernels' gradients in f32 take
twice as long as other convolutions of their size (100 to 167 TFLOP/s).

Enters: a program and the kernels that read a value, or a convolution. Leaves: whether a convolution is among them, and
the terms of one that slides a whole image.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from toast_cli.program.model import Op, Program, Window

NAME = "library-convolutions"


def is_read(program: Program, kernels: Iterable[int]) -> bool:
    """Whether one of the kernels, given by their last ops, is a convolution."""
    return any(program.ops[number].kind.convolution for number in kernels)


# Convolutions of fewer features do not use the matrix units; fractions of the f32 units' rate.
FEW_FEATURES, FEW_PART, GROUPED_PART = 8, 0.6, 0.075
SLOW_GRADIENT = 2.0
TILE = 128  # rows and columns of a tile of results there


def vector_part(program: Program, op: Op) -> float:
    """Fraction of the f32 units' rate that a convolution attains there, 0 if it runs on the matrix units."""
    left, right, out = ({f for dim in dims for f in dim} for dims in (*op.rule.operands[:2], op.rule.results[0]))
    if any(op.rule.sizes[factor] > 1 for factor in left & right & out):
        return GROUPED_PART
    space = {w.kernel_dim for w in op.windows}
    kernel = zip(program.values[op.operands[1]].shape, op.rule.operands[1], strict=True)
    features = [n for dim, (n, fs) in enumerate(kernel) if dim not in space and not (left | out).isdisjoint(fs)]
    forward = all(w.size <= w.outputs for w in op.windows)
    return FEW_PART if forward and min(features) < FEW_FEATURES else 0.0


def slowed(op: Op, bits: int) -> float:
    """Factor by which the gradient of a kernel is slower than another product of the same size."""
    gradient = bool(op.windows) and all(w.size > w.outputs for w in op.windows)
    return SLOW_GRADIENT if gradient and bits > 16 else 1.0


def terms_of_whole_images(op: Op) -> int:
    """Spatial terms of each result element, if a convolution's window is a whole image; else 0."""
    if not op.windows or all(w.stride == 1 and w.dilation == 1 for w in op.windows):
        return 0
    if any(2 * _kernel(w) <= _image(w) or w.outputs >= w.size for w in op.windows):
        return 0
    return min(prod(map(_kernel, op.windows)), prod(map(_image, op.windows)))


def _kernel(window: Window) -> int:
    return (window.size - 1) * window.spread + 1


def _image(window: Window) -> int:
    return (window.inputs - 1) * window.dilation + 1
