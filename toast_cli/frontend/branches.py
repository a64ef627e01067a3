"""Removes conditionals with a constant predicate, which a `lax.cond` on a Python bool leaves (optax's `MultiSteps`
decides that way whether to skip an update).

XLA inlines the branch before it partitions, so its operations fuse with those around them; the cost model would count
the conditional's results as separate arrays.

In: a module without calls. Out: the same module with the branch in place of such a conditional, and an operand
in place of a select with a constant predicate or of a product with zero; dead code is dropped. Unread results of other
conditionals (the forward pass of a gradient) become zeros: XLA's partitioner would still compute and communicate them.
"""

from __future__ import annotations

from typing import Any

from toast_cli.frontend.inline import moved_out, replace_operation
from toast_cli.frontend.known_numbers import distinct, known_numbers
from toast_cli.program.ops import BROADCAST_IN_DIM
from toast_cli.xla import ir, run_passes, splat_number, terminator, walk_ops
from toast_cli.xla.build import Builder

DROP_UNREAD = "func.func(trivial-dce)"
CASE, IF, SELECT = "stablehlo.case", "stablehlo.if", "stablehlo.select"
CONDITIONALS = frozenset({CASE, IF})
DECIDED = CONDITIONALS | {SELECT}
MULTIPLY = "stablehlo.multiply"
ZERO_PRODUCTS = frozenset({MULTIPLY, "stablehlo.remainder"})  # what `jax.random.randint` is made of


def take_known_branches(module: Any) -> None:
    """Inlines the known branches, inner conditionals first, since these may decide outer ones."""
    decided = 0
    for operation in walk_ops(module, *DECIDED, inner_first=True):
        number = constant_number(operation.operands[0])
        if number is not None:
            replace_operation(operation, outcome(operation, number))
            decided += 1
    if decided:
        run_passes(module, DROP_UNREAD)


def drop_zero_products(module: Any) -> None:
    """Replaces integer products that have a factor known to be zero by that factor, and drops what only they needed.

    XLA simplifies them before it partitions. `jax.random.randint` over a span of a power of two draws twice the bits it
    uses and multiplies half of them by zero, so a sharding stated on those bits would be lost.
    """
    dropped = 0
    for operation in walk_ops(module, MULTIPLY):
        if isinstance(operation.results[0].type.element_type, ir.IntegerType):
            zero = next((factor for factor in operation.operands if is_zero(factor)), None)
            if zero is not None:
                replace_operation(operation, [zero])
                dropped += 1
    if dropped:
        run_passes(module, DROP_UNREAD)


def is_zero(factor: Any) -> bool:
    """True if all elements of a value of integers are known to be zero."""
    maker = factor.owner
    scalar = maker.operands[0] if not isinstance(maker, ir.Block) and maker.name == BROADCAST_IN_DIM else factor
    found = known_numbers(scalar)
    return found is not None and not distinct(found)[0].any()


def drop_unread_results(module: Any) -> None:
    """Replaces conditional results that nothing reads by zeros, and drops the operations that only they needed."""
    run_passes(module, DROP_UNREAD)
    while empty_unread_results(module):  # each round has fewer left
        run_passes(module, DROP_UNREAD)


def empty_unread_results(module: Any) -> int:
    """Replaces unread results of conditionals by zeros; returns their number."""
    emptied = 0
    for operation in walk_ops(module, CASE, IF):
        unread = [k for k, result in enumerate(operation.results) if not list(result.uses) and is_array(result)]
        for block in [region.blocks[0] for region in operation.regions] if unread else []:
            last = terminator(block)
            for k in unread:
                if splat_number(last.operands[k]) != 0:
                    kind = operation.results[k].type
                    last.operands[k] = Builder.before(last).constant(0, str(kind.element_type), tuple(kind.shape))
                    emptied += 1
    return emptied


def is_array(value: Any) -> bool:
    """True for an array of integers or floating-point numbers, for which a constant can be made."""
    kind = value.type
    return isinstance(kind, ir.RankedTensorType) and isinstance(kind.element_type, ir.IntegerType | ir.FloatType)


def outcome(operation: Any, number: int) -> list[Any]:
    """Results of a conditional with the index, or predicate, `number`; moves the branch's operations in front of it."""
    if operation.name == SELECT:
        return [operation.operands[1 if number else 2]]
    branches = list(operation.regions)
    if operation.name == IF:
        branch = branches[0 if number else 1]
    else:  # an index out of range selects the last branch
        branch = branches[number if 0 <= number < len(branches) else -1]
    return moved_out(branch.blocks[0], operation)


def constant_number(value: Any) -> int | None:
    """The value of a splat of integers or booleans, if the program states it; looks through conversions and the clamp
    of `lax.switch`."""
    stated = splat_number(value)
    if stated is not None:
        return int(stated)
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    if owner.name == "stablehlo.convert":
        inner = constant_number(owner.operands[0])
        return inner if isinstance(value.type.element_type, ir.IntegerType) else None
    if owner.name == "stablehlo.clamp":
        low, number, high = (constant_number(operand) for operand in owner.operands)
        return None if low is None or number is None or high is None else max(low, min(number, high))
    return None
