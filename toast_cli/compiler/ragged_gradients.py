"""Ragged gradients: XLA:TPU multiplies all rows for each group, with zeros in the place of other groups' rows.

A product of ragged groups that keeps rows (`[m, k] x [g, k, n] -> [m, n]`) has a kernel that visits each row once. One
that sums over them (`[m, k] x [m, n] -> [g, k, n]`, the gradient of the experts' weights) is a masked product of all
rows for each group: 4,096 rows, 1,024 x 1,024 numbers for each of 16 groups take 1.83 M cycles of a v5e, and one dense
product of the same rows 0.08 M (libtpu 0.0.42.1). Without this pass each row is multiplied once.

Enters: a profile and an op. Leaves: the growth of its flops.
"""

from __future__ import annotations

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Op
from toast_cli.program.ops import RAGGED_DOT

NAME = "ragged-gradients"


def growth(op: Op, profile: CompilerProfile) -> float:
    """Flops done over flops counted: the number of groups, if only the result has them."""
    if op.name != RAGGED_DOT or NAME not in profile.passes:
        return 1.0
    read = {factor for dims in op.rule.operands for factors in dims for factor in factors}
    groups = 1.0
    for (factor,) in op.rule.results[0]:
        groups *= 1 if factor in read else op.rule.sizes[factor]
    return groups
