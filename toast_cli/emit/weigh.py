"""What the constraints of a written program are worth: the plan priced again without those of one kind.

Enters: a `Source`, a `PartitionedProgram`, the `Marks` that were written, and a way to price values that lie elsewhere.
Leaves: `Family` values, the dearest first. Constraints that say the same at one place of the source (in every layer)
are a family. Without a family Shardy's propagation runs again, and what then lies elsewhere is priced where it lies.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from toast_cli.emit.constraints import located_constraints
from toast_cli.emit.marks import Marks, pinnable_values
from toast_cli.emit.propagate import Propagation, numbered, without_units
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding

# Families that are priced: the most, and of a large program as many as this number of operations allows.
MOST_FAMILIES, OPERATIONS = 10, 21_000
_NUMBER = re.compile(r"\d+")

# Values that lie elsewhere -> (step seconds, peak bytes).
Price = Callable[[dict[int, Sharding]], tuple[float, int]]


@dataclass(frozen=True)
class Family:
    """Constraints of one kind at one place of the source.

    Attributes:
        location: with `*` for the numbers in which the names of its places differ. place, type, line: as in
            `Constraint`.
        count: constraints. values: arrays that lie elsewhere without them.
        saved_seconds, saved_bytes: what a step takes more, and the peak has more, without them alone; negative for
            less.
    """

    location: str
    place: str
    type: str
    line: str
    count: int
    values: int
    saved_seconds: float
    saved_bytes: int


def weigh(
    source: Source, lowered: PartitionedProgram, marks: Marks, planned: dict[int, Sharding], price: Price
) -> list[Family]:
    """The families that were tried (those that speak of the most bytes), the dearest first.

    Each is left out alone. `price({})` is the plan as it is. What is priced is where values then lie; that an operation
    may be split otherwise though its result lies as planned is not, so a constraint at a use counts for what it moves.

    Args:
        planned: where values lie after propagation from all of the marks.
    """
    wanted = min(MOST_FAMILIES, OPERATIONS // max(1, len(source.program.ops)))
    if not wanted:
        return []
    families: dict[tuple[str, str, str, str], list[tuple[float, tuple[str, int]]]] = defaultdict(list)
    for one, size, mark in located_constraints(source, lowered, marks):
        families[folded(one.location), one.place, one.type, one.line].append((size, mark))
    ranked = sorted(families.items(), key=lambda item: -sum(size for size, _ in item[1]))
    if not ranked:
        return []
    before = price({})
    found = []
    movable = pinnable_values(source, lowered)
    with numbered(source, lowered):
        propagation = Propagation(source, lowered)
        for (location, place, type_, line), members in ranked[:wanted]:
            moved = propagation.run(without(marks, {mark for _, mark in members})).values
            elsewhere = {
                v: moved[v]
                for v in movable
                if v in moved and moved[v] != planned.get(v, without_units(lowered.shardings[v], lowered.axis_sizes))
            }
            after = price(elsewhere) if elsewhere else before
            saved = after[0] - before[0], after[1] - before[1]
            found.append(Family(location, place, type_, line, len(members), len(elsewhere), *saved))
    return sorted(found, key=lambda one: (-one.saved_seconds, -one.saved_bytes, -one.values))


def without(marks: Marks, gone: set[tuple[str, int]]) -> Marks:
    """The marks less some: ("pin", number) or ("reshard", number)."""
    pins = tuple(pin for k, pin in enumerate(marks.pins) if ("pin", k) not in gone)
    reshards = tuple(one for k, one in enumerate(marks.reshards) if ("reshard", k) not in gone)
    return replace(marks, pins=pins, reshards=reshards)


def folded(location: str) -> str:
    """The place with `*` for the numbers in the names behind it: `model.py:7 f (jit(f)/layer_*/dot_general)`."""
    place, sign, label = location.partition(" (")
    return place + sign + _NUMBER.sub("*", label)
