"""Finds reduce-scattered sums that need an optimization barrier behind them.

XLA merges the slice that takes a device's piece of an all-reduce with a slice that reads the piece, and forms a
reduce-scatter only of a slice along one dimension, by the axes of the all-reduce. So it leaves an all-reduce if a
reader takes other elements (`logits[:, 1:]`), or slices the piece further; and XLA:TPU (libtpu 0.0.42.1) takes a piece
whose last rows are dropped (`logits[:, :-1]`) for a whole one, and fails a check. A barrier behind the piece keeps the
two slices apart: the result compiles to the planned reduce-scatter and costs nothing, since the piece is materialised
in any case.

If a loop adds up scattered sums in a wider type (bf16 gradients in f32), XLA moves the reduce-scatter behind the loop
and fails a check at the conversion (`while_loop_all_reduce_code_motion.cc`, libtpu 0.0.42.1). A barrier prevents that.

In: a program and a `PartitionedProgram`. Out: the values that need a barrier.
"""

from __future__ import annotations

from typing import Any

from toast_cli.frontend.branches import CONDITIONALS
from toast_cli.plan.partials import REDUCE_SCATTER
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import axes_of, refines
from toast_cli.program.model import Program, Window
from toast_cli.program.ops import ADD, BARRIER, CARRY, CONVERT, DYNAMIC_SLICE, PAD, REDUCE, SLICE
from toast_cli.xla import ir, outer_operands, walk_ops

CONSTANT = "stablehlo.constant"  # goes into the branch on the way to HLO


def held(program: Program, lowered: PartitionedProgram) -> list[int]:
    """Values that are reduce-scattered at their definition, and of which some reader takes a part, or which a loop adds
    up in another type; in program order."""
    return [
        value
        for value in sorted(_scattered(lowered))
        if _is_read_in_parts(program, lowered, value) or _is_added_up_converted(program, value)
    ]


def added_up_converted(program: Program, lowered: PartitionedProgram) -> frozenset[int]:
    """Values that are reduce-scattered at their definition, and that a loop adds up in another type."""
    return frozenset(value for value in _scattered(lowered) if _is_added_up_converted(program, value))


def _scattered(lowered: PartitionedProgram) -> set[int]:
    return {
        one.value
        for one in lowered.collectives
        if one.kind == REDUCE_SCATTER and one.reason == "partial" and one.after == lowered.shardings[one.value]
    }


def _is_added_up_converted(program: Program, value: int, converted: bool = False) -> bool:
    """True if a loop carries a sum of a value after a conversion."""
    for number, _ in program.users[value]:
        op = program.ops[number]
        if op.name == ADD:
            carried = (program.ops[use].name == CARRY and place == 1 for use, place in program.users[op.results[0]])
            found = converted and any(carried)
        else:
            passed_on = (op.kind.view_or_convert or op.name == REDUCE) and len(op.results) == 1
            found = passed_on and _is_added_up_converted(program, op.results[0], converted or op.name == CONVERT)
        if found:
            return True
    return False


def _is_read_in_parts(program: Program, lowered: PartitionedProgram, value: int) -> bool:
    if program.ops[program.producer[value]].name == CARRY:
        return False
    current = lowered.shardings[value]
    for use in program.users[value]:
        wanted = lowered.required.get(use, current)
        if axes_of(wanted) > axes_of(current) and refines(wanted, current):
            return True
    return any(_takes_parts(program, op) for op, _ in program.users[value])


def _takes_parts(program: Program, number: int) -> bool:
    """True for a slice, a pad with negative padding, or an elementwise op of one array that such an op reads: XLA moves
    the slice before it."""
    op = program.ops[number]
    if op.name in (SLICE, DYNAMIC_SLICE) or (op.name == PAD and any(map(_cuts_off, op.windows))):
        return True
    arrays = [value for value in op.operands if program.values[value].shape]
    if not op.kind.elementwise or len(arrays) != 1 or len(op.results) != 1:
        return False
    return any(_takes_parts(program, reader) for reader, _ in program.users[op.results[0]])


def _cuts_off(window: Window) -> bool:
    """True if a pad removes elements of its operand, in front or behind."""
    return window.low < 0 or window.outputs < window.low + (window.inputs - 1) * window.dilation + 1


def keep_branch_operands(module: Any) -> None:
    """Keeps GSPMD from giving a branch's operands the shardings of its conditional's results.

    GSPMD passes the operands of a branch as a tuple. If its arrays have the shapes of the results, they get the
    shardings of the results, or of constraints in the branch: they are resharded before the conditional in every run,
    and back in the branch. A barrier in the branch that also takes the branch index gives the tuple other shapes; it
    costs nothing, since XLA does not fuse across a conditional's boundary.
    """
    for conditional in walk_ops(module, *CONDITIONALS):
        given = sorted(map(shape_of, conditional.results))
        for region in conditional.regions:
            body = [view.operation for view in region.blocks[0].operations]
            reads = [read for read in outer_operands(body) if not is_constant(read[2])]
            read = list(dict.fromkeys(value for _, _, value in reads))
            if read and sorted(map(shape_of, read)) == given:
                put_behind_barrier(read[0], conditional.operands[0], region, reads)


def is_constant(value: Any) -> bool:
    return not isinstance(value, ir.BlockArgument) and bool(value.owner.name == CONSTANT)


def shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value.type.shape) if isinstance(value.type, ir.RankedTensorType) else ()


def put_behind_barrier(value: Any, number: Any, region: Any, reads: list[tuple[Any, int, Any]]) -> None:
    """Makes a region read `value` from a barrier that also takes `number`."""
    where = ir.InsertionPoint.at_block_begin(region.blocks[0])
    types = [value.type, number.type]
    barrier = ir.Operation.create(BARRIER, results=types, operands=[value, number], loc=value.location, ip=where)
    for reader, k, read in reads:
        if read == value:
            reader.operands[k] = barrier.results[0]
