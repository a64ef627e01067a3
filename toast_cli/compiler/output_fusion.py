"""Output fusion: elementwise ops are fused into the epilogue of a contraction.

An elementwise op that is the only reader of a contraction's result (a bias, an activation, a conversion) runs in the
contraction's kernel, if its other operands are available by then. The contraction's own result is then never
materialised. Seen in programs compiled by libtpu 0.0.42.1 for v4 to v6e. Without this pass every contraction writes its
own result.

Enters: a program, a contraction and an op that reads its result. Leaves: whether the op can be fused into the epilogue.
"""

from __future__ import annotations

from toast_cli.program.model import Program

NAME = "output-fusion"


def finishes(program: Program, latest: list[float], reader: int, product: int, value: int) -> bool:
    """Whether op `reader` can be part of the kernel of `product`, whose result `value` is or becomes.

    latest: [values] the last unfused op that a value depends on, -1 for none; a reduction counts as placed right after
        the last op that it depends on.
    """
    op = program.ops[reader]
    if not (op.kind.elementwise or op.kind.view_or_convert) or latest[op.results[0]] > product:
        return False
    return program.values[op.results[0]].elements == program.values[value].elements
