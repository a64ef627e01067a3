"""Trip counts of `while` loops in compiled HLO text.

Enters: the loop's line, the lines of the computation it is in, and every computation. Leaves: the count that the
compiler states, else that of the loop counter (start, step and bound), else the one constant of the
condition that no array repeats, else 1.
Start and bound may be the same instruction plus a constant each (from `position` to `position + 8`), or the final
counter of an earlier loop. For a condition of several parts (`i < 50 and error > 1e-3`, `not (i == 50 or all
finished)`) the parts on a counter give an upper bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_LONE = re.compile(r"%([\w.\-]+) = s\d+\[\]\S* constant\((\d+)\)")
_BROADCAST = re.compile(r" broadcast\([^)]*?%([\w.\-]+)\)")
_WHOLE = re.compile(r" = [su]\d+\[\]\S* constant\((-?\d+)\)")
_ELEMENT = re.compile(r" get-tuple-element\(.*\), index=(\d+)")
_COMPARE = re.compile(r" compare\((.*?)\), direction=(\w\w)")
_PARTS = re.compile(r" (and|or|not)\((.*?)\)")
_STEP = re.compile(r" (add|subtract)\((.*?)\)")
_SAME = re.compile(r" (?:copy|convert|bitcast|reshape)\((.*?)\)")
_NAME = re.compile(r"%([\w.\-]+)")
_SWAPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}
_NEGATED = {"LT": "GE", "LE": "GT", "GT": "LE", "GE": "LT", "EQ": "NE", "NE": "EQ"}

Lines = dict[str, str]  # instruction's name -> its line
Number = tuple[str | None, int]  # an instruction or None, and the constant added to it
Test = tuple[str, bool]  # the line of an instruction, and the value it must have


def trip_count(line: str, around: list[str], bodies: dict[str, list[str]]) -> int:
    """Trips of the `while` in `line`, which is one of the lines `around`."""
    known = _known_trips(line, _named(around), bodies)
    if known is not None:
        return known
    condition = "\n".join(bodies.get(_called(line, "condition"), []))
    repeated = _BROADCAST.findall(condition)  # such as the size that uneven shards are masked with
    constants = [number for name, number in _LONE.findall(condition) if name not in repeated]
    return int(constants[0]) if len(constants) == 1 else 1


def _known_trips(line: str, outside: Lines, bodies: dict[str, list[str]]) -> int | None:
    """The trip count by the compiler's statement or by the counter."""
    known = _KNOWN.search(line)
    if known:
        return int(known[1])
    condition, body = (bodies.get(_called(line, role), []) for role in ("condition", "body"))
    inside = _named(condition)
    loop = _Loop(line, outside, inside, body, bodies)
    counts = [_counted(loop, test, holds) for test, holds in _tests((_root(condition), True), inside)]
    return min((count for count in counts if count is not None), default=None)


@dataclass(frozen=True)
class _Loop:
    """The line of a `while`, the instructions around it, those of its condition, and the lines of its body."""

    line: str
    around: Lines
    inside: Lines
    body: list[str]
    bodies: dict[str, list[str]]


def _tests(test: Test, inside: Lines) -> Iterator[Test]:
    """The parts of a condition that must all hold; an `&`, and a negated `|`, have several."""
    line, holds = test
    parts = _PARTS.search(line)
    if parts is None or parts[1] == ("or" if holds else "and"):
        yield test
    else:
        holds = holds != (parts[1] == "not")
        for name in _NAME.findall(parts[2]):
            yield from _tests((inside.get(_through(name, inside), ""), holds), inside)


