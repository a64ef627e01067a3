"""Recognises loop indices that are linear in a loop counter: `sign * counter + offset`, with a constant step per trip.

In: a `stablehlo.while` and a scalar of its body. Out: its `Index`, or None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toast_cli import xla
from toast_cli.frontend.trips import trip_count
from toast_cli.program.ops import ADD, CONVERT, RESHAPE, SELECT
from toast_cli.xla import ir

_SUBTRACT, _CONSTANT, _COMPARE = "stablehlo.subtract", "stablehlo.constant", "stablehlo.compare"


@dataclass(frozen=True)
class Index:
    """`sign * counter + offset`. counter: number of a carried value, -1 for a constant (`sign` is 0)."""

    counter: int
    sign: int
    offset: int


def body_of(loop: Any) -> Any:
    return loop.regions[1].blocks[0]


def yielded(loop: Any) -> list[Any]:
    """The values that an iteration passes on to the next."""
    body = body_of(loop)
    return list(body.operations[len(body.operations) - 1].operands)


def index_of(value: Any, loop: Any) -> Index | None:
    """An integer of a loop's body as a linear function of a counter; None if it is not one."""
    body = body_of(loop)
    if isinstance(value, ir.BlockArgument):
        if value.owner != body:
            return None
        number = value.arg_number
        if yielded(loop)[number] != value:
            return Index(number, 1, 0)
        outer = loop.operands[number]
        return None if isinstance(outer, ir.BlockArgument) else _constant(outer.owner)
    maker = value.owner
    if maker.name == _CONSTANT:
        return _constant(maker)
    if maker.name in (CONVERT, RESHAPE):
        return index_of(maker.operands[0], loop)
    if maker.name == SELECT and _asks_if_negative(maker):  # JAX's handling of negative indices
        return index_of(maker.operands[2], loop)
    if maker.name not in (ADD, _SUBTRACT):
        return None
    left, right = (index_of(operand, loop) for operand in maker.operands)
    if left is None or right is None or (left.sign and right.sign):
        return None
    way = 1 if maker.name == ADD else -1
    return Index(max(left.counter, right.counter), left.sign + way * right.sign, left.offset + way * right.offset)


def _constant(maker: Any) -> Index | None:
    number = xla.constant_number(maker) if maker.name == _CONSTANT else None
    return Index(-1, 0, int(number)) if number is not None and number.lstrip("-").isdigit() else None


def _asks_if_negative(select: Any) -> bool:
    asked = select.operands[0].owner
    if (
        isinstance(asked, ir.Block)
        or asked.name != _COMPARE
        or "LT" not in str(asked.attributes["comparison_direction"])
    ):
        return False
    zero = asked.operands[1].owner
    constant = None if isinstance(zero, ir.Block) else _constant(zero)
    return bool(asked.operands[0] == select.operands[2]) and constant is not None and constant.offset == 0


def counted(index: Index, loop: Any) -> range | None:
    """The values that an index takes, in order; None if they are not known."""
    trips = trip_count(loop)
    if index.sign == 0 or trips is None:
        return None
    start, step = loop.operands[index.counter], index_of(yielded(loop)[index.counter], loop)
    first = None if isinstance(start, ir.BlockArgument) else _constant(start.owner)
    if first is None or step is None or (step.counter, step.sign) != (index.counter, 1) or not step.offset:
        return None
    begin, by = index.sign * first.offset + index.offset, index.sign * step.offset
    return range(begin, begin + by * trips, by)
