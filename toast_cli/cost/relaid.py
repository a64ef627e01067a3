"""Loop carries that lie in another dimension order than arguments do.

A product that is done for many matrices at once wants the dimensions that number them outermost. XLA lays an array out as its readers
want it, but arguments and results of a program lie in the order their shapes say; so what a loop carries from an argument is copied
before and after the loop where a product in it numbers its matrices by inner dimensions (the heads of a cache [batch, position,
head, width]; seen in every compiled decoding loop).

Enters: a program. Leaves: which carries are copied.
"""

from __future__ import annotations

from toast_cli.cost.fusion import VIEWS
from toast_cli.program.model import CARRY, PRODUCTS, Op, Program

_FOLLOWED = VIEWS | {"stablehlo.dynamic_update_slice"}


def is_relaid(program: Program, carry: Op) -> bool:
    """Whether what the loop does with the value it carries wants it in another order."""
    reached, waiting = {carry.results[0]}, [carry.results[0]]
    while waiting:
        value = waiting.pop()
        for number, position in program.users[value]:
            op = program.ops[number]
            if op.name in PRODUCTS and position < 2 and _numbered_inside(op, position):
                return True
            if op.name in _FOLLOWED and position == 0 and op.loop == carry.loop and op.results[0] not in reached:
                reached.add(op.results[0])
                waiting.append(op.results[0])
    return False


def _numbered_inside(op: Op, position: int) -> bool:
    """Whether the dimensions that number the matrices of an operand (they are in both and in the result) are not its outermost."""
    operands = op.rule.operands
    if op.name == "stablehlo.convolution" or len(operands) < 2:
        return False
    other, result = ({f for dim in dims for f in dim} for dims in (operands[1 - position], op.rule.results[0]))
    numbering = [bool(dim) and all(f in other and f in result for f in dim) for dim in operands[position]]
    return numbering != sorted(numbering, reverse=True)


def relaid_carries(program: Program) -> set[int]:
    """Ops: the carries that are copied out of arguments, and into results."""
    return {number for number, op in enumerate(program.ops) if op.name == CARRY and is_relaid(program, op)}
