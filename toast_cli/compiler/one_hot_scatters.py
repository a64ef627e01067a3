"""One-hot scatters: a scatter of one element into each row of zeros is fused into its readers.

The gradient of a look-up of one element in each row (the loss of a classifier: `take_along_axis` of log-probabilities
by label) is a scatter into zeros. XLA:TPU turns it into select(iota == index, update, 0), and fuses that into its
readers, so that the array is never materialised. libtpu 0.0.42.1 does so where the rows are batching dimensions of the
scatter and each has one index; where indices count the rows themselves (`x[arange(n), labels]`), or a row has several,
it scatters into memory. Without this pass every scatter writes its result.

Enters: a program and which values are free. Leaves: the scatters that are fused into their readers.
"""

from __future__ import annotations

from math import prod

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import SCATTER

NAME = "one-hot-scatters"


def one_hot_scatters(program: Program, free: tuple[bool, ...], profile: CompilerProfile) -> frozenset[int]:
    """Op numbers of the one-hot scatters, which are fused into their readers."""
    if NAME not in profile.passes:
        return frozenset()
    scatters = [number for number, op in enumerate(program.ops) if op.name == SCATTER and len(op.operands) == 3]
    return frozenset(number for number in scatters if _is_one_hot(program, program.ops[number], free))


def _is_one_hot(program: Program, op: Op, free: tuple[bool, ...]) -> bool:
    rows, indices, updates = op.operands
    if not free[rows]:
        return False
    shared = {factor for dim in op.rule.operands[1] for factor in dim}
    # Rows are along the factors that the operand has in common with the indices.
    batch = [n for n, dim in zip(program.values[rows].shape, op.rule.operands[0], strict=True) if shared & set(dim)]
    others = len(program.values[rows].shape) - len(batch)
    one_each = program.values[indices].elements == program.values[updates].elements == prod(batch)
    return others == 1 and one_each
