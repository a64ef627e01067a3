"""Finds operations that return an operand unchanged: a reverse along dimensions of size 1, an identity transpose or one
that undoes another, a slice of everything, an update of a whole array, an addition of zero (`total = 0` in front of a
Python loop), or a logical operation with a known result (`done & False`).

XLA drops them before it partitions, and so gathers, for example, the kernel of a 1x1 convolution once for the forward
and the backward pass, which flips it. With these operations the plan would treat the two as different arrays.

In: an operation. Out: the operand that can replace it, if any. An addition of zero then returns -0.0 for -0.0,
as in XLA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toast_cli.xla import ir, splat_number


def unchanged_operand(operation: Any) -> Any | None:
    """The operand that an operation returns unchanged, for the kinds in `IDLE_KINDS`, `NEUTRAL` and `ABSORBING`,
    concatenations and updates; None if the operation changes it."""
    if operation.name == CONCATENATION:
        return _all_there_is(operation)
    if operation.name == OVERWRITING:
        new = operation.operands[1]
        return new if new.type == operation.results[0].type else None
    if operation.name in ABSORBING:
        return _absorbing(operation)
    if operation.name in NEUTRAL:
        return _other_than_neutral(operation, *NEUTRAL[operation.name])
    first = operation.operands[0]
    if first.type == operation.results[0].type and IDLE_KINDS[operation.name](operation):
        return first
    return _undone(operation) if operation.name in UNDOING else None


def _undone(operation: Any) -> Any | None:
    """The first operand of two shape operations that cancel, as in the gradient of a product
    with a transposed table."""
    before = operation.operands[0].owner
    if isinstance(before, ir.Block) or before.name != operation.name:
        return None
    first = before.operands[0]
    return first if first.type == operation.results[0].type and UNDOING[operation.name](before, operation) else None


def _all_there_is(concatenation: Any) -> Any | None:
    """The one operand of a concatenation that has elements; `associative_scan` leaves such concatenations."""
    whole = concatenation.results[0].type
    return next((piece for piece in concatenation.operands if piece.type == whole), None)


def _other_than_neutral(operation: Any, element: float, sides: tuple[int, ...]) -> Any | None:
    """The other operand, if all elements of one operand are neutral and that operand is on one of these sides."""
    for side in sides:
        if splat_number(operation.operands[side]) == element:
            return operation.operands[1 - side]
    return None


def _absorbing(operation: Any) -> Any | None:
    """An operand of `and` that is all false (of `or`: all true), which determines the result. Beam searches that may
    not stop early have these."""
    element = operation.results[0].type.element_type
    if not isinstance(element, ir.IntegerType) or element.width != 1:
        return None
    return next((value for value in operation.operands if splat_number(value) == ABSORBING[operation.name]), None)


def flips_nothing(operation: Any) -> bool:
    shape = ir.RankedTensorType(operation.results[0].type).shape
    return all(shape[d] == 1 for d in numbers(operation, "dimensions"))


def permutes_nothing(operation: Any) -> bool:
    """True for a permutation that moves only dimensions of size 1."""
    shape = ir.RankedTensorType(operation.results[0].type).shape
    moved = [d for d in numbers(operation, "permutation") if shape[d] > 1]
    return moved == sorted(moved)


def permutes_back(first: Any, second: Any) -> bool:
    """True if the second of two transposes undoes the first."""
    order = numbers(first, "permutation")
    return [order[d] for d in numbers(second, "permutation")] == list(range(len(order)))


def spreads_nothing(operation: Any) -> bool:
    order = numbers(operation, "broadcast_dimensions")
    return order == sorted(order)


def pads_nothing(operation: Any) -> bool:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    return not any(any(numbers(operation, name)) for name in names)


def always(operation: Any) -> bool:
    """True: with equal operand and result types, such an operation is the identity."""
    return True


def numbers(operation: Any, name: str) -> list[int]:
    return list(ir.DenseI64ArrayAttr(operation.attributes[name]))


IDLE_KINDS: dict[str, Callable[[Any], bool]] = {
    "stablehlo.reverse": flips_nothing,
    "stablehlo.transpose": permutes_nothing,
    "stablehlo.broadcast_in_dim": spreads_nothing,
    "stablehlo.pad": pads_nothing,
    "stablehlo.slice": always,
    "stablehlo.dynamic_slice": always,
    "stablehlo.reshape": always,
    "stablehlo.convert": always,
}
# Shape operations -> a function that says if the second of two undoes the first, given equal types.
UNDOING: dict[str, Callable[[Any, Any], bool]] = {
    "stablehlo.transpose": permutes_back,
    "stablehlo.reshape": lambda first, second: True,
}
CONCATENATION = "stablehlo.concatenate"
OVERWRITING = "stablehlo.dynamic_update_slice"
# Logical operation -> its absorbing element.
ABSORBING = {"stablehlo.and": 0.0, "stablehlo.or": 1.0}
# Element-wise operation -> its neutral element, and the operand positions in which it is neutral.
NEUTRAL: dict[str, tuple[float, tuple[int, ...]]] = {
    "stablehlo.add": (0, (0, 1)),
    "stablehlo.subtract": (0, (1,)),
    "stablehlo.multiply": (1, (0, 1)),
    "stablehlo.divide": (1, (1,)),
}
