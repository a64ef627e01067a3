"""Gathers of what loops only read: made in each trip and freed, or once before the loop and held.

By default a loop gathers in each trip (see `reshard.hops_ahead` for what it never does). `Replicate` of the role
`LOOP_READS` over an axis takes gathers over that axis before the outermost of the loops that only read the array. That
saves collectives, and the gathered copy is in memory while those loops run.

Of weights a loop often reads a view that it makes itself in each trip: it converts them, or takes those of one layer
where a loop over layers stands in one over microbatches. With that decision such a view is made of the whole weight, so
that the weight is what is gathered.

Enters: a program, or a plan. Leaves: the values that such a decision can be about, and the axes that a plan has it for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from toast_cli.plan.decisions import Plan, Replicate
from toast_cli.plan.iteration import Iteration
from toast_cli.program.model import Program
from toast_cli.program.ops import DYNAMIC_SLICE
from toast_cli.program.regions import all_readings, readings
from toast_cli.program.roles import views

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
    for value, reads in enumerate(all_readings(program)):
        if program.values[value].shape and not free[value]:
            for read in reads:
                if read.whole_ahead is False and read.ahead.runs < read.inside.runs:
                    yield value
                    break


def weight_views(program: Program, weights: Sequence[int]) -> frozenset[int]:
    """Numbers of the ops that make a view of a weight again in each of several trips of a loop that does not make the
    weight. Of one that takes another piece in each trip it has to be a loop around that one.

    Args:
        weights: values.
    """
    found: set[int] = set()
    if not program.loops:
        return frozenset()
    origin = views(program, weights)
    for number, op in enumerate(program.ops):
        if op.loop < 0 or not op.operands or op.operands[0] not in origin or op.results[0] not in origin:
            continue
        if program.values[op.results[0]].elements > program.values[op.operands[0]].elements:
            continue  # spread over a batch
        if program.producer[op.operands[0]] in found:
            found.add(number)
            continue
        (read,) = readings(program, op.operands[0], [(number, 0)])
        again = read.inside.runs / (program.loops[op.loop].trips if op.name == DYNAMIC_SLICE else 1)
        if read.whole_ahead is not None and read.ahead.runs < again:
            found.add(number)
    return frozenset(found)


def held_over(roles: Sequence[str], plan: Plan) -> frozenset[int]:
    """Axes over which a plan gathers what loops only read before them."""
    return frozenset(d.axis for d in plan if isinstance(d, Replicate) and roles[d.role] == LOOP_READS)


def edges(sizes: tuple[int, ...], held: Collection[int]) -> Iteration:
    """What stands for `LOOP_EDGES` where that is gathered before loops over these axes: a slot for each mesh axis,
    which the axis splits. sizes: of the mesh axes."""
    return Iteration(tuple([(axis,) if axis in held else () for axis in range(len(sizes))]), (), (), (), (), (), ())
