"""What follows for values from the program alone, before any plan: the loops and branches in which they are read, sums
of several terms, values that are rematerialised, and arrays in host memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, Literal, NamedTuple, TypeVar

from toast_cli.program.model import Op, Program, Rule, once
from toast_cli.program.ops import (
    ADD,
    ARGUMENT,
    BARRIER,
    BROADCAST_IN_DIM,
    CARRY,
    CONVERT,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    JOIN,
    REDUCE,
    RESHAPE,
    SCATTER,
    SLICE,
    TRANSPOSE,
)

# ---------------------------------------------------------------- loops and branches
# Locates reads of arrays in loops and branches, and counts them: readers in one region share copies of an array.

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
    reader = program.ops[op]
    starts = reader.name == CARRY and position == 0
    return reader.trips / max(1, program.loops[reader.loop].trips) if starts else reader.trips


def loop_at(program: Program, op: int, position: int) -> int:
    """The loop in which operand `position` of an op is read, -1 outside loops."""
    reader = program.ops[op]
    return program.loops[reader.loop].parent if reader.name == CARRY and position == 0 else reader.loop


def branches_at(program: Program, op: int, position: int) -> tuple[int, ...]:
    """The branches around where operand `position` of an op is read, within its loop, outermost first."""
    reader = program.ops[op]
    if reader.name == JOIN:
        return (*reader.branches[:-1], reader.branches[-1] + position)
    return () if reader.name == CARRY and position == 1 else reader.branches


@once
def all_readings(program: Program) -> list[list[Reading]]:
    """[values][uses] the reading of each use of each value."""
    return [readings(program, value, uses) for value, uses in enumerate(program.users)]


def readings(program: Program, value: int, uses: Sequence[Use]) -> list[Reading]:
    """[uses] the reading of each of a value's uses, in program order.

    Uses in one block, or in branches within it, share the region of the first of them. Sibling branches share nothing.
    """
    is_vector = sum([size > 1 for size in program.values[value].shape]) < 2
    made_in, reads = program.ops[program.producer[value]].loop, list[Reading]()
    for use in uses:
        reader = program.ops[use[0]]
        if reader.loop == made_in and not reader.branches and reader.name not in (CARRY, JOIN):
            reads.append(_read_where_defined(made_in, reader.trips))
            continue
        loop, branches = loop_at(program, *use), branches_at(program, *use)
        earlier = (r.inside.region for r in reads if r.inside.region.loop == loop)
        region = next((r for r in earlier if branches[: len(r.branches)] == r.branches), Region(loop, branches))
        inside = Stop(region, trips_at(program, *use))
        ahead = _ahead(program, value, Region(loop, branches))
        takes_pieces = reader.name == DYNAMIC_SLICE
        reads.append(Reading(inside, ahead or inside, None if ahead is None else takes_pieces or is_vector))
    return reads


@lru_cache(maxsize=4096)
def _read_where_defined(loop: int, trips: float) -> Reading:
    """The reading of an array in the loop that makes it, outside branches."""
    stop = Stop(Region(loop), trips)
    return Reading(stop, stop, None)


def _ahead(program: Program, value: int, read: Region) -> Stop | None:
    """Where a value that is read in `read` is made, if only loops, at least one, are in between; else None."""
    origin = _origin(program, value, read.loop)
    if read.loop == origin.region.loop:
        return None
    loop, branches = read
    while loop not in (origin.region.loop, -1) and not branches:
        loop, branches = program.loops[loop].parent, program.ops[program.loops[loop].first].branches
    return origin if (loop, branches) == origin.region else None


def _origin(program: Program, value: int, loop: int) -> Stop:
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


# ---------------------------------------------------------------- sums
# Sums: trees of additions whose intermediate values have no other readers.
#
# The gradient of a block's input is such a sum, with a term for each projection that read it; so is the gradient of a
# weight that is used several times. The possible terms and the order of additions follow from the program alone;
# `plan.partials` says which of them a plan leaves partial.

# Kind of a step: pushes a term, applies a view to the last entry, or adds the last two entries. "into" adds as well, if
# one of the two is scattered into the other (see `scatters_into`).
Does = Literal["term", "view", "add", "into"]


class SumStep(NamedTuple):
    """A step of a sum. op: number of the op in the program, or of its pattern."""

    does: Does
    op: int


Steps = tuple[SumStep, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum. steps: in reverse Polish notation, with op numbers. end: the value of the sum."""

    steps: Steps
    end: int

    @property
    def terms(self) -> tuple[int, ...]:
        return tuple([step.op for step in self.steps if step.does == "term"])


