"""Sums that a loop adds up from trip to trip: reduced in each trip, or carried as they are and reduced once behind it.

A loop that adds to what it carries, and does nothing else with it (gradients of recurrent weights, of microbatches),
may carry partial results: `sum of all-reduce(x) = all-reduce(sum of x)`. Each device then adds up what it finds, and
the loop's result is partial. How the loop's carry lies is for the plan to say: axes that split it are scattered over in
each trip, since the carry holds no more than pieces; all others over which the sum is partial are left for behind the
loop. `Replicate` of the role `ACCUMULATORS` over an axis keeps the carry whole over it, which takes memory and saves
collectives. What is all-reduced costs no memory to carry, and is always left.

What the loop results in is then itself a partial value of the program around it: a term of sums there (see
`partials`), also of one that an outer loop adds up.

Enters: a program, for its accumulations; one of them and the iterations of the ops involved, for the axes that are left
open. Leaves: `Accumulation`s, and those axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from toast_cli.plan.iteration import Iteration
from toast_cli.plan.partials import Partial
from toast_cli.plan.sharding import Sharding, axes_of, refines, without
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ADD, CARRY, CONVERT
from toast_cli.program.sums import Steps, Sum, find_sums, read_behind

# The role of what loops add up, for `Replicate`.
ACCUMULATORS = "sums of loops"

OperandUse = tuple[int, int]  # op number, operand position
LEAF = -1


@dataclass(frozen=True, slots=True)
class PathUse:
    """Operand `position` of op `op`, which is what op `maker` makes; or one of the sums, where that is `LEAF`."""

    op: int
    position: int
    maker: int


@dataclass(frozen=True, slots=True)
class Accumulation:
    """carry: op number of the carry. ends: values that each trip adds to it, sums all of them. path: uses on the way
    from those to the carry, the last first: by additions, conversions and views. first: of these uses those that read
    `ends`, in their order.
    """

    carry: int
    ends: tuple[int, ...]
    path: tuple[PathUse, ...]
    first: tuple[OperandUse, ...]


@dataclass(frozen=True, slots=True)
class Left:
    """What a trip leaves of a sum that it adds to a carry.

    Attributes:
        at: how the sum lies at its end. lies: how it lies where the loop takes it over: cut further where a part of it
            is scattered in each trip. axes: over which it then stays partial.
    """

    at: Sharding
    lies: Sharding
    axes: tuple[int, ...]

    @property
    def scattered(self) -> Partial | None:
        """What has to be done in each trip; None where nothing has."""
        return Partial(self.at, self.lies, ()) if self.at != self.lies else None


def find_accumulations(program: Program, can_be_term: Sequence[bool]) -> tuple[Accumulation, ...]:
    """What the loops of a program add up, outer loops first.

    Args:
        can_be_term: [ops] see `sums.find_sums`.
    """
    carries = [number for number, op in enumerate(program.ops) if op.name == CARRY]
    while carries:
        terms = list(can_be_term)
        for number in carries:
            terms[number] = True
        ends = {each.end for each in find_sums(program, terms)}
        found = [one for number in carries if (one := _accumulation(program, number, ends)) is not None]
        if len(found) == len(carries):
            return tuple(found)
        carries = [one.carry for one in found]
    return ()


def _accumulation(program: Program, number: int, sums: set[int]) -> Accumulation | None:
    """What the carry `number` adds up; None where the loop does something else with it. sums: values that are some."""
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
        if read == value and program.ops[use[0]].name == ADD:
            carries += 1
            path.append(PathUse(*use, number))
        elif _users(program, read) != [use] or _home(program, op) != carry.loop:
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
    """Uses of a value; of what a loop carries, of what it results in."""
    made_by_loop = program.ops[program.producer[value]].name == CARRY
    return read_behind(program, value) if made_by_loop else program.users[value]


def _home(program: Program, op: Op) -> int:
    """The loop in which an op's result is to be had, -1 outside loops."""
    return program.loops[op.loop].parent if op.name == CARRY else op.loop


