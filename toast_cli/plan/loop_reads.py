"""Gathers of what loops only read: made in each trip and freed, or once before the loop and held.

By default a loop gathers in each trip (see `reshard.hops_ahead` for what it never does). `Replicate` of the role
`LOOP_READS` over an axis takes gathers over that axis before the outermost of the loops that only read the array. That
saves collectives, and the gathered copy is in memory while those loops run.

Enters: a program, or a plan. Leaves: the values that such a decision can be about, and the axes that a plan has it for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from toast_cli.plan.decisions import Plan, Replicate
from toast_cli.plan.iteration import Iteration
from toast_cli.program.model import Program
from toast_cli.program.regions import readings

# The role of what loops only read, for `Replicate`.
LOOP_READS = "what loops read"
# In place of an op pattern: the edges of all loops, which have that decision of their own.
LOOP_EDGES = -1


def read_in_trips(program: Program, free: Sequence[bool]) -> Iterator[int]:
    """Values that a loop only reads, all of it in each of several trips, so that it would gather them in each.

    Args:
        free: [values] made from constants alone, which nobody gathers.
    """
    if not program.loops:
        return
    for value, uses in enumerate(program.users):
        if uses and program.values[value].shape and not free[value]:
            for read in readings(program, value, uses):
                if read.whole_ahead is False and read.ahead.runs < read.inside.runs:
                    yield value
                    break


def held_over(roles: Sequence[str], plan: Plan) -> frozenset[int]:
    """Axes over which a plan gathers what loops only read before them."""
    return frozenset(d.axis for d in plan if isinstance(d, Replicate) and roles[d.role] == LOOP_READS)


def edges(sizes: tuple[int, ...], held: Collection[int]) -> Iteration:
    """What stands for `LOOP_EDGES` where that is gathered before loops over these axes: a slot for each mesh axis,
    which the axis splits. sizes: of the mesh axes."""
    return Iteration(tuple([(axis,) if axis in held else () for axis in range(len(sizes))]), (), (), (), (), (), ())
