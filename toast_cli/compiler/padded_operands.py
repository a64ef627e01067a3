"""Padded operands: an array that a product reads through a pad is materialised.

The kernel of a product fuses the pad, but not the computation of the padded array. So the gradient of logits is written
if a loss leaves out their last position (`logits[:, :-1]`), and otherwise fused into the products that read it. Seen in
classifiers' heads and token shifts in f32, with and without such a slice, compiled by libtpu 0.0.42.1 for v5e. Without
this pass it is computed in both.

Enters: a program. Leaves: the values that products read padded.
"""

from __future__ import annotations

from toast_cli.program.model import Program
from toast_cli.program.ops import PAD

NAME = "padded-operands"


def padded(program: Program) -> frozenset[int]:
    """Values that a contraction reads padded, directly or through a view."""
    pads = (op for op in program.ops if op.name == PAD)
    return frozenset(op.operands[0] for op in pads if _is_multiplied(program, op.results[0]))


def _is_multiplied(program: Program, value: int) -> bool:
    """Whether a contraction reads a value or a view of it."""
    kinds = [(program.ops[user].kind, program.ops[user].results) for user, _ in program.users[value]]
    return any(
        kind.matrix_unit or (kind.view_or_convert and len(results) == 1 and _is_multiplied(program, results[0]))
        for kind, results in kinds
    )