def find_sums(program: Program, can_be_term: Sequence[bool]) -> list[Sum]:
    """Every maximal sum of results of such ops, including single terms.

    Args:
        can_be_term: [ops] whether an op sums over a dimension that may be split, and its result may stay partial.
    """
    written: dict[int, list[SumStep]] = {}  # value -> steps of its sum
    for number, op in enumerate(program.ops):
        if len(op.results) != 1:
            continue
        if can_be_term[number]:
            written[op.results[0]] = [SumStep("term", number)]
        elif op.operands and all(v in written and _read_only_here(program, v, op) for v in _read(op)):
            if op.name == ADD:
                fewer, more = sorted((written.pop(v) for v in op.operands), key=len)
                more += fewer  # so that long sums take no quadratic time
                more.append(SumStep("into" if scatters_into(op, program) else "add", number))
                written[op.results[0]] = more
            elif is_view(op, program):
                steps = written[op.results[0]] = written.pop(op.operands[0])
                steps.append(SumStep("view", number))
    return [Sum(tuple(steps), end) for end, steps in written.items()]


def adds_up(op: Op) -> bool:
    """Whether an op that combines elements does so by addition."""
    return not op.name.endswith(("reduce", "reduce_window", "scatter")) or op.detail == "add"


def _read_only_here(program: Program, value: int, op: Op) -> bool:
    maker = program.ops[program.producer[value]]
    if maker.name == CARRY:  # a loop's result is a value of the surrounding program
        return len(read_behind(program, value)) == 1 and program.loops[maker.loop].parent == op.loop
    return len(program.users[value]) == 1 and maker.loop == op.loop


def read_behind(program: Program, carried: int) -> list[tuple[int, int]]:
    """Uses of a loop's carry after the loop, which read the loop's result."""
    loop = program.loops[program.ops[program.producer[carried]].loop]
    return [use for use in program.users[carried] if not loop.first <= use[0] < loop.last]


def _read(op: Op) -> tuple[int, ...]:
    return op.operands if op.name == ADD else op.operands[:1]


def is_view(op: Op, program: Program) -> bool:
    """Whether an op only changes the shape of its one operand; a sum over dimensions of size 1 does. A conversion does
    not count, since it rounds."""
    if not op.kind.view and (op.name != REDUCE or len(op.results) > 1):
        return False
    return program.values[op.operands[0]].elements == program.values[op.results[0]].elements


def behind_reshapes(program: Program, value: int) -> int:
    """The array of which a value is a reshape, or the value itself."""
    while (maker := program.ops[program.producer[value]]).name == RESHAPE:
        value = maker.operands[0]
    return value


def updated_in_place(program: Program, value: int) -> int:
    """The array in whose buffer a value can be written by the ops that update that, or the value itself."""
    while True:
        value = behind_reshapes(program, value)
        maker = program.ops[program.producer[value]]
        source = next((operand for result, operand in maker.in_place if maker.results[result] == value), -1)
        if source < 0 or maker.name == CARRY:
            return value
        value = maker.operands[source]


def scatters_into(op: Op, program: Program) -> bool:
    """Whether the op is an addition with exactly one operand that is a scatter into an array made from constants.

    XLA simplifies `a + scatter(zeros, updates)` to `scatter(a, updates)` before it partitions, unless a constraint is
    in between, as after every scatter with a partial result (see
    `emit.annotations.scattered_terms`): such sums are all-reduced once, like any others. If both operands are
    reduce-scattered, XLA adds the shards first where it sees that they are the same: not over several axes (products
    are scattered in two steps and look-ups over all at once, see `plan.partials.completed`), not where the array is
    also split otherwise (the shards' offsets are computed in different ways), and not where an operand is transposed in
    between, as for the gradient of a table in `x @ table.T`.
    """
    return op.name == ADD and sum(_starts_anew(program.ops[program.producer[v]], program) for v in op.operands) == 1


def _starts_anew(op: Op, program: Program) -> bool:
    if op.name != SCATTER:
        return False
    base = program.ops[program.producer[op.operands[0]]]
    return base.kind.source or expands_scalar(base, program)