def ops_of(accumulations: Iterable[Accumulation]) -> frozenset[int]:
    """Ops that lie as the carries do: these, and all on the way to them."""
    return frozenset(op for one in accumulations for op in (one.carry, *(use.op for use in one.path)))


def left_open(
    sums: Sequence[tuple[Steps, Callable[[int], Iteration]]],
    path: Iterable[tuple[Sharding, Iteration | None]],
    first: Iterable[Sharding],
    carried: Sharding,
) -> tuple[Left, ...]:
    """What stays partial of the sums that a loop adds to what it carries; nothing where they are not partial alike.

    Args:
        sums: the steps of each, and a function from the op of a step to what it iterates over. path: how each use on it
            wants what it reads, and what the op that makes that iterates over; None where that is one of the sums.
        first: how what reads each sum wants it. carried: how the carry lies.
    """
    for wanted, maker in path:
        if maker is not None and (maker.shardings[0] != wanted or axes_of(wanted) != axes_of(carried)):
            return ()
    found: list[Left] = []
    for (steps, iteration_of), lies in zip(sums, first, strict=True):
        left = _left(steps, iteration_of, lies)
        if left is None or axes_of(lies) != axes_of(carried) or (found and left.axes != found[0].axes):
            return ()
        found.append(left)
    return tuple(found)


def _left(steps: Steps, iteration_of: Callable[[int], Iteration], lies: Sharding) -> Left | None:
    """What is left of one sum; None where its terms are not partial alike, or lie elsewhere than they are read."""
    waiting: list[tuple[Sharding, Sharding, frozenset[int]]] = []  # as made; as partial; over which axes
    for does, op in steps:
        iteration = iteration_of(op)
        made = iteration.shardings[0]
        if does == "term":
            waiting.append((made, iteration.computed[0], frozenset((*iteration.reduced, *iteration.scattered[0]))))
            continue
        read = [waiting.pop() for _ in range(1 if does == "view" else 2)]
        _, at, over = read[0]
        seen = without(made, over)
        if any(one[0] != wanted for one, wanted in zip(read, iteration.operands, strict=False)):
            return None
        if any(one[1:] != (at, over) for one in read) or axes_of(seen) != axes_of(at):
            return None
        waiting.append((made, seen, over))
    if len(waiting) != 1:
        return None
    _, at, over = waiting[0]
    cut = axes_of(lies).difference(axes_of(at))
    if not refines(lies, at) or not cut <= over:
        return None
    return Left(at, lies, tuple(sorted(over - cut))) if over - cut else None


def partial_carry(carry: Iteration, left: tuple[Left, ...]) -> Iteration:
    """The carry as an op of the program around its loop: it leaves a partial result there, if anything is left."""
    return replace(carry, reduced=left[0].axes) if left else carry


def left_by_loops(
    sums: Sequence[Sum], accumulations: Sequence[Accumulation], iterations: Sequence[Iteration]
) -> tuple[dict[int, tuple[Left, ...]], list[Iteration]]:
    """What stays partial: number of a carry -> what is left of each of its sums; and [ops] what each iterates over
    where that is known."""
    made, found = list(iterations), {}
    steps = {each.end: each.steps for each in sums}
    for one in reversed(accumulations):  # a loop within another one comes behind it
        if not all(end in steps for end in one.ends):
            continue
        added = [(steps[end], made.__getitem__) for end in one.ends]
        path = [
            (made[use.op].operands[use.position], None if use.maker == LEAF else made[use.maker]) for use in one.path
        ]
        left = left_open(added, path, [made[op].operands[k] for op, k in one.first], made[one.carry].shardings[0])
        if left:
            found[one.carry] = left
            made[one.carry] = partial_carry(made[one.carry], left)
    return found, made
