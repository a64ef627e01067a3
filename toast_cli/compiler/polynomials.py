"""Polynomials: functions without an instruction of their own are expanded into dozens of operations of the vector unit.

The error function and its kin become polynomials, and no contraction computes its operands with these, once for each
tile, so that they are written before it reads them. The number of operations is the profile's
(`FusionLimits.polynomials`), from the cycles that libtpu 0.0.42.1 estimates for arrays of 4096 x 4096. Without this
pass they count as one operation, and contractions compute them.

Enters: a profile. Leaves: how many operations each of these functions takes.
"""

from __future__ import annotations

from collections.abc import Mapping

from toast_cli.compiler.profile import CompilerProfile

NAME = "polynomials"


def expansions(profile: CompilerProfile) -> Mapping[str, float]:
    """Name of an operation -> operations of the vector unit for one element."""
    return profile.fusion.polynomials if NAME in profile.passes else {}
