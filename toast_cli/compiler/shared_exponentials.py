"""Shared exponentials: a value of exponentials that two contractions read counts as written.

Where two contractions read exponentials and the like of one array (the probabilities of an attention), memory is
counted as if they were written and time as if they were not; convolutions fuse them. Values of polynomials (an error
function, see `polynomials`) are always written before a contraction reads them. The same holds on GPUs, where most
contractions are library calls that fuse nothing.

XLA:TPU (libtpu 0.0.42.1) computes both in the kernels of the contractions: attentions and MLPs compiled for v4, v5e and
v6e, in f32 and bf16, with and without masks and dropout, keep the scores alone. Those of f32 are counted so
(`FusionLimits.shared_bits`). Those of 16 bits still count as written, on the safe side: in whole programs in bf16 a
softmax in one pass writes its exponentials beside the scores, and deferred gradients of weights keep their operands
alive, which nothing else here counts (without it predictions for the sample models are 5 % too small). Without this
pass they are not written.

Enters: the contractions that read a value. Leaves: whether the value counts as written.
"""

from __future__ import annotations

from toast_cli.program.ops import OpKind

NAME = "shared-exponentials"


def is_written(readers: list[OpKind]) -> bool:
    """Whether two contractions read the value; readers: kinds of its readers, one per use."""
    return sum(kind.contraction for kind in readers) > 1
