"""How often loops and branches run: trip counts of `while` loops, read from the counter pattern that `lax.scan` and
`fori_loop` produce, and what the user says (`--runs`) of those that depend on data.

The pattern: the condition compares a carried integer with a bound, and each iteration adds a constant to the integer.
Start and bound are known integers, or the same value plus a constant each (from `position` to `position + 8`). A
condition may have several such parts, as in decoding loops (`~(length == 128 | all finished)`), and a bound may be the
final counter of an earlier loop. In: a `stablehlo.while`. Out: the count, or None for another pattern; and an upper
bound, for a condition with further parts (`i < 50 and error > 1e-3`) and for a counter with an unknown start, which is
assumed not to be negative. Where the counter of a loop around decides a bound (the blocks of keys that a causal mask
leaves) or a branch (every tenth step), the mean over that loop's trips counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import inf
from types import MappingProxyType
from typing import Any

import numpy as np

from toast_cli.base.errors import UsageError
from toast_cli.frontend import attributes as foreign
from toast_cli.frontend.known_numbers import Array, before_loops, known_numbers
from toast_cli.frontend.places import place_text
from toast_cli.frontend.shardings import FRONTEND
from toast_cli.program.ops import ADD, CASE, CONVERT, IF, RESHAPE, SUBTRACT, WHILE, kind_of
from toast_cli.program.quantities import format_plural
from toast_cli.xla import holders, ir, terminator, walk_ops

SWAPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE", "EQ": "EQ"}
NEGATED = {"LT": "GE", "LE": "GT", "GT": "LE", "GE": "LT", "NE": "EQ", "EQ": "NE"}
# Entry of the frontend attributes, which XLA keeps, of a loop or conditional: what `--runs` says of it.
RUNS = "toast.runs"
# The most trips of an enclosing loop of which a mean is taken; of more, so many, spread by the golden ratio, which has
# no period in common with what happens every few trips.
SAMPLED, GOLDEN = 256, (5**0.5 - 1) / 2

Counters = Mapping[Any, Array]  # counter of a loop -> its value
NO_COUNTERS: Counters = MappingProxyType({})
Number = tuple[Any, int]  # a value, or None, and the constant added to it
Condition = tuple[Any | None, bool]  # an operation that returns a boolean, and the value it must have


# ---------------------------------------------------------------- what the user says


def state_runs(module: Any, stated: tuple[str, ...], file: str) -> None:
    """Attaches what `--runs` says to the loops and conditionals of a module at a place that matches the pattern, and to
    others what counters of loops around them decide. It is also read from what XLA makes of the program.

    Args:
        stated: entries such as `model.py:12*=37`, trips of a loop, and `model.py:20*=9,1`, how often each branch of a
            conditional runs compared with the others, first the branch for 0 or false. file: see `place_text`.

    Raises `UsageError` for an entry without such numbers, and for one that fits nothing in the program.
    """
    operations = walk_ops(module, WHILE, IF, CASE)
    places = [(operation, place_text(str(operation.location), file)) for operation in operations if stated]
    for entry in stated:
        pattern, _, text = entry.rpartition("=")
        numbers = numbers_of(text)
        if not pattern or numbers is None:
            hint = "write e.g. 'model.py:12*=37' for a loop, 'model.py:20*=9,1' for two branches"
            raise UsageError(f'"{entry:.80}" does not say how often something runs', where="--runs", hint=hint)
        fitting = [op for op, place in places if fnmatchcase(place, pattern) and len(numbers) == _numbers_for(op)]
        if not fitting:
            available = [f"{place or 'no place'} ({format_plural(_numbers_for(op), 'number')})" for op, place in places]
            what = f'"{entry:.80}" fits no loop or conditional of the program'
            raise UsageError(what, where="--runs", hint=f"it has: {', '.join(dict.fromkeys(available)) or 'none'}")
        for operation in fitting:
            _attach(operation, text)
    for operation in operations:
        if stated_runs(operation) is None and (operation.name != WHILE or trip_count(operation) is None):
            runs = mean_runs(operation)
            if runs is not None:
                _attach(operation, ",".join(map(str, runs)))


def state_trips(module: Any) -> None:
    """Attaches trip counts, or the most there can be, to the loops of a module, for who reads what XLA makes of it."""
    for operation in walk_ops(module, WHILE):
        if stated_runs(operation) is None:
            count = trip_count(operation)
            count = trip_limit(operation) if count is None else count
            if count:
                _attach(operation, str(count))


def _attach(operation: Any, text: str) -> None:
    texts = foreign.entries(operation.attributes, FRONTEND, str)
    with operation.context:
        operation.attributes[FRONTEND] = ir.DictAttr.get({**texts, RUNS: ir.StringAttr.get(text)})


def _numbers_for(operation: Any) -> int:
    return 1 if operation.name == WHILE else len(operation.regions)


def numbers_of(text: str) -> list[float] | None:
    """The numbers of an entry, none below 0 and not all 0; None if it has none."""
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError:
        return None
    return numbers if 0 < sum(numbers) < inf and min(numbers) >= 0 else None


def stated_runs(operation: Any) -> list[float] | None:
    """Trips of a loop, or how often each region of a conditional runs compared with the others, if the user says so."""
    entries = foreign.entries(operation.attributes, FRONTEND, str)
    numbers = numbers_of(foreign.text(entries, RUNS, str) or "")
    if numbers is None or len(numbers) != _numbers_for(operation):
        return None
    return numbers[::-1] if operation.name == IF else numbers


# ---------------------------------------------------------------- what the program says


def trip_count(operation: Any, counters: Counters = NO_COUNTERS) -> int | None:
    """Trip count of `operation`, a `stablehlo.while` of normalised form; for a condition of several parts, until the
    first of them fails. counters: those of loops around it, and their values."""
    counts = [_compared(test, holds, operation, counters) for test, holds in _parts(operation)]
    sure = [count for count in counts if count is not None]
    return min(sure) if len(sure) == len(counts) else None


def mean_runs(operation: Any) -> list[float] | None:
    """How often a loop or the branches of a conditional run, as `--runs` says it: the mean over the trips of a loop
    around them, if counters of that loop decide it."""
    means = (_mean_over(outer, operation) for outer in holders(operation) if outer.name == WHILE)
    return next((runs for runs in means if runs is not None), None)


def _mean_over(outer: Any, operation: Any) -> list[float] | None:
    """The mean over the trips of one loop around it: of `for i in range(4): for j in range(i)`, 1.5 trips."""
    trips = trip_count(outer)
    if not trips:
        return None
    counters = []  # carried integer, its first value, and what each trip adds to it
    for k, argument in enumerate(outer.regions[1].blocks[0].arguments):
        first = constant_of(outer.operands[k])
        step = None if first is None else step_of(k, outer)
        if first is not None and step:
            counters.append((argument, first, step))
    runs: list[list[int]] = []
    for trip in range(trips) if trips <= SAMPLED else [int(trips * (GOLDEN * k % 1)) for k in range(SAMPLED)]:
        decided = _decided(operation, {value: np.array(first + step * trip) for value, first, step in counters})
        if decided is None:
            return None
        runs.append(decided)
    return [float(mean) for mean in np.mean(runs, axis=0)]


def _decided(operation: Any, counters: Counters) -> list[int] | None:
    """Trips of a loop; 1 for the branch of a conditional that is taken, and 0 for others, that for 0 or false first."""
    if operation.name == WHILE:
        count = trip_count(operation, counters)
        return None if count is None else [count]
    number, branches = constant_of(operation.operands[0], counters), len(operation.regions)
    chosen = number if number is not None and 0 <= number < branches else branches - 1
    return None if number is None else [int(branch == chosen) for branch in range(branches)]


def trip_limit(operation: Any) -> int | None:
    """An upper bound of the trip count, if the condition or one of its parts counts up to a constant."""
    counts = (_compared(test, holds, operation, at_most=True) for test, holds in _parts(operation))
    return min((count for count in counts if count is not None), default=None)


def _parts(operation: Any) -> list[Condition]:
    """The parts of a loop's condition, all of which must hold; an `&`, and a negated `|`, have several."""
    waiting: list[Condition] = [(_producer(terminator(operation.regions[0].blocks[0]).operands[0]), True)]
    parts: list[Condition] = []
    while waiting:
        test, holds = waiting.pop()
        if test is not None and _is_true_unless_false(test):
            waiting.append((_producer(_through(test.operands[0])), holds))
        elif test is not None and test.name == "stablehlo.not":
            waiting.append((_producer(_through(test.operands[0])), not holds))
        elif test is not None and test.name == ("stablehlo.and" if holds else "stablehlo.or"):
            waiting += [(_producer(_through(operand)), holds) for operand in test.operands]
        else:
            parts.append((test, holds))
    return parts


