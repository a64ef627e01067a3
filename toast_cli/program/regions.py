"""Where arrays are read among loops and branches, and how often: what readers in one region want of an array is made
once for all of them.

Enters: a program. Leaves: the region of each use, and of what can be made ahead of the loops that it stands in.
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
    """A region, and how often what is made there for a reader is made in one run."""

    region: Region
    runs: float


class Reading(NamedTuple):
    """One use. inside: where it finds what is made anew wherever it is read. ahead: where it finds what is made no
    further in than need be, which is the same unless only loops stand between the use and where the array is made.
    whole_ahead: all of it is made ahead of such loops, since they take a piece of it in each trip, or it is a vector (a
    bias, a decay), which takes next to no memory; None where there are none."""

    inside: Stop
    ahead: Stop
    whole_ahead: bool | None


def trips_at(program: Program, op: int, position: int) -> float:
    """How often operand `position` of an op is read in one run: a loop reads what it starts with once."""
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
    """[values][uses] where each use of each value finds what is made of it."""
    return [readings(program, value, uses) for value, uses in enumerate(program.users)]


def readings(program: Program, value: int, uses: Sequence[Use]) -> list[Reading]:
    """[uses] where each of a value's uses, in program order, finds what is made of the value for it.

    That is where the first of those in one block, or in branches within it, reads it. Branches beside each other share
    nothing: each makes its own.
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
    """Where a value that is read in `read` is made, if that is further out and only loops stand in between."""
    made = _made(program, value, read.loop)
    if read.loop == made.region.loop:
        return None
    loop, branches = read
    while loop not in (made.region.loop, -1) and not branches:
        loop, branches = program.loops[loop].parent, program.ops[program.loops[loop].first].branches
    return made if (loop, branches) == made.region else None


def _made(program: Program, value: int, loop: int) -> Stop:
    """Where those who read a value in `loop` find it made: what a loop carries is made in the loop for readers there,
    and around it for those behind it."""
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
