"""Shared exponentials: what two contractions read, and takes exponentials to compute, counts as written.

Where two contractions read exponentials and the like of one array (the probabilities of an attention), memory is
counted as if they were written and time as if they were not; convolutions compute them. What takes polynomials (an
error function, see `polynomials`) is written before any contraction reads it. So on GPUs, where most contractions are
calls of a library that computes nothing on its way in. XLA:TPU (libtpu 0.0.42.1) does not have this pass: attentions
and MLPs compiled for v4 and v5e, in f32 and bf16, with and without masks and dropout, compute both in the kernels of
the contractions. Without this pass nobody writes them.

Enters: the contractions that read a value. Leaves: whether the value counts as written.
"""

from __future__ import annotations

from toast_cli.program.ops import OpKind

NAME = "shared-exponentials"


def is_written(readers: list[OpKind]) -> bool:
    """Whether two contractions share what they read; readers: each as often as it reads."""
    return sum(kind.contraction for kind in readers) > 1
