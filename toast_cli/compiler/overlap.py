"""Overlap: finds the collectives that nothing waits for.

Values computed from arguments without a product (weights, converted or sliced) are *early*, available when the step
begins: their gathers can overlap with everything before their first reader. Values that no product depends on
(gradients on their way into the optimiser) are *late*, needed only when the step ends: their reductions can overlap
with everything after them. All other collectives are on the critical path.

Enters: a program. Leaves: per value whether it is early, and whether it is late. Without this pass no value is either.
"""

from __future__ import annotations

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Program
from toast_cli.program.ops import ARGUMENT, CARRY

NAME = "overlap"


def early_values(program: Program, free: tuple[bool, ...], profile: CompilerProfile) -> list[bool]:
    """[values] whether each follows from arguments and constants by elementwise work and data movement alone."""
    early = [False] * len(program.values)
    if NAME not in profile.passes:
        return early
    carries = {op.results[0] for op in program.ops if op.name == CARRY}  # a loop's counter is one that is early
    found = -1
    while found != len(carries):
        found = len(carries)
        for op in program.ops:
            known = op.name == ARGUMENT or (op.kind.fusible and all(early[v] for v in op.operands))
            for value in op.results:
                early[value] = known or free[value] or value in carries
        carries = {v for v in carries if all(early[o] for o in program.ops[program.producer[v]].operands)}
    return early


def late_values(program: Program, profile: CompilerProfile) -> list[bool]:
    """[values] whether no product is computed from each, through loops as well."""
    if NAME not in profile.passes:
        return [False] * len(program.values)
    late = [True] * len(program.values)
    changed = True
    while changed:  # one more pass for each loop a value is carried through; values only change from late to not late
        changed = False
        for op in reversed(program.ops):
            if op.kind.matrix_unit or not all(late[v] for v in op.results):
                for value in op.operands:
                    if late[value]:
                        late[value] = False
                        changed = changed or op.name == CARRY
    return late
