"""Fourier transforms: XLA:TPU turns them into small products, transpositions and twiddle factors.

This takes about seven times as long as the `5 n log2 n` operations of a transform on the vector unit (the count of
Frigo and Johnson's FFTW). Seen in transforms of 128 to 65,536 points, powers of two and three times such powers,
compiled by libtpu 0.0.42.1 for v4, v5e and v6e: 4 to 13 times. A length with a larger odd factor takes longer (600
points: some thirty times, 1,000 points: two hundred). Without this pass only these operations count.

Enters: a profile and an op. Leaves: the growth of its flops.
"""

from __future__ import annotations

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Op
from toast_cli.program.ops import FFT

NAME = "fourier-transforms"


def growth(op: Op, profile: CompilerProfile) -> float:
    """Factor from counted flops to flops that take as long."""
    return profile.fourier_growth if op.name == FFT and NAME in profile.passes else 1.0
