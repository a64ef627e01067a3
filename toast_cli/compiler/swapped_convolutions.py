"""Swapped convolutions: a kernel that is larger than its image becomes the image, after it has been reversed.

XLA's algebraic simplifier swaps the operands of a convolution whose kernel has more pixels than its image. This happens
for the gradient of a transposed convolution's kernel, where the gradient of the result slides over the operand, which
has a quarter of the pixels. The array that becomes the image is reversed in memory first (XLA's `SwapConvOperands`,
whatever the chip; seen in steps of autoencoders compiled by libtpu 0.0.42.1 for v4, v5e and v6e, where reversing took
up to a third of the time). Other convolutions reverse nothing.

Enters: an op. Leaves: whether its second operand is reversed. Without this pass convolutions read their operands in
place.
"""

from __future__ import annotations

from math import prod

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Op
from toast_cli.program.ops import CONVOLUTION

NAME = "swapped-convolutions"


def is_reversed(op: Op, profile: CompilerProfile) -> bool:
    """Whether the second operand of an op is reversed in memory."""
    if NAME not in profile.passes or op.name != CONVOLUTION:
        return False
    return prod(w.size for w in op.windows) > prod(w.inputs for w in op.windows)