def readers(program: Program, value: int) -> list[tuple[int, int]]:
    """Uses of a value, looking through a view or conversion that is its only reader; for a loop's carry, the uses of
    the loop's result."""
    if program.ops[program.producer[value]].name == CARRY:
        return read_behind(program, value)
    while len(uses := program.users[value]) == 1:
        op = program.ops[uses[0][0]]
        if len(op.results) != 1 or not (op.name == CONVERT or is_view(op, program)):
            break
        value = op.results[0]
    return program.users[value]


# ---------------------------------------------------------------- rematerialised for each use
# Values made from constants alone, which Shardy recomputes for each of their uses.


@once
def remade_values(program: Program) -> tuple[bool, ...]:
    """[values] True where every use gets a copy of its own."""
    remade = [False] * len(program.values)
    for op in program.ops:
        preserved = op.kind.rematerialised and all(remade[v] for v in op.operands)
        if op.kind.source or preserved or expands_scalar(op, program):
            for value in op.results:
                remade[value] = True
    return tuple(remade)


def expands_scalar(op: Op, program: Program) -> bool:
    """Whether an op is a broadcast of a scalar, constant or not."""
    return op.name == BROADCAST_IN_DIM and not program.values[op.operands[0]].shape


def with_unsharded_sums(program: Program) -> Program:
    """The program in which ops that sum over dimensions of such values alone need these unsharded. Their operands adapt
    to any sharding, so nothing would propagate a split to them, and each device can compute them itself."""
    remade = remade_values(program)
    ops = list(program.ops)
    for number, op in enumerate(ops):
        if op.rule.reduction and any(remade[value] for value in op.operands):
            dims = [
                d for value, dims in zip(op.operands, op.rule.operands, strict=True) if not remade[value] for d in dims
            ]
            alone = op.rule.reduction.difference(*dims)
            if alone:
                ops[number] = replace(op, rule=_unsharded_along(op.rule, alone))
    return replace(program, ops=tuple(ops))


@lru_cache(maxsize=4096)
def _unsharded_along(rule: Rule, factors: frozenset[int]) -> Rule:
    return replace(rule, need_replication=rule.need_replication | factors, reduction=rule.reduction - factors)


# ---------------------------------------------------------------- recomputed in the backward pass
# Detects rematerialisation: the flops that `jax.checkpoint` recomputes in the backward pass.
#
# Every value gets a number, and equal computations on equal operands get the same one (value numbering). An
# optimization barrier and a move to the host's memory or back do not change the number. An array that one loop stacks
# and another loop reads trip by trip is numbered like the stacked array, and so is a layer's slice of stacked weights
# in every loop. An op whose results are numbered already is recomputed, unless it is in the loop of the first and
# without a barrier before it. (Outside loops XLA:TPU merges equal ops without a barrier, `prevent_cse=False`: the
# predicted step has one of them, the predicted memory has both.)

_Place = tuple[int, ...]  # numbers of the manual regions around an op, then of its loop


@once
def recomputed_parts(program: Program) -> tuple[float, ...]:
    """[ops] fraction of each op's flops that repeats an earlier op."""
    return _Numbering().parts(program, (), ())[0]