def _counted(loop: _Loop, test: str, holds: bool) -> int | None:
    """Number of iterations for which a comparison of the condition is true (`holds`) or false."""
    compare = _COMPARE.search(test)
    if compare is None:
        return None
    around, inside = loop.around, loop.inside
    carried, changed = _carried(loop.line, around), _changed(loop.body)
    left, right = (_number(name, inside) for name in _NAME.findall(compare[1])[:2])
    direction = compare[2] if holds else _NEGATED[compare[2]]
    counter, ahead, bound = _element(left[0], inside), left[1], right
    if counter is None or counter not in changed:
        counter, ahead, bound = _element(right[0], inside), right[1], left
        direction = _SWAPPED[direction]
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
    if direction in ("LT", "LE") and step > 0:
        return max(0, (last - first - (direction == "LT")) // step + 1)
    if direction in ("GT", "GE") and step < 0:
        return max(0, (first - last - (direction == "GT")) // -step + 1)
    if direction == "NE" and (last - first) % step == 0 and (last - first) // step >= 0:
        return (last - first) // step
    return None


def _counted_to(number: Number, later: _Loop) -> Number:
    """A number, with the final counter of an earlier loop replaced by its constant: the loop of a gradient has the same
    trip count (TensorFlow)."""
    name, offset = number
    read = _ELEMENT.search(later.around.get(name, "")) if name else None
    if name is None or read is None:
        return number
    source = _NAME.findall(later.around[name].partition(" get-tuple-element(")[2])[0]
    line = later.around.get(_through(source, later.around), "")
    if " while(" not in line:
        return number
    counter, body = int(read[1]), later.bodies.get(_called(line, "body"), [])
    trips = _known_trips(line, later.around, later.bodies)
    step = _step(counter, body) if counter in _changed(body) else 0
    start = _constant(_place(_carried(line, later.around), counter), later.around)
    return number if trips is None or step is None or start is None else (None, offset + start + trips * step)


def _carried(line: str, around: Lines) -> str:
    """The initial tuple of a loop."""
    return around.get(_NAME.findall(line.partition(" while(")[2])[0], "")


def _changed(body: list[str]) -> set[int]:
    """Elements of a loop's tuple that the body changes."""
    inside, root = _named(body), _root(body)
    places = _NAME.findall(root.partition(" tuple(")[2].partition(")")[0])
    return {number for number, name in enumerate(places) if _element(name, inside) != number}


def _step(counter: int, body: list[str]) -> int | None:
    """The constant that each iteration adds to element `counter` of the loop's tuple."""
    inside = _named(body)
    found = _STEP.search(inside.get(_through(_place(_root(body), counter), inside), ""))
    if found is None:
        return None
    left, right = _NAME.findall(found[2])[:2]
    if _element(left, inside) == counter:
        by = _constant(right, inside)
    elif found[1] == "add" and _element(right, inside) == counter:
        by = _constant(left, inside)
    else:
        return None
    return -by if by is not None and found[1] == "subtract" else by


def _named(lines: list[str]) -> Lines:
    return {name[1]: line for line in lines if (name := _NAME.search(line.partition(" = ")[0]))}


def _root(lines: list[str]) -> str:
    return next((line for line in reversed(lines) if line.startswith("  ROOT ")), "")


def _called(line: str, role: str) -> str:
    found = re.search(rf"{role}=%?([^\s,]+)", line)
    return found[1] if found else ""


def _place(line: str, at: int) -> str:
    """Name of operand `at` of a `tuple`."""
    names = _NAME.findall(line.partition(" tuple(")[2].partition(")")[0])
    return names[at] if at < len(names) else ""


def _through(name: str, inside: Lines) -> str:
    """The name of the instruction behind copies and conversions."""
    found = _SAME.search(inside.get(name, ""))
    return _through(_NAME.findall(found[1])[0], inside) if found else name


def _element(name: str | None, inside: Lines) -> int | None:
    """The index of the loop's tuple that an instruction reads."""
    found = _ELEMENT.search(inside.get(_through(name, inside), "")) if name else None
    return int(found[1]) if found else None


def _number(name: str, inside: Lines) -> Number:
    """An integer as the sum of another instruction and a constant, as far as that is visible."""
    offset = 0
    while True:
        name = _through(name, inside)
        line = inside.get(name, "")
        constant, sum_ = _constant(name, inside), _STEP.search(line)
        if constant is not None:
            return None, offset + constant
        operands = _NAME.findall(sum_[2])[:2] if sum_ else []
        if sum_ is None or len(operands) < 2:
            return name, offset
        left, right = (_constant(operand, inside) for operand in operands)
        if right is not None:
            name, offset = operands[0], offset + (right if sum_[1] == "add" else -right)
        elif left is not None and sum_[1] == "add":
            name, offset = operands[1], offset + left
        else:
            return name, offset


def _read(name: str | None, inside: Lines) -> str | None:
    """Operand and index of a get-tuple-element, since several may read the same; other names as they are."""
    line = inside.get(name, "") if name else ""
    return line.partition(" get-tuple-element(")[2] if _ELEMENT.search(line) else name


def _constant(name: str, inside: Lines) -> int | None:
    """The integer that an instruction's value is; None if it is not constant."""
    found = _WHOLE.search(inside.get(_through(name, inside), ""))
    return int(found[1]) if found else None