def _is_true_unless_false(test: Any) -> bool:
    """True if an operation compares a boolean with false, as JAX writes the parts of an `&`."""
    if test.name != "stablehlo.compare" or "NE" not in str(test.attributes["comparison_direction"]):
        return False
    other = known_numbers(test.operands[1])
    return other is not None and other.dtype.kind == "b" and not other.any()


def _compared(
    compare: Any | None, holds: bool, operation: Any, counters: Counters = NO_COUNTERS, *, at_most: bool = False
) -> int | None:
    """Number of iterations for which a comparison in the condition is true (`holds`) or false; with `at_most`, an upper
    bound if the start is unknown."""
    if compare is None or compare.name != "stablehlo.compare":
        return None
    direction = str(compare.attributes["comparison_direction"]).removesuffix(">").split()[-1]
    direction = direction if holds else NEGATED[direction]
    left, right = (_origin(operand) for operand in compare.operands)
    counter, bound = _counter(left, operation), right
    if counter is None:
        counter, bound, direction = _counter(right, operation), left, SWAPPED[direction]
    step = None if counter is None else step_of(counter, operation)
    if counter is None or not step:
        return None
    (base, first), (other, last) = _number(operation.operands[counter], counters), _number(bound, counters)
    if base is other if base is None or other is None else base == other:
        return iterations(first, last, step, direction)
    most = last if other is None else _most(bound)
    if not at_most or most is None or step <= 0:
        return None
    return iterations(0 if base is not None else first, most, step, direction)


