"""Trip counts of `while` loops, read from the counter pattern that `lax.scan` and `fori_loop` produce.

The pattern: the condition compares a carried integer with a bound, and each iteration adds a constant to the integer.
Start and bound are constants, or the same value plus a constant each (from `position` to `position + 8`). A condition
may have several such parts, as in decoding loops (`~(length == 128 | all finished)`), and a bound may be the final
counter of an earlier loop. In: a `stablehlo.while`. Out: the count, or None for another pattern; and an upper
bound, for a condition with further parts (`i < 50 and error > 1e-3`) and for a counter with an unknown start, which is
assumed not to be negative.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from toast_cli.program.ops import CONVERT, RESHAPE, kind_of

SWAPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE", "EQ": "EQ"}
NEGATED = {"LT": "GE", "LE": "GT", "GT": "LE", "GE": "LT", "NE": "EQ", "EQ": "NE"}

Number = tuple[Any, int]  # a value, or None, and the constant added to it
Part = tuple[Any | None, bool]  # an operation that returns a boolean, and the value it must have


def trip_count(operation: Any) -> int | None:
    """Trip count of `operation`, a `stablehlo.while` of normalised form; for a condition of several parts, until the
    first of them fails."""
    counts = [_compared(test, holds, operation) for test, holds in _parts(operation)]
    known = [count for count in counts if count is not None]
    return min(known) if len(known) == len(counts) else None


def trip_limit(operation: Any) -> int | None:
    """An upper bound of the trip count, if the condition or one of its parts counts up to a constant."""
    counts = (_compared(test, holds, operation, at_most=True) for test, holds in _parts(operation))
    return min((count for count in counts if count is not None), default=None)


def _parts(operation: Any) -> list[Part]:
    """The parts of a loop's condition, all of which must hold; an `&`, and a negated `|`, have several."""
    waiting: list[Part] = [(_producer(_last(operation.regions[0].blocks[0]).operands[0]), True)]
    found: list[Part] = []
    while waiting:
        test, holds = waiting.pop()
        if test is not None and _is_true_unless_false(test):
            waiting.append((_producer(_through(test.operands[0])), holds))
        elif test is not None and test.name == "stablehlo.not":
            waiting.append((_producer(_through(test.operands[0])), not holds))
        elif test is not None and test.name == ("stablehlo.and" if holds else "stablehlo.or"):
            waiting += [(_producer(_through(operand)), holds) for operand in test.operands]
        else:
            found.append((test, holds))
    return found


def _is_true_unless_false(test: Any) -> bool:
    """True if an operation compares a boolean with false, as JAX writes the parts of an `&`."""
    if test.name != "stablehlo.compare" or "NE" not in str(test.attributes["comparison_direction"]):
        return False
    other = _producer(test.operands[1])
    if other is not None and other.name == "stablehlo.broadcast_in_dim":
        other = _producer(other.operands[0])
    if other is None or other.name != "stablehlo.constant":
        return False
    array = np.array(other.attributes["value"])
    return array.dtype.kind == "b" and not array.any()


def _compared(compare: Any | None, holds: bool, operation: Any, *, at_most: bool = False) -> int | None:
    """Number of iterations for which a comparison in the condition is true (`holds`) or false; with `at_most`, an upper
    bound if the start is unknown."""
    if compare is None or compare.name != "stablehlo.compare":
        return None
    body = operation.regions[1].blocks[0]
    direction = str(compare.attributes["comparison_direction"]).removesuffix(">").split()[-1]
    direction = direction if holds else NEGATED[direction]
    left, right = (_through(operand) for operand in compare.operands)
    counter, bound = _counter(left, operation), right
    if counter is None:
        counter, bound, direction = _counter(right, operation), left, SWAPPED[direction]
    step = None if counter is None else _step(_last(body).operands[counter], counter, body, operation)
    if counter is None or not step:
        return None
    (base, first), (other, last) = _number(operation.operands[counter], operation), _number(bound, operation)
    if _same(base, other):
        return iterations(first, last, step, direction)
    most = last if other is None else _most(bound, operation)
    if not at_most or most is None or step <= 0:
        return None
    return iterations(0 if base is not None else first, most, step, direction)


def _most(value: Any, operation: Any, depth: int = 4) -> int | None:
    """An upper bound of an integer, if it is the smaller of others, nested so deep at most, of which one is a
    constant."""
    producer = _producer(value := _outside(_through(value), operation))
    if not depth or producer is None or producer.name not in ("stablehlo.minimum", "stablehlo.clamp"):
        return _constant(value, operation)
    operands = producer.operands if producer.name == "stablehlo.minimum" else list(producer.operands)[2:]
    return min((most for at in operands if (most := _most(at, operation, depth - 1)) is not None), default=None)


