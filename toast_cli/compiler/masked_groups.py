"""Masked groups: a product of ragged groups multiplies all rows for each group, with zeros in place of others' rows.

XLA:GPU has no kernel that visits each row once: it writes the rows with their zeros for each group, and multiplies
[m, g k] x [g k, n]. 16 groups of 8,192 rows took 16 times as long as one dense product (jax 0.11.2 on an H200). XLA:TPU
does so in gradients alone, see `ragged_gradients`. Without this pass each row is multiplied once.

Enters: a profile and an op. Leaves: the growth of its flops, and of the bytes of its rows.
"""

from __future__ import annotations

from math import prod

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Op
from toast_cli.program.ops import RAGGED_DOT

NAME = "masked-groups"


def growth(op: Op, profile: CompilerProfile) -> float:
    """The number of groups of a ragged product: the size of the dimension that only one operand, or only the result,
    has."""
    if op.name != RAGGED_DOT or NAME not in profile.passes:
        return 1.0
    arrays = [{f for dim in dims for f in dim} for dims in (*op.rule.operands[:2], op.rule.results[0])]
    return prod(size for factor, size in enumerate(op.rule.sizes) if sum(factor in array for array in arrays) == 1)
