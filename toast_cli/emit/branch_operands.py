"""Keeps GSPMD from giving a branch's operands the shardings of its conditional's results.

GSPMD passes the operands of a branch as a tuple. If the arrays in it have the shapes of the conditional's results, its
propagation gives them the shardings of the results, or of constraints in the branch, over their own: they are resharded
before the conditional, in every run, and back in the branch. A barrier in the branch that also takes the branch index
gives the tuple other shapes. It costs nothing: XLA does not fuse across a conditional's boundary.

Enters: a module with GSPMD's shardings on it. Leaves: the same module with such barriers.
"""

from __future__ import annotations

from typing import Any

from toast_cli.frontend.branches import CONDITIONALS
from toast_cli.program.ops import BARRIER
from toast_cli.xla import ADVANCE, ir, walk_ops

CONSTANT = "stablehlo.constant"  # goes into the branch on the way to HLO
CUSTOM_CALL, SHARDING = "stablehlo.custom_call", "mhlo.sharding"


def keep_branch_operands(module: Any) -> None:
    """Adds the barriers, unless a branch's operands have the results' shardings and no constraint in the branch reads
    them."""
    for conditional in walk_ops(module, *CONDITIONALS):
        given = sorted(map(shape_of, conditional.results))
        for region in conditional.regions:
            reads = reads_from_outside(region)
            read = list(dict.fromkeys(value for _, _, value in reads))
            if not read or sorted(map(shape_of, read)) != given:
                continue
            if lie(read) != said_of(conditional) or any(is_constraint(reader) for reader, _, _ in reads):
                put_behind_barrier(read[0], conditional.operands[0], region, reads)


def reads_from_outside(region: Any) -> list[tuple[Any, int, Any]]:
    """(operation, operand, value) for operands in a region that are defined outside it."""
    made: set[Any] = set()
    reads: list[tuple[Any, int, Any]] = []

    def visit(operation: Any) -> Any:
        made.update(operation.results)
        for inner in operation.regions:
            made.update(argument for block in inner.blocks for argument in block.arguments)
        reads.extend((operation, k, operand) for k, operand in enumerate(operation.operands))
        return ADVANCE

    for operation in region.blocks[0].operations:
        operation.operation.walk(visit)
    return [one for one in reads if one[2] not in made and not is_constant(one[2])]


def is_constraint(operation: Any) -> bool:
    return bool(operation.name == CUSTOM_CALL and operation.attributes["call_target_name"].value == "Sharding")


def is_constant(value: Any) -> bool:
    return not isinstance(value, ir.BlockArgument) and bool(value.owner.name == CONSTANT)


def shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value.type.shape) if isinstance(value.type, ir.RankedTensorType) else ()


def lie(values: list[Any]) -> str:
    """Their shardings in the notation for an operation with these results; empty for values without one."""
    each = []
    for value in values:
        if isinstance(value, ir.BlockArgument):
            owner = value.owner.owner
            stated = owner.attributes["arg_attrs"][value.arg_number] if "arg_attrs" in owner.attributes else {}
        else:
            stated = value.owner.attributes if len(value.owner.results) == 1 else {}
        each.append(stated[SHARDING].value if SHARDING in stated else "")
    return each[0] if len(each) == 1 else "{" + ", ".join(each) + "}"


def said_of(operation: Any) -> str:
    return str(operation.attributes[SHARDING].value) if SHARDING in operation.attributes else ""


def put_behind_barrier(value: Any, number: Any, region: Any, reads: list[tuple[Any, int, Any]]) -> None:
    """Makes a region read `value` from a barrier that also takes `number`."""
    where = ir.InsertionPoint.at_block_begin(region.blocks[0])
    types = [value.type, number.type]
    barrier = ir.Operation.create(BARRIER, results=types, operands=[value, number], loc=value.location, ip=where)
    for reader, k, read in reads:
        if read == value:
            reader.operands[k] = barrier.results[0]
