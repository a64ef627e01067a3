"""All-gathers of arrays that loops only read: in each trip, or once before the loop.

By default a loop gathers in each trip (see `reshard.steps_ahead` for the exceptions). `Replicate` of the role
`LOOP_READS` over an axis hoists gathers over that axis out of all loops that only read the array. That saves
collectives, but the gathered copy is in memory while those loops run.

A loop often reads a view of a weight that it makes itself in each trip: a conversion, or the slice of one layer in a
loop over layers within one over microbatches. With that decision the whole weight is gathered, and the view is made of
it.

In: a program, or a plan. Out: the values that such a decision can affect, or the axes of a plan's decisions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from toast_cli.plan.decisions import Plan, Replicate
from toast_cli.plan.op_sharding import OpSharding
from toast_cli.program.model import Program
from toast_cli.program.ops import DYNAMIC_SLICE
from toast_cli.program.regions import all_readings, readings
from toast_cli.program.roles import views

# The role of loop-invariant arrays, for `Replicate`.
LOOP_READS = "what loops read"
# In place of an op pattern: stands for the edges of all loops, to which that decision applies.
LOOP_EDGES = -1


def read_in_trips(program: Program, free: Sequence[bool]) -> Iterator[int]:
    """Loop-invariant values that a loop reads whole in each of several trips, so that it would gather them in each.

    Args:
        free: [values] made from constants alone, which are never gathered.
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
    """Numbers of the ops that make the same view of a loop-invariant weight in several trips. A view that slices
    another piece in each trip counts only if an outer loop repeats it.

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
    """Axes over which a plan gathers loop-invariant arrays before the loops."""
    return frozenset(d.axis for d in plan if isinstance(d, Replicate) and roles[d.role] == LOOP_READS)


def edges(sizes: tuple[int, ...], held: Collection[int]) -> OpSharding:
    """The op sharding of `LOOP_EDGES`: one factor per mesh axis, split by that axis if it is in `held`. sizes: of the
    mesh axes."""
    return OpSharding(tuple([(axis,) if axis in held else () for axis in range(len(sizes))]), (), (), (), (), (), ())
