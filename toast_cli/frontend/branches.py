"""Conditionals whose outcome the program states, as a Python `if` leaves them that was written `lax.cond` (optax's
`MultiSteps` asks that way whether to skip an update).

XLA takes the branch before it partitions, and its operations join the kernels around them; what a conditional gives
would be counted as arrays of its own.

Enters: a module without calls. Leaves: the same module where the branches that are taken stand in place of such
conditionals, and of selections with a constant predicate what they select; what nothing reads any more is dropped.
Results of other conditionals that nothing reads (the forward pass of a gradient) are zeros: XLA's partitioner would
still compute them, and communicate for them.
"""

from __future__ import annotations

from typing import Any

from toast_cli.frontend.idle import splat_value
from toast_cli.frontend.inline import moved_out, replace_operation
from toast_cli.frontend.leftovers import create
from toast_cli.xla import ir, run_passes, walk_ops

DROP_UNREAD = "func.func(trivial-dce)"
CASE, IF, SELECT = "stablehlo.case", "stablehlo.if", "stablehlo.select"
CONDITIONALS = frozenset({CASE, IF})
DECIDED = CONDITIONALS | {SELECT}


def take_known_branches(module: Any) -> None:
    """Inner conditionals first, so that what they leave may decide outer ones."""
    decided = 0
    for operation in walk_ops(module, *DECIDED, inner_first=True):
        number = stated_number(operation.operands[0])
        if number is not None:
            replace_operation(operation, outcome(operation, number))
            decided += 1
    if decided:
        run_passes(module, DROP_UNREAD)


def drop_unread_results(module: Any) -> None:
    """Has conditionals give zeros where nothing reads what they give, and drops what only that took."""
    run_passes(module, DROP_UNREAD)
    while empty_unread_results(module):  # each time fewer are left
        run_passes(module, DROP_UNREAD)


def empty_unread_results(module: Any) -> int:
    """Of conditionals as they are now; returns how many values are no longer given."""
    emptied = 0
    for operation in walk_ops(module, CASE, IF):
        unread = [k for k, result in enumerate(operation.results) if not list(result.uses) and is_array(result)]
        for block in [region.blocks[0] for region in operation.regions] if unread else []:
            last = block.operations[len(block.operations) - 1].operation
            for k in unread:
                if splat_value(last.operands[k]) != 0:
                    last.operands[k] = zeros(operation.results[k].type, last)
                    emptied += 1
    return emptied


def zeros(kind: Any, before: Any) -> Any:
    """A constant of zeros in front of an operation."""
    element = kind.element_type
    with element.context, before.location:
        zero = (ir.FloatAttr if isinstance(element, ir.FloatType) else ir.IntegerAttr).get(element, 0)
        return create("stablehlo.constant", [], [kind], {"value": ir.DenseElementsAttr.get_splat(kind, zero)}, before)[
            0
        ]


def is_array(value: Any) -> bool:
    """Of integers or floating-point numbers: whether there is a constant for it."""
    kind = value.type
    return isinstance(kind, ir.RankedTensorType) and isinstance(kind.element_type, ir.IntegerType | ir.FloatType)


def outcome(operation: Any, number: int) -> list[Any]:
    """What a conditional gives whose index, or predicate, is `number`; the branch's operations move in front of it."""
    if operation.name == SELECT:
        return [operation.operands[1 if number else 2]]
    branches = list(operation.regions)
    if operation.name == IF:
        branch = branches[0 if number else 1]
    else:  # an index that no branch has is the last one's
        branch = branches[number if 0 <= number < len(branches) else -1]
    return moved_out(branch.blocks[0], operation)


def stated_number(value: Any) -> int | None:
    """The number that all elements of an array of integers or truth values are, where the program states it; also
    behind conversions, and clamped, as `lax.switch` does."""
    stated = splat_value(value)
    if stated is not None:
        return int(stated)
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    if owner.name == "stablehlo.convert":
        inner = stated_number(owner.operands[0])
        return inner if isinstance(value.type.element_type, ir.IntegerType) else None
    if owner.name == "stablehlo.clamp":
        low, number, high = (stated_number(operand) for operand in owner.operands)
        return None if low is None or number is None or high is None else max(low, min(number, high))
    return None
