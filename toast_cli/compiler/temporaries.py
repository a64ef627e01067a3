"""Temporary growth: one factor by which a compiler's temporaries exceed those that the rules count.

XLA:GPU has more temporaries than XLA:TPU: gradients wait for the all-reduce they are combined in, kernels of
contractions and of softmax do not write in place, and its scheduler prefers overlap. One fitted factor
(`CompilerProfile.temporary_growth`, `python benchmarks/gpu.py`) stands for that. Without this pass it is 1.

Enters: a program and a profile. Leaves: one factor.
"""

from __future__ import annotations

from toast_cli.compiler import bf16_widening
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Program

NAME = "temporary-growth"


def temporary_growth(program: Program, stored: list[bool], profile: CompilerProfile) -> float:
    """Bytes of temporaries in device memory over those that the rules count. stored: [values] whether each is written
    to memory."""
    growth = profile.temporary_growth if NAME in profile.passes else 1.0
    return growth * bf16_widening.growth(program, stored) if bf16_widening.NAME in profile.passes else growth
