"""Library convolutions: a convolution reads whole arrays in memory, and writes one.

XLA:GPU hands convolutions to cuDNN, which knows nothing of other operations: what is elementwise before one (an
activation, a conversion, padding) is a kernel of its own that writes what the convolution reads, and so is what comes
after it. Only changes of form that leave the elements where they are cost nothing, and
a reversed kernel. cuDNN wants the features that are added up to lie innermost, in the kernel too: the smallest of the
three arrays is transposed before it or after it, at half the rate of other copies (1 to 17 µs in single convolutions on
an H200). XLA:TPU computes both in the
convolution's kernel. Seen in an autoencoder and in networks of residual, gated and dilated convolutions, compiled by
jaxlib 0.10.2 for H100. Without this pass convolutions are fused as other products are.

Enters: a program and the kernels that read a value. Leaves: whether a convolution is among them.
"""

from __future__ import annotations

from collections.abc import Iterable

from toast_cli.program.model import Program

NAME = "library-convolutions"


def is_read(program: Program, kernels: Iterable[int]) -> bool:
    """Whether one of the kernels, named by the ops that end them, is a convolution."""
    return any(program.ops[number].kind.convolution for number in kernels)