def _most(value: Any, depth: int = 4) -> int | None:
    """An upper bound of an integer, if it is the smaller of others, nested so deep at most, of which one is a
    constant."""
    producer = _producer(value := _origin(value))
    if not depth or producer is None or producer.name not in ("stablehlo.minimum", "stablehlo.clamp"):
        return constant_of(value)
    operands = producer.operands if producer.name == "stablehlo.minimum" else list(producer.operands)[2:]
    return min((most for operand in operands if (most := _most(operand, depth - 1)) is not None), default=None)


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


def _producer(value: Any) -> Any | None:
    return getattr(value.owner, "operation", None)


def _through(value: Any) -> Any:
    """Follows a value back through conversions and reshapes."""
    producer = _producer(value)
    while producer is not None and (kind_of(producer.name).identity or producer.name in (CONVERT, RESHAPE)):
        value = producer.operands[value.result_number if producer.name.endswith("barrier") else 0]
        producer = _producer(value)
    return value


def _origin(value: Any) -> Any:
    """Follows a value back through conversions, reshapes, and loops that pass it on unchanged."""
    while (further := before_loops(_through(value))) != value:
        value = further
    return value


def _counter(value: Any, operation: Any) -> int | None:
    """Index of the carried value that a value of the condition is; the body changes those that `_origin` leaves."""
    carried = list(operation.regions[0].blocks[0].arguments)
    return carried.index(value) if value in carried else None


def _number(value: Any, counters: Counters) -> Number:
    """An integer as the sum of a value outside the loop and a constant, as far as that is visible."""
    offset = 0
    while True:
        value = _origin(value)
        constant, producer = constant_of(value, counters), _producer(value)
        if constant is not None:
            return None, offset + constant
        if producer is None or producer.name not in (ADD, SUBTRACT):
            return value, offset
        sign = 1 if producer.name == ADD else -1
        left, right = (constant_of(operand, counters) for operand in producer.operands)
        if right is not None:
            value, offset = producer.operands[0], offset + sign * right
        elif left is not None and sign == 1:
            value, offset = producer.operands[1], offset + left
        else:
            return value, offset


def constant_of(value: Any, counters: Counters = NO_COUNTERS) -> int | None:
    """The value of an integer, if it follows from constants and counters of loops around it."""
    producer = _producer(value := _origin(value))
    if producer is not None and producer.name == WHILE:
        # The final counter of an earlier loop, which bounds the loop of its gradient (TensorFlow).
        number = value.result_number
        start, count, step = constant_of(producer.operands[number]), trip_count(producer), step_of(number, producer)
        return None if start is None or count is None or step is None else start + count * step
    elements = known_numbers(value, counters)
    return None if elements is None or elements.size != 1 else int(elements.flat[0])


def step_of(counter: int, operation: Any) -> int | None:
    """The constant that each iteration of a loop adds to carried value number `counter`."""
    body = operation.regions[1].blocks[0]
    producer = _producer(_through(terminator(body).operands[counter]))
    if producer is None or producer.name not in (ADD, SUBTRACT):
        return None
    sign = 1 if producer.name == ADD else -1
    left, right = (_through(operand) for operand in producer.operands)
    if left == body.arguments[counter]:
        step = constant_of(right)
    elif right == body.arguments[counter] and sign == 1:
        step = constant_of(left)
    else:
        return None
    return None if step is None else sign * step
