"""Trip counts of `while` loops in compiled HLO text.

In: the loop, the instructions of the computation it is in, and every computation. Out: the count that the
compiler states, else that of the loop counter (start, step and bound), else the one constant of the condition that no
array repeats, else 1. Start and bound may be the same instruction plus a constant each (from `position` to `position +
8`), or the final counter of an earlier loop. For a condition of several parts (`i < 50 and error > 1e-3`, `not (i == 50
or all finished)`) the parts on a counter give an upper bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from toast_cli.frontend.trips import NEGATED, SWAPPED, iterations
from toast_cli.verify.hlo_text import Node, Nodes, root_of

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_DIRECTION = re.compile(r"direction=(\w\w)")
_INDEX = re.compile(r", index=(\d+)")
_SAME = frozenset({"copy", "convert", "bitcast", "reshape"})

Number = tuple[str | None, int]  # an instruction or None, and the constant added to it
Test = tuple[Node | None, bool]  # an instruction, and the value it must have


def trip_count(loop: Node, around: Nodes, bodies: dict[str, Nodes]) -> int:
    """Trips of a `while`, which is one of the instructions `around`."""
    known = _known_trips(loop, around, bodies)
    if known is not None:
        return known
    condition = bodies.get(loop.called("condition"), {})
    # Some constants are repeated to arrays, such as the size that uneven shards are masked with.
    repeated = {node.operands[-1] for node in condition.values() if node.opcode == "broadcast" and node.operands}
    constants = [
        node.integer
        for name, node in condition.items()
        if node.kind.startswith("s") and node.integer is not None and node.integer >= 0 and name not in repeated
    ]
    return constants[0] if len(constants) == 1 else 1


def _known_trips(loop: Node, around: Nodes, bodies: dict[str, Nodes]) -> int | None:
    """The trip count by the compiler's statement or by the counter."""
    known = _KNOWN.search(loop.rest)
    if known:
        return int(known[1])
    inside = bodies.get(loop.called("condition"), {})
    facts = _Loop(loop, around, inside, bodies.get(loop.called("body"), {}), bodies)
    counts = [_counted(facts, test, holds) for test, holds in _tests((root_of(inside), True), inside)]
    return min((count for count in counts if count is not None), default=None)


@dataclass(frozen=True)
class _Loop:
    """A `while`, the instructions around it, those of its condition and of its body, and all computations."""

    loop: Node
    around: Nodes
    inside: Nodes
    body: Nodes
    bodies: dict[str, Nodes]


def _tests(test: Test, inside: Nodes) -> Iterator[Test]:
    """The parts of a condition that must all hold; an `&`, and a negated `|`, have several."""
    node, holds = test
    if node is None or node.opcode not in ("and", "or", "not") or node.opcode == ("or" if holds else "and"):
        yield test
    else:
        for name in node.operands:
            yield from _tests((inside.get(_through(name, inside)), holds != (node.opcode == "not")), inside)


def _counted(loop: _Loop, test: Node | None, holds: bool) -> int | None:
    """Number of iterations for which a comparison of the condition is true (`holds`) or false."""
    compared = _DIRECTION.search(test.rest) if test and test.opcode == "compare" else None
    if test is None or compared is None:
        return None
    around, inside = loop.around, loop.inside
    carried, changed = _carried(loop.loop, around), _changed(loop.body)
    left, right = (_number(name, inside) for name in test.operands[:2])
    direction = compared[1] if holds else NEGATED[compared[1]]
    counter, ahead, bound = _element(left[0], inside), left[1], right
    if counter is None or counter not in changed:
        counter, ahead, bound = _element(right[0], inside), right[1], left
        direction = SWAPPED[direction]
    step = None if counter is None else _step(counter, loop.body)
    if counter is None or not step:
        return None
    base, first = _counted_to(_number(_place(carried, counter), around), loop)
    other, last = bound[0], bound[1] - ahead
    element = None if other is None else _element(other, inside)
    if element is not None and element not in changed:
        other, more = _counted_to(_number(_place(carried, element), around), loop)
        last += more
    if base != other and _read(base, around) != _read(other, around):
        return None
    return iterations(first, last, step, direction)


def _counted_to(number: Number, later: _Loop) -> Number:
    """A number, with the final counter of an earlier loop replaced by its constant: the loop of a gradient has the same
    trip count (TensorFlow)."""
    name, offset = number
    read = later.around.get(name) if name else None
    counter = _index(read)
    if read is None or counter is None:
        return number
    loop = later.around.get(_through(read.operands[0], later.around))
    if loop is None or loop.opcode != "while":
        return number
    body = later.bodies.get(loop.called("body"), {})
    trips = _known_trips(loop, later.around, later.bodies)
    step = _step(counter, body) if counter in _changed(body) else 0
    start = _constant(_place(_carried(loop, later.around), counter), later.around)
    return number if trips is None or step is None or start is None else (None, offset + start + trips * step)


def _carried(loop: Node, around: Nodes) -> Node | None:
    """The initial tuple of a loop."""
    return around.get(loop.operands[0])


def _changed(body: Nodes) -> set[int]:
    """Elements of a loop's tuple that the body changes."""
    root = root_of(body)
    places = root.operands if root and root.opcode == "tuple" else ()
    return {number for number, name in enumerate(places) if _element(name, body) != number}


def _step(counter: int, body: Nodes) -> int | None:
    """The constant that each iteration adds to element `counter` of the loop's tuple."""
    moved = body.get(_through(_place(root_of(body), counter), body))
    if moved is None or moved.opcode not in ("add", "subtract"):
        return None
    left, right = moved.operands[:2]
    if _element(left, body) == counter:
        by = _constant(right, body)
    elif moved.opcode == "add" and _element(right, body) == counter:
        by = _constant(left, body)
    else:
        return None
    return -by if by is not None and moved.opcode == "subtract" else by


def _place(made: Node | None, at: int) -> str:
    """Name of operand `at` of a `tuple`."""
    return made.operands[at] if made and made.opcode == "tuple" and at < len(made.operands) else ""


def _through(name: str, inside: Nodes) -> str:
    """The name of the instruction behind copies and conversions."""
    node = inside.get(name)
    return _through(node.operands[0], inside) if node and node.opcode in _SAME else name


def _element(name: str | None, inside: Nodes) -> int | None:
    """The index of the loop's tuple that an instruction reads."""
    return _index(inside.get(_through(name, inside))) if name else None


def _index(node: Node | None) -> int | None:
    found = _INDEX.search(node.rest) if node and node.opcode == "get-tuple-element" else None
    return int(found[1]) if found else None


def _number(name: str, inside: Nodes) -> Number:
    """An integer as the sum of another instruction and a constant, as far as that is visible."""
    offset = 0
    while True:
        name = _through(name, inside)
        node, constant = inside.get(name), _constant(name, inside)
        if constant is not None:
            return None, offset + constant
        if node is None or node.opcode not in ("add", "subtract"):
            return name, offset
        left, right = (_constant(operand, inside) for operand in node.operands[:2])
        if right is not None:
            name, offset = node.operands[0], offset + (right if node.opcode == "add" else -right)
        elif left is not None and node.opcode == "add":
            name, offset = node.operands[1], offset + left
        else:
            return name, offset


def _read(name: str | None, inside: Nodes) -> str | None:
    """What a get-tuple-element reads, since several may read the same; other names as they are."""
    node = inside.get(name) if name else None
    return node.rest if node and _index(node) is not None else name


def _constant(name: str, inside: Nodes) -> int | None:
    """The integer that an instruction's value is; None if it is not constant."""
    node = inside.get(_through(name, inside))
    return node.integer if node else None
