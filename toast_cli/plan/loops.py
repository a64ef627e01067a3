"""Edges of loops: arrays that loops only read are gathered in each trip or once before, and sums that loops accumulate
are reduced in each trip or once after.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from toast_cli.plan.decisions import Plan, Replicate
from toast_cli.plan.partials import Partial
from toast_cli.plan.sharding import OpSharding, Sharding, axes_of, refines, without
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ADD, CARRY, CONVERT, DYNAMIC_SLICE
from toast_cli.program.roles import views
from toast_cli.program.values import Steps, Sum, all_readings, find_sums, read_behind, readings

# ---------------------------------------------------------------- arrays that loops only read
# By default a loop gathers in each trip (see `reshard.steps_ahead` for the exceptions). `Replicate` of the role
# `LOOP_READS` over an axis hoists gathers over that axis out of all loops that only read the array. That saves
# collectives, but the gathered copy is in memory while those loops run.
#
# A loop often reads a view of a weight that it makes itself in each trip: a conversion, or the slice of one layer in a
# loop over layers within one over microbatches. With that decision the whole weight is gathered, and the view is made
# of it.

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
    view_ops: set[int] = set()
    if not program.loops:
        return frozenset()
    origin = views(program, weights)
    for number, op in enumerate(program.ops):
        if op.loop < 0 or not op.operands or op.operands[0] not in origin or op.results[0] not in origin:
            continue
        if program.values[op.results[0]].elements > program.values[op.operands[0]].elements:
            continue  # spread over a batch
        if program.producer[op.operands[0]] in view_ops:
            view_ops.add(number)
            continue
        (read,) = readings(program, op.operands[0], [(number, 0)])
        again = read.inside.runs / (program.loops[op.loop].trips if op.name == DYNAMIC_SLICE else 1)
        if read.whole_ahead is not None and read.ahead.runs < again:
            view_ops.add(number)
    return frozenset(view_ops)


def held_over(roles: Sequence[str], plan: Plan) -> frozenset[int]:
    """Axes over which a plan gathers loop-invariant arrays before the loops."""
    return frozenset(d.axis for d in plan if isinstance(d, Replicate) and roles[d.role] == LOOP_READS)


def edges(sizes: tuple[int, ...], held: Collection[int]) -> OpSharding:
    """The op sharding of `LOOP_EDGES`: one factor per mesh axis, split by that axis if it is in `held`. sizes: of the
    mesh axes."""
    return OpSharding(tuple([(axis,) if axis in held else () for axis in range(len(sizes))]), (), (), (), (), (), ())


# ---------------------------------------------------------------- sums that loops accumulate
# A loop that only adds to a carry (gradients of recurrent weights, of microbatches), may carry partial results: `sum
# of all-reduce(x) = all-reduce(sum of x)`. Each device then accumulates its own terms, and the loop's result is
# partial. The plan decides the sharding of the carry: each trip reduce-scatters over the axes that split it, since a
# device holds only a shard; the reduction over all other axes is deferred until after the loop. `Replicate` of the
# role `ACCUMULATORS` over an axis keeps the carry replicated over it, which takes memory and saves collectives. An
# all-reduce is always deferred: carrying the unreduced value takes no more memory.
#
# The loop's result is then a partial value in the surrounding program, where it may be a term of other sums (see
# `partials`), also of one that an outer loop accumulates.

# The role of loop-carried sums, for `Replicate`.
ACCUMULATORS = "sums of loops"

OperandUse = tuple[int, int]  # op number, operand position
LEAF = -1


@dataclass(frozen=True, slots=True)
class PathUse:
    """Operand `position` of op `op`. maker: the op that produces it, or `LEAF` if it is one of the sums."""

    op: int
    position: int
    maker: int


@dataclass(frozen=True, slots=True)
class Accumulation:
    """A loop-carried sum. carry: op number of the carry. ends: values that each trip adds to it, each the end of a sum.
    path: uses on the path from `ends` to the carry (additions, conversions, views), last first. first: the uses that
    read `ends`, in the order of `ends`.
    """

    carry: int
    ends: tuple[int, ...]
    path: tuple[PathUse, ...]
    first: tuple[OperandUse, ...]


@dataclass(frozen=True, slots=True)
class DeferredReduction:
    """The deferred reduction of a sum that each trip adds to a carry.

    Attributes:
        sharding: at the end of the sum. added_as: sharding in which it is added to the carry, a finer one where each
            trip reduce-scatters it. axes: mesh axes over which it then stays partial.
    """

    sharding: Sharding
    added_as: Sharding
    axes: tuple[int, ...]

    @property
    def scattered(self) -> Partial | None:
        """The reduce-scatter of each trip, from `sharding` to `added_as`; None if there is none."""
        return Partial(self.sharding, self.added_as, ()) if self.sharding != self.added_as else None


def find_accumulations(program: Program, can_be_term: Sequence[bool]) -> tuple[Accumulation, ...]:
    """The loop-carried sums of a program, outer loops first.

    Args:
        can_be_term: [ops] see `sums.find_sums`.
    """
    carries = [number for number, op in enumerate(program.ops) if op.name == CARRY]
    while carries:
        terms = list(can_be_term)
        for number in carries:
            terms[number] = True
        ends = {each.end for each in find_sums(program, terms)}
        sums = [_accumulation(program, number, ends) for number in carries]
        accumulations = [each for each in sums if each is not None]
        if len(accumulations) == len(carries):
            return tuple(accumulations)
        carries = [each.carry for each in accumulations]
    return ()


def _accumulation(program: Program, number: int, sums: set[int]) -> Accumulation | None:
    """The sum accumulated in the carry `number`; None if the loop uses the carry otherwise. sums: ends of sums."""
    carry = program.ops[number]
    (value,) = carry.results
    inside = len(program.users[value]) - len(read_behind(program, value))
    if not program.values[value].shape or inside != 1 or carry.operands[1] == value:
        return None
    ends: list[int] = []
    path: list[PathUse] = []
    first: list[OperandUse] = []
    carries = 0
    waiting: list[tuple[int, OperandUse]] = [(carry.operands[1], (number, 1))]
    while waiting:
        read, use = waiting.pop()
        maker = program.producer[read]
        op = program.ops[maker]
        home = program.loops[op.loop].parent if op.name == CARRY else op.loop  # where its result is available
        if read == value and program.ops[use[0]].name == ADD:
            carries += 1
            path.append(PathUse(*use, number))
        elif _users(program, read) != [use] or home != carry.loop:
            return None
        elif read in sums:
            ends.append(read)
            first.append(use)
            path.append(PathUse(*use, LEAF))
        elif op.name == ADD or _is_followed(op):
            waiting += [(operand, (maker, k)) for k, operand in enumerate(op.operands)]
            path.append(PathUse(*use, maker))
        else:
            return None
    return Accumulation(number, tuple(ends), tuple(path), tuple(first)) if carries == 1 and ends else None


def _is_followed(op: Op) -> bool:
    return len(op.operands) == 1 and (op.name == CONVERT or op.kind.view)


def _users(program: Program, value: int) -> list[OperandUse]:
    """Uses of a value; for a loop's carry, uses of the loop's result."""
    made_by_loop = program.ops[program.producer[value]].name == CARRY
    return read_behind(program, value) if made_by_loop else program.users[value]


def ops_of(accumulations: Iterable[Accumulation]) -> frozenset[int]:
    """Ops that share the sharding of the carries: the carries and the ops on the paths to them."""
    return frozenset(op for each in accumulations for op in (each.carry, *(use.op for use in each.path)))


def left_open(
    sums: Sequence[tuple[Steps, Callable[[int], OpSharding]]],
    path: Iterable[tuple[Sharding, OpSharding | None]],
    first: Iterable[Sharding],
    carried: Sharding,
) -> tuple[DeferredReduction, ...]:
    """The deferred reduction of each sum that a loop adds to a carry; empty if they are not partial alike.

    Args:
        sums: the steps of each, and a function from the op of a step to its op sharding. path: for each use on the
            path, the sharding it requires and the op sharding of the op that produces its operand, None if that is one
            of the sums. first: sharding that the reader of each sum requires. carried: sharding of the carry.
    """
    for wanted, maker in path:
        if maker is not None and (maker.shardings[0] != wanted or axes_of(wanted) != axes_of(carried)):
            return ()
    deferred: list[DeferredReduction] = []
    for (steps, op_sharding_of), added_as in zip(sums, first, strict=True):
        left = _deferred(steps, op_sharding_of, added_as)
        if left is None or axes_of(added_as) != axes_of(carried) or (deferred and left.axes != deferred[0].axes):
            return ()
        deferred.append(left)
    return tuple(deferred)


def _deferred(
    steps: Steps, op_sharding_of: Callable[[int], OpSharding], added_as: Sharding
) -> DeferredReduction | None:
    """The deferred reduction of one sum; None if nothing is deferred, or if a term is resharded or partial
    otherwise."""
    waiting: list[tuple[Sharding, Sharding, frozenset[int]]] = []  # as made; while partial; over axes
    for does, op in steps:
        op_sharding = op_sharding_of(op)
        sharding = op_sharding.shardings[0]
        if does == "term":
            waiting.append(
                (sharding, op_sharding.computed[0], frozenset((*op_sharding.reduced, *op_sharding.scattered[0])))
            )
            continue
        read = [waiting.pop() for _ in range(1 if does == "view" else 2)]
        _, partial, over = read[0]
        seen = without(sharding, over)
        if any(operand[0] != wanted for operand, wanted in zip(read, op_sharding.operands, strict=False)):
            return None
        if any(operand[1:] != (partial, over) for operand in read) or axes_of(seen) != axes_of(partial):
            return None
        waiting.append((sharding, seen, over))
    if len(waiting) != 1:
        return None
    _, partial, over = waiting[0]
    cut = axes_of(added_as).difference(axes_of(partial))
    if not refines(added_as, partial) or not cut <= over:
        return None
    return DeferredReduction(partial, added_as, tuple(sorted(over - cut))) if over - cut else None


def partial_carry(carry: OpSharding, left: tuple[DeferredReduction, ...]) -> OpSharding:
    """The carry as an op of the surrounding program: its result is partial over the deferred axes, if there are any."""
    return replace(carry, reduced=left[0].axes) if left else carry


def left_by_loops(
    sums: Sequence[Sum], accumulations: Sequence[Accumulation], op_shardings: Sequence[OpSharding]
) -> tuple[dict[int, tuple[DeferredReduction, ...]], list[OpSharding]]:
    """(op number of a carry -> deferred reduction of each of its sums, [ops] op shardings with those carries
    partial)."""
    lowered, deferred = list(op_shardings), {}
    steps = {each.end: each.steps for each in sums}
    for accumulation in reversed(accumulations):  # inner loops first
        if not all(end in steps for end in accumulation.ends):
            continue
        added = [(steps[end], lowered.__getitem__) for end in accumulation.ends]
        path = [
            (lowered[use.op].operands[use.position], None if use.maker == LEAF else lowered[use.maker])
            for use in accumulation.path
        ]
        first = [lowered[op].operands[k] for op, k in accumulation.first]
        left = left_open(added, path, first, lowered[accumulation.carry].shardings[0])
        if left:
            deferred[accumulation.carry] = left
            lowered[accumulation.carry] = partial_carry(lowered[accumulation.carry], left)
    return deferred, lowered
