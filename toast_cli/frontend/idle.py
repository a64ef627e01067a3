"""Operations that return their operand unchanged, such as a flip of dimensions of size 1, a permutation that moves
nothing, or a slice of everything.

XLA drops them before it partitions, and so finds, for example, the kernel of a 1x1 convolution gathered once for both
directions, which flips it backward. A program that kept them would be split, and costed, as if these were different
arrays.

Enters: an operation. Leaves: whether its first operand can take its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toast_cli.xla import ir


def is_idle(operation: Any) -> bool:
    """Whether an operation of a kind in `IDLE_KINDS` leaves every number where it is."""
    if operation.operands[0].type != operation.results[0].type:
        return False
    return IDLE_KINDS[operation.name](operation)


def flips_nothing(operation: Any) -> bool:
    shape = ir.RankedTensorType(operation.results[0].type).shape
    return all(shape[d] == 1 for d in numbers(operation, "dimensions"))


def permutes_nothing(operation: Any) -> bool:
    """Apart from dimensions of size 1."""
    shape = ir.RankedTensorType(operation.results[0].type).shape
    moved = [d for d in numbers(operation, "permutation") if shape[d] > 1]
    return moved == sorted(moved)


def spreads_nothing(operation: Any) -> bool:
    order = numbers(operation, "broadcast_dimensions")
    return order == sorted(order)


def pads_nothing(operation: Any) -> bool:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    return not any(any(numbers(operation, name)) for name in names)


def always(operation: Any) -> bool:
    """Of one type in and out it cannot do anything."""
    return True


def numbers(operation: Any, name: str) -> list[int]:
    return list(ir.DenseI64ArrayAttr(operation.attributes[name]))


IDLE_KINDS: dict[str, Callable[[Any], bool]] = {
    "stablehlo.reverse": flips_nothing,
    "stablehlo.transpose": permutes_nothing,
    "stablehlo.broadcast_in_dim": spreads_nothing,
    "stablehlo.pad": pads_nothing,
    "stablehlo.slice": always,
    "stablehlo.reshape": always,
    "stablehlo.convert": always,
}