class _Numbering:
    """The numbers of the values of a program and of the manual regions in it."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._first: dict[Hashable, _Place] = {}  # key of an op -> place of its first computation
        # Number -> (number, type) before reshapes, of the array that a loop stacks, and of a value inside a region.
        self._before: dict[int, tuple[int, str]] = {}
        self._stacked: dict[int, tuple[int, str]] = {}
        self._inside: dict[int, tuple[int, str]] = {}

    def parts(
        self, program: Program, regions: _Place, arguments: Sequence[int]
    ) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """([ops] recomputed fraction, [results] numbers). arguments: numbers of a region's arguments."""
        number = [-1] * len(program.values)
        types = [str(value) for value in program.values]
        behind = [False] * len(program.values)  # a barrier
        for argument, outer in zip(program.arguments, arguments, strict=False):
            number[argument.value] = outer
        parts = [0.0] * len(program.ops)
        for place, op in enumerate(program.ops):
            barrier = op.name == BARRIER or any(behind[v] for v in op.operands)
            if op.name == BARRIER or is_transfer(op):
                result_numbers = tuple(number[v] for v in op.operands)
            elif op.region is not None:
                parts[place], result_numbers = self._region(op, number, types, (*regions, place))
            elif op.name in (ARGUMENT, CARRY):
                results = op.results
                result_numbers = tuple(
                    n if (n := number[v]) >= 0 else self._number(("new", regions, v)) for v in results
                )
            else:
                key = self._key(op, number, types)
                here = (*regions, op.loop)
                again = (
                    barrier or op.loop < 0
                ) and key in self._numbers  # in a loop, keys leave out which slice is read
                if op.flops and (self._first.setdefault(key, here) != here or again):
                    parts[place] = 1.0
                result_numbers = self._results(program, op, key, number, types)
            for value, value_number in zip(op.results, result_numbers, strict=True):
                number[value], behind[value] = value_number, barrier
            if op.name == DYNAMIC_UPDATE_SLICE:
                self._stacked[number[op.operands[0]]] = number[op.operands[1]], types[op.operands[1]]
        return tuple(parts), tuple(number[result.value] for result in program.results)

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _key(self, op: Op, number: Sequence[int], types: Sequence[str]) -> Hashable:
        """The key of an op: equal for ops that compute the same results."""
        operands = tuple(number[v] for v in op.operands)
        results = tuple(types[v] for v in op.results)
        if op.kernel is not None:  # the same kernel has more results when run for the backward pass
            return op.kernel.products, results[:1], operands
        if op.name == DYNAMIC_SLICE and op.loop >= 0:
            operands = operands[:1]  # each trip reads its own slice
        return op.name, op.detail, op.rule, op.windows, results, operands

    def _results(
        self, program: Program, op: Op, key: Hashable, number: Sequence[int], types: Sequence[str]
    ) -> tuple[int, ...]:
        """The numbers of an op's results; marks `key` as computed."""
        self._number(key)
        if op.name == DYNAMIC_SLICE:
            stacked = self._stacked.get(number[op.operands[0]])
            if stacked is not None and stacked[1] == types[op.results[0]]:
                return (stacked[0],)
        if op.name in (RESHAPE, BROADCAST_IN_DIM):
            source, result = op.operands[0], op.results[0]
            if program.values[source].elements == program.values[result].elements:
                base = self._before.get(number[source], (number[source], types[source]))
                if base[1] == types[result]:
                    return (base[0],)
                fresh = self._number((RESHAPE, base[0], types[result]))
                self._before[fresh] = base
                return (fresh,)
        return tuple(self._number((key, k)) for k in range(len(op.results)))

    def _region(
        self, op: Op, number: Sequence[int], types: Sequence[str], regions: _Place
    ) -> tuple[float, tuple[int, ...]]:
        """(recomputed fraction of a manual region's flops, numbers of its results)."""
        assert op.region is not None
        body = op.region.body
        argument_numbers = []
        for argument, value in zip(body.arguments, op.operands, strict=False):
            type_ = str(body.values[argument.value])
            local = self._inside.get(number[value], (-1, ""))
            argument_numbers.append(local[0] if local[1] == type_ else self._number(("in", number[value], type_)))
        parts, results = self.parts(body, regions, argument_numbers)
        again = sum(part * inner.flops * inner.trips for part, inner in zip(parts, body.ops, strict=True))
        result_numbers = []
        for k, value in enumerate(op.results):
            inner = results[k] if k < len(results) else self._number(("new", regions, -1 - k))
            outer = self._number(("out", inner, types[value]))
            if k < len(results):
                self._inside[outer] = inner, str(body.values[body.results[k].value])
            result_numbers.append(outer)
        return (again / body.flops if body.flops else 0.0), tuple(result_numbers)


# ---------------------------------------------------------------- host memory
# Finds the arrays of a program that are in host memory.
#
# These are arguments that the program places there, arrays moved there, and updates, loop carries, slices and views of
# such arrays, until a part is moved to the device. XLA moves nothing else.

# Custom calls; `annotate_device_placement` is read as one of them.
TO_HOST, TO_DEVICE = "MoveToHost", "MoveToDevice"


def is_transfer(op: Op) -> bool:
    """Whether an op moves an array between the memories of host and device."""
    return op.detail in (TO_HOST, TO_DEVICE)


def only_moves(program: Program) -> Program:
    """The program with transfers of an array to the memory that it is in already replaced by identities."""
    host_values = on_host(program)
    ops = tuple(
        replace(op, name=BARRIER, detail="")
        if is_transfer(op) and (op.detail == TO_HOST) == (op.operands[0] in host_values)
        else op
        for op in program.ops
    )
    return replace(program, ops=ops) if ops != program.ops else program


def replacing(program: Program, results: Iterable[int]) -> frozenset[int]:
    """Values that these `toast.result` ops return, directly or through identities."""
    returned: set[int] = set()
    for number in results:
        value = program.ops[number].operands[0]
        returned.add(value)
        while (maker := program.ops[program.producer[value]]).kind.identity:
            value = maker.operands[0]
            returned.add(value)
    return frozenset(returned)


