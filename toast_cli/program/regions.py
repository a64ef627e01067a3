"""Locates reads of arrays in loops and branches, and counts them: readers in one region share copies of an array.

In: a program. Out: the region of each use, and the outermost one where a copy for it can be made ahead of loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from toast_cli.program.model import Program, once
from toast_cli.program.ops import CARRY, DYNAMIC_SLICE, JOIN

Use = tuple[int, int]  # an op, and which of its operands


class Region(NamedTuple):
    """A loop, -1 outside of all, and the branches within it, outermost first."""

    loop: int
    branches: tuple[int, ...] = ()


class Stop(NamedTuple):
    """A region, and how often a copy made there for a reader is made in one run."""

    region: Region
    runs: float


class Reading(NamedTuple):
    """One use. inside: region of the use. ahead: outermost region in which a copy for it can be made; the same unless
    only loops are between the use and the array's producer. whole_ahead: the whole copy is made ahead of such loops,
    because they slice it in each trip, or it is a vector (a bias, a decay), which takes little memory; None if there
    are no such loops."""

    inside: Stop
    ahead: Stop
    whole_ahead: bool | None


def trips_at(program: Program, op: int, position: int) -> float:
    """How often operand `position` of an op is read in one run; a loop reads its initial values once."""
    it = program.ops[op]
    return it.trips / max(1, program.loops[it.loop].trips) if it.name == CARRY and position == 0 else it.trips


def loop_at(program: Program, op: int, position: int) -> int:
    """The loop in which operand `position` of an op is read, -1 outside loops."""
    it = program.ops[op]
    return program.loops[it.loop].parent if it.name == CARRY and position == 0 else it.loop


def branches_at(program: Program, op: int, position: int) -> tuple[int, ...]:
    """The branches around where operand `position` of an op is read, within its loop, outermost first."""
    it = program.ops[op]
    if it.name == JOIN:
        return (*it.branches[:-1], it.branches[-1] + position)
    return () if it.name == CARRY and position == 1 else it.branches


@once
def all_readings(program: Program) -> list[list[Reading]]:
    """[values][uses] the reading of each use of each value."""
    return [readings(program, value, uses) for value, uses in enumerate(program.users)]


def readings(program: Program, value: int, uses: Sequence[Use]) -> list[Reading]:
    """[uses] the reading of each of a value's uses, in program order.

    Uses in one block, or in branches within it, share the region of the first of them. Sibling branches share nothing.
    """
    is_vector = sum(size > 1 for size in program.values[value].shape) < 2
    found: list[Reading] = []
    for use in uses:
        loop, branches = loop_at(program, *use), branches_at(program, *use)
        known = (r.inside.region for r in found if r.inside.region.loop == loop)
        region = next((r for r in known if branches[: len(r.branches)] == r.branches), Region(loop, branches))
        inside = Stop(region, trips_at(program, *use))
        ahead = _ahead(program, value, Region(loop, branches))
        takes_pieces = program.ops[use[0]].name == DYNAMIC_SLICE
        found.append(Reading(inside, ahead or inside, None if ahead is None else takes_pieces or is_vector))
    return found


def _ahead(program: Program, value: int, read: Region) -> Stop | None:
    """Where a value that is read in `read` is made, if only loops, at least one, are in between; else None."""
    made = _made(program, value, read.loop)
    if read.loop == made.region.loop:
        return None
    loop, branches = read
    while loop not in (made.region.loop, -1) and not branches:
        loop, branches = program.loops[loop].parent, program.ops[program.loops[loop].first].branches
    return made if (loop, branches) == made.region else None


def _made(program: Program, value: int, loop: int) -> Stop:
    """Where a value is made, for readers in `loop`: a loop's carry is made in the loop for readers there, and around it
    for readers after it."""
    number = program.producer[value]
    op = program.ops[number]
    if op.name == CARRY and not _is_within(program, loop, op.loop):
        return Stop(Region(program.loops[op.loop].parent, op.branches), trips_at(program, number, 0))
    branches = () if op.name == CARRY else op.branches[:-1] if op.name == JOIN else op.branches
    return Stop(Region(op.loop, branches), op.trips)


def _is_within(program: Program, loop: int, outer: int) -> bool:
    while loop not in (outer, -1):
        loop = program.loops[loop].parent
    return loop == outer
