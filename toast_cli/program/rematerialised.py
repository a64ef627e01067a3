"""Values made from constants alone, which Shardy makes anew for each of their uses.

Enters: a program. Leaves: which of its values are such. They have no sharding of their own: each use gets a copy in its
sharding, so a reshard of one costs nothing and a sharding on one would only bind its uses together. Shardy's pass
`sdy-constant-or-scalar-splitter` draws the line, and `OpKind.rematerialised` follows it.
"""

from __future__ import annotations

from toast_cli.program.model import Op, Program, once
from toast_cli.program.ops import BROADCAST_IN_DIM


@once
def remade_values(program: Program) -> tuple[bool, ...]:
    """[values] True where every use gets a copy of its own."""
    remade = [False] * len(program.values)
    for op in program.ops:
        preserved = op.kind.rematerialised and all(remade[v] for v in op.operands)
        if op.kind.source or preserved or expands_scalar(op, program):
            for value in op.results:
                remade[value] = True
    return tuple(remade)


def expands_scalar(op: Op, program: Program) -> bool:
    """A broadcast of a scalar, whatever the scalar comes from."""
    return op.name == BROADCAST_IN_DIM and not program.values[op.operands[0]].shape