@once
def moved(program: Program) -> frozenset[int]:
    """Values in device memory that are transferred from or to host memory."""
    transfers = [op for op in program.ops if is_transfer(op)]
    return frozenset((op.operands if op.detail == TO_HOST else op.results)[0] for op in transfers)


@once
def on_host(program: Program) -> frozenset[int]:
    """Values in host memory."""
    host_values = {argument.value for argument in program.arguments if argument.on_host}
    host_values |= {op.results[0] for op in program.ops if op.detail == TO_HOST}
    waiting = list(host_values)

    def add(value: int) -> None:
        if value not in host_values:
            host_values.add(value)
            waiting.append(value)

    while waiting:
        value = waiting.pop()
        for number, position in program.users[value]:
            op = program.ops[number]
            if _stays(op, position):
                add(op.results[0])
        maker = program.ops[program.producer[value]]
        # The initial value of an array that a loop updates there is there, too.
        if maker.name == CARRY or maker.kind.updates:
            start = maker.operands[0]
            is_argument = program.ops[program.producer[start]].name == ARGUMENT
            if not is_argument and all(use[0] == program.producer[value] for use in program.users[start]):
                add(start)
    return frozenset(host_values)


@once
def in_transit(program: Program) -> frozenset[int]:
    """Values in host memory that need no memory there: slices that are transferred straight into or from an array."""
    host_values, passing = on_host(program), set[int]()

    def passes(value: int) -> bool:
        users = [(program.ops[number], position) for number, position in program.users[value]]
        return all(
            op.detail == TO_DEVICE
            or (op.name == DYNAMIC_UPDATE_SLICE and position == 1)
            or ((op.kind.view or op.kind.identity) and op.results[0] in passing)
            for op, position in users
        )

    for op in reversed(program.ops):
        sliced = op.name in (DYNAMIC_SLICE, SLICE) or op.kind.view or op.kind.identity or op.detail == TO_HOST
        if sliced and op.results[0] in host_values and passes(op.results[0]):
            passing.add(op.results[0])
    return frozenset(passing)


def _stays(op: Op, position: int) -> bool:
    """Whether an op's result is in host memory if this operand is."""
    if op.name == DYNAMIC_UPDATE_SLICE:
        return position < 2
    if op.name in (DYNAMIC_SLICE, SLICE):
        return position == 0
    return op.name in (CARRY, JOIN) or op.kind.view or op.kind.identity


# ---------------------------------------------------------------- transposes
# Values whose only reader is a transpose.


@dataclass(frozen=True)
class Transposed:
    """The result of a transpose. op, value: numbers of the op and its result. order: [dimensions of the result] the
    operand's dimension.
    """

    op: int
    value: int
    order: tuple[int, ...]


def transposed(program: Program, value: int) -> Transposed | None:
    """The transpose that is the only reader of a value, in the same loop; None if there are other readers."""
    readers = program.users[value]
    if len(readers) != 1:
        return None
    ((number, _),) = readers
    op = program.ops[number]
    if op.name != TRANSPOSE or op.loop != program.ops[program.producer[value]].loop:
        return None
    remaining, order = list(range(len(op.rule.operands[0]))), list[int]()
    for factors in op.rule.results[0]:  # dimensions of size 1 have none, and are all alike
        order.append(remaining.pop([op.rule.operands[0][dim] for dim in remaining].index(factors)))
    return Transposed(number, op.results[0], tuple(order))


# ---------------------------------------------------------------- disjoint sets
# Disjoint sets (union-find).

Member = TypeVar("Member", bound=Hashable)


class DisjointSets(Generic[Member]):
    """Disjoint sets of items, each identified by one of its members, the representative.

    An unknown item is a set of its own.
    """

    def __init__(self) -> None:
        self._parent: dict[Member, Member] = {}

    def find(self, item: Member) -> Member:
        """The representative of the item's set."""
        parent = self._parent
        above = parent.setdefault(item, item)
        while above != item:
            parent[item] = above = parent[above]  # path halving
            item, above = above, parent[above]
        return item

    def union(self, first: Member, second: Member) -> bool:
        """Merges the sets of two items; the representative of the first one's set stays.

        False where they were one set already.
        """
        first, second = self.find(first), self.find(second)
        self._parent[second] = first
        return first != second