def iterations(start: int, bound: int, step: int, direction: str) -> int | None:
    """Number of values `start, start + step, …` before the comparison with `bound` fails."""
    if direction in ("LT", "LE") and step > 0:
        last = bound if direction == "LE" else bound - 1
        return max(0, (last - start) // step + 1)
    if direction in ("GT", "GE") and step < 0:
        last = bound if direction == "GE" else bound + 1
        return max(0, (start - last) // -step + 1)
    if direction == "NE" and (bound - start) % step == 0 and (bound - start) // step >= 0:
        return (bound - start) // step
    return None


def _last(block: Any) -> Any:
    return block.operations[len(block.operations) - 1]


def _producer(value: Any) -> Any | None:
    owner = value.owner
    return getattr(owner, "operation", None)


def _through(value: Any) -> Any:
    """Follows a value back through conversions and reshapes."""
    producer = _producer(value)
    while producer is not None and (kind_of(producer.name).identity or producer.name in (CONVERT, RESHAPE)):
        value = producer.operands[value.result_number if producer.name.endswith("barrier") else 0]
        producer = _producer(value)
    return value


def _counter(value: Any, operation: Any) -> int | None:
    """Index of the carried value that a value of the condition is, if the body changes it."""
    number = _argument_number(value, operation.regions[0].blocks[0])
    return None if number is None or _unchanged(number, operation) else number


def _argument_number(value: Any, block: Any) -> int | None:
    for number, argument in enumerate(block.arguments):
        if argument == value:
            return number
    return None


def _unchanged(number: int, operation: Any) -> bool:
    """True if carried value `number` is loop-invariant."""
    body = operation.regions[1].blocks[0]
    return bool(_last(body).operands[number] == body.arguments[number])


def _number(value: Any, operation: Any) -> Number:
    """An integer as the sum of a value outside the loop and a constant, as far as that is visible."""
    offset = 0
    while True:
        value = _outside(_through(value), operation)
        constant, producer = _constant(value, operation), _producer(value)
        if constant is not None:
            return None, offset + constant
        if producer is None or producer.name not in ("stablehlo.add", "stablehlo.subtract"):
            return value, offset
        sign = 1 if producer.name == "stablehlo.add" else -1
        left, right = (_constant(_through(operand), operation) for operand in producer.operands)
        if right is not None:
            value, offset = producer.operands[0], offset + sign * right
        elif left is not None and sign == 1:
            value, offset = producer.operands[1], offset + left
        else:
            return value, offset


def _same(value: Any | None, other: Any | None) -> bool:
    return value is other if value is None or other is None else bool(value == other)


def _outside(value: Any, operation: Any) -> Any:
    """The outer value of a loop-invariant carried value; other values as they are."""
    for block in (region.blocks[0] for region in operation.regions):
        number = _argument_number(value, block)
        if number is not None and _unchanged(number, operation):
            return _through(operation.operands[number])
    return value


def _constant(value: Any, operation: Any) -> int | None:
    """The value of an integer, if it is a constant here or outside, or a loop-invariant constant."""
    producer = _producer(value)
    if producer is None:
        for block in (region.blocks[0] for region in operation.regions):
            number = _argument_number(value, block)
            if number is not None:
                unchanged = _unchanged(number, operation)
                return _constant(_through(operation.operands[number]), operation) if unchanged else None
        return _outer_constant(value, operation)
    if producer.name == "stablehlo.while":
        return _counted_to(producer, value.result_number)
    if producer.name != "stablehlo.constant":
        return None
    array = np.array(producer.attributes["value"])
    return int(array.ravel()[0]) if array.size == 1 and array.dtype.kind in "iu" else None


def _counted_to(loop: Any, number: int) -> int | None:
    """The final counter of an earlier loop, which bounds the loop of its gradient (TensorFlow)."""
    body = loop.regions[1].blocks[0]
    start, count = _constant(_through(loop.operands[number]), loop), trip_count(loop)
    step = 0 if _unchanged(number, loop) else _step(_last(body).operands[number], number, body, loop)
    return None if start is None or count is None or step is None else start + count * step


def _outer_constant(value: Any, operation: Any) -> int | None:
    """The constant that an enclosing loop carries unchanged."""
    parent = operation.parent
    while parent is not None and getattr(parent, "name", "") != "stablehlo.while":
        parent = getattr(parent, "parent", None)
        parent = getattr(parent, "operation", parent)
    return None if parent is None else _constant(value, parent)


def _step(value: Any, counter: int, body: Any, operation: Any) -> int | None:
    """The constant that each iteration adds to carried value number `counter`."""
    producer = _producer(_through(value))
    if producer is None or producer.name not in ("stablehlo.add", "stablehlo.subtract"):
        return None
    sign = 1 if producer.name == "stablehlo.add" else -1
    left, right = (_through(operand) for operand in producer.operands)
    if left == body.arguments[counter]:
        step = _constant(right, operation)
    elif right == body.arguments[counter] and sign == 1:
        step = _constant(left, operation)
    else:
        return None
    return None if step is None else sign * step
