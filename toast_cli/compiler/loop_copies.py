"""Loop copies: loop carries with another dimension order than the arguments are copied.

XLA lays an array out for its readers, but arguments and results of a program have the dimension order of their shapes;
so a carry that starts from an argument is copied before and after the loop if its readers require another order. Seen
in compiled decoding loops (a cache [batch, position, head, width] or [batch, head, position, width], of one layer or of
all):

* a batched product requires its batch dimensions outermost;
* a batched matrix-vector product is elementwise work, and requires the batch dimensions in the tiles;
* where a dynamic slice is read directly from an array that was updated before, the array is laid out for the update,
  whose one position would fill a small part of each tile.

Enters: a program. Leaves: which carries are copied. Without this pass none are.
"""

from __future__ import annotations

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import CARRY, CONVOLUTION, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE

NAME = "loop-copies"


def is_copied(program: Program, carry: Op) -> bool:
    """Whether the readers of a carry in its loop, nested loops included, require another dimension order."""
    loop = program.loops[carry.loop]
    reached, waiting = {carry.results[0]}, [(carry.results[0], frozenset[str]())]
    while waiting:
        value, passed = waiting.pop()
        for number, position in program.users[value]:
            op = program.ops[number]
            if not loop.first <= number < loop.last:
                continue
            if op.kind.matrix_unit and position < 2:
                if (DYNAMIC_UPDATE_SLICE in passed and DYNAMIC_SLICE in passed) or _wants_another_order(
                    program, op, position
                ):
                    return True
            elif position == 0 and _is_followed(op) and op.results[0] not in reached:
                reached.add(op.results[0])
                waiting.append((op.results[0], _after(passed, op.name)))
    return False


def _is_followed(op: Op) -> bool:
    return op.kind.view_or_convert or op.name in (DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE, CARRY)


def _after(passed: frozenset[str], name: str) -> frozenset[str]:
    """The names of ops passed so far, and this one; an update after the slice belongs to the slice and does not
    count."""
    return passed if name == DYNAMIC_UPDATE_SLICE and DYNAMIC_SLICE in passed else passed | {name}


def _wants_another_order(program: Program, op: Op, position: int) -> bool:
    """Whether an operand's batch dimensions (those in both operands and in the result) are not its outermost, or the
    other operand has only a vector for each."""
    operands = op.rule.operands
    if op.name == CONVOLUTION or len(operands) < 2:
        return False
    mine, other, result = (
        {f for dim in dims for f in dim} for dims in (operands[position], operands[1 - position], op.rule.results[0])
    )
    numbering = [bool(dim) and all(f in other and f in result for f in dim) for dim in operands[position]]
    shape = program.values[op.operands[1 - position]].shape
    is_vector = all(size == 1 or set(dim) <= mine for dim, size in zip(operands[1 - position], shape, strict=True))
    return numbering != sorted(numbering, reverse=True) or (any(numbering) and is_vector)


def copied_carries(program: Program, profile: CompilerProfile) -> set[int]:
    """Op numbers of the carries that are copied from arguments and to results."""
    if NAME not in profile.passes:
        return set()
    return {number for number, op in enumerate(program.ops) if op.name == CARRY and is_copied(program, op)}
