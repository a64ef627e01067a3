"""Polynomials: functions without an instruction of their own are expanded into dozens of operations of the vector unit.

The number of operations for the error function and its kin is the profile's (`FusionLimits.polynomials`), from the
cycles that libtpu 0.0.42.1 estimates for arrays of 4096 x 4096. Without this pass they count as one operation.

A 16-bit result with several reading kernels is written, since recomputing it in f32 costs more than reading two bytes
(a gelu's erfc in bf16, next to its argument); an f32 result is recomputed in each of them.

Enters: a profile, or an op. Leaves: the vector-unit operations of each of these functions, and whether a result is
written.
"""

from __future__ import annotations

from collections.abc import Mapping

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import DTYPE_BITS, Op, Value

NAME = "polynomials"


def expansions(profile: CompilerProfile) -> Mapping[str, float]:
    """Name of an operation -> operations of the vector unit for one element."""
    return profile.fusion.polynomials if NAME in profile.passes else {}


def is_written(op: Op, result: Value) -> bool:
    """Whether an op's result is written where several kernels read it."""
    return op.kind.polynomial and DTYPE_BITS.get(result.dtype, 32) <= 16
