"""Values that nothing but a transpose reads.

Enters: a program and a value. Leaves: the transposed value, and where each dimension of it was before.
"""

from __future__ import annotations

from dataclasses import dataclass

from toast_cli.program.model import Program
from toast_cli.program.ops import TRANSPOSE


@dataclass(frozen=True)
class Transposed:
    """What a transpose makes. op, value: its number, and its result's. order: [dimensions] of the result, which one
    of the operand each is.
    """

    op: int
    value: int
    order: tuple[int, ...]


def transposed(program: Program, value: int) -> Transposed | None:
    """What the one transpose makes that is all that reads a value, in the same loop; None where others do."""
    readers = program.users[value]
    if len(readers) != 1:
        return None
    ((number, _),) = readers
    op = program.ops[number]
    if op.name != TRANSPOSE or op.loop != program.ops[program.producer[value]].loop:
        return None
    left, order = list(range(len(op.rule.operands[0]))), list[int]()
    for factors in op.rule.results[0]:  # dimensions of size 1 have none, and are all alike
        order.append(left.pop([op.rule.operands[0][dim] for dim in left].index(factors)))
    return Transposed(number, op.results[0], tuple(order))
