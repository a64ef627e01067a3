"""Values whose only reader is a transpose.

In: a program and a value. Out: the transposed value, and the permutation.
"""

from __future__ import annotations

from dataclasses import dataclass

from toast_cli.program.model import Program
from toast_cli.program.ops import TRANSPOSE


@dataclass(frozen=True)
class Transposed:
    """The result of a transpose. op, value: numbers of the op and its result. order: [dimensions of the result] the
    operand's dimension.
    """

    op: int
    value: int
    order: tuple[int, ...]


def transposed(program: Program, value: int) -> Transposed | None:
    """The transpose that is the only reader of a value, in the same loop; None if there are other readers."""
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
