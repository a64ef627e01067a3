"""The program as unique cost items: ops of equal cost, sums of partial results, halo exchanges. Shardings are not
known yet: an item names the op patterns that determine them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from toast_cli.dimensions.model import FactorKind
from toast_cli.plan.loops import LEAF, Accumulation, DeferredReduction, PathUse, left_open, partial_carry
from toast_cli.plan.partials import Cuts, Partial, cut_by_readers, in_steps, in_turn, partial_of, reductions_of
from toast_cli.plan.problem import Problem
from toast_cli.plan.reshard import WindowRead, read_of, windowed
from toast_cli.plan.sharding import OpSharding
from toast_cli.price.arrays import NO_REGION, ArrayItem, array_items
from toast_cli.price.compilation import Compilation, compile_program
from toast_cli.price.compiled_collectives import combined_shares, reductions_each
from toast_cli.price.convolutions import packs_result
from toast_cli.price.kernel import Kernel, KernelSide, Rows, arithmetic
from toast_cli.price.liveness import Lives
from toast_cli.price.profile import CompilerProfile
from toast_cli.program.model import HandWritten, Op, Program, Window
from toast_cli.program.ops import ARGUMENT, CARRY, OpKind
from toast_cli.program.values import Steps, Sum, SumStep, is_transfer, loop_at, readers, trips_at

# Factors whose splitting makes an op communicate.
_COMMUNICATE = frozenset({FactorKind.REDUCTION, FactorKind.PERMUTATION})


class WorkSide(NamedTuple):
    """Work of a kernel on one operand or result of its op, in bytes of whole arrays.

    Attributes:
        read: of a result, by the epilogue of a contraction. through: bytes that pass through the vector unit, or are
            written. flops: elementwise. passing, staying, beside, widest, fetched: see `KernelSide`.
        packed: part of `through` that counts though it stays on the chip, see `PixelProducts`. rows: arrays whose rows
            run along given dimensions -> their part of these bytes.
    """

    read: float = 0.0
    through: float = 0.0
    flops: float = 0.0
    passing: float = 0.0
    staying: float = 0.0
    beside: float = 0.0
    widest: float = 0.0
    fetched: float = 0.0
    packed: float = 0.0
    rows: tuple[tuple[Rows, float], ...] = ()


NOTHING = WorkSide()


@dataclass(frozen=True, slots=True)
class WorkItem:
    """Ops of one pattern and equal cost, with the kernel each belongs to. Bytes and FLOPs are those of whole arrays.

    Attributes:
        pattern, kind, dtype: of the ops. flops: of one op itself; 0 where another op's kernel does its work.
        operands, results: the kernel's work on each.
        kernels: 1, or 0 where the op is fused into another op's kernel or scheduled with one.
        unfinished: bytes of a contraction that elementwise work finishes before it is written.
        whole_bytes: [results] stored or not; 0 for those in `one_device.not_reduced`.
        summed: a `SumItem` accounts for partial results. carried: they are added to a loop's carry, where they stay
            partial.
        needed: [results] fraction of the bits that readers need, see `Narrowing`.
        late: nothing waits for the results, see `early_values`. in_loop: the ops are in a loop.
        region: the op's number if it is a manual region, priced by `manual_regions`; else -1.
        kernel: the work of a hand-written kernel.
        share: see `SumItem`.
        runs: executions in one run of the program, of all ops of the item together. ops: their numbers. op: the first.
    """

    pattern: int
    kind: OpKind
    dtype: str
    flops: float
    operands: tuple[WorkSide, ...]
    results: tuple[WorkSide, ...]
    kernels: int
    unfinished: float
    whole_bytes: tuple[int, ...]
    summed: bool
    carried: bool
    needed: tuple[float, ...]
    late: bool
    in_loop: bool
    region: int
    kernel: HandWritten | None
    share: float
    runs: float
    op: int
    ops: tuple[int, ...]


@dataclass(frozen=True)
class Items:
    work: tuple[WorkItem, ...]
    sums: tuple[SumItem, ...]
    neighbours: tuple[NeighbourItem, ...]
    arrays: tuple[ArrayItem, ...]
    compilation: Compilation

    @property
    def lives(self) -> Lives:
        return self.compilation.lives

    @property
    def stored(self) -> list[bool]:
        return self.compilation.stored


def make_items(problem: Problem, profile: CompilerProfile) -> Items:
    """The items of a problem."""
    compilation = compile_program(problem.program, problem.free, problem.mesh.chip, profile)
    shares = reduction_shares(problem, compilation)
    work, sums = work_items(problem, compilation, shares), sum_items(problem, compilation, shares)
    return Items(work, sums, neighbour_items(problem), array_items(problem, compilation), compilation)


def _type_of(program: Program, op: Op) -> str:
    """The element type that an op computes in; for a hand-written kernel, the type of its largest operand."""
    if op.kind.matrix_unit:
        return program.multiplied_type(op)
    if not op.operands:
        return ""
    arrays = [program.values[value] for value in op.operands]
    return (arrays[0] if op.kernel is None else max(arrays, key=lambda array: array.bytes)).dtype


def work_items(problem: Problem, compilation: Compilation, shares: list[float]) -> tuple[WorkItem, ...]:
    """Items of ops that have a kernel or may communicate. shares: [ops] see `combined_shares`."""
    program, late, needs, profile = problem.program, compilation.late, compilation.needs, compilation.profile
    sizes, unreduced = [value.bytes for value in program.values], problem.not_reduced
    carried = _carried_terms(problem, profile)
    members: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number, op in enumerate(program.ops):
        if not op.results or op.name in (ARGUMENT, CARRY):
            continue
        kernel, pattern = compilation.kernels[number], problem.patterns[problem.op_pattern[number]]
        region = NO_REGION if op.region is None else number
        is_priced = kernel is not None or region != NO_REGION or pattern.result_pins or op.one_device
        if not is_priced and not _COMMUNICATE.intersection(pattern.form.kinds):
            continue
        key = (
            problem.op_pattern[number],
            op.kind,
            _type_of(program, op),
            *_work(problem, op, kernel, profile),
            tuple(0 if v in unreduced else sizes[v] for v in op.results),
            number in problem.terms,
            number in carried,
            tuple(needs.of_value(v) for v in op.results),
            all(late[v] for v in op.results),
            op.loop >= 0,
            region,
            op.kernel,
            op.one_device,
            is_transfer(op),
        )
        members[key].append(number)
    items = []
    for key, ops in members.items():
        runs = sum([program.ops[n].trips for n in ops])
        share = sum([program.ops[n].trips * shares[n] for n in ops]) / runs if runs else 1.0
        items.append(WorkItem(*key[:-2], share=share, runs=runs, op=ops[0], ops=tuple(ops)))
    return tuple(items)


def _carried_terms(problem: Problem, profile: CompilerProfile) -> set[int]:
    """Ops whose results a loop adds to its carry and reduces after the loop."""
    ends = {end for accumulation in problem.accumulations for end in accumulation.ends}
    return {
        term
        for summed in problem.sums
        if summed.end in ends or reductions_each(problem.program, summed.end, profile) < 1.0
        for term in summed.terms
    }


def _work(
    problem: Problem, op: Op, kernel: Kernel | None, profile: CompilerProfile
) -> tuple[float, tuple[WorkSide, ...], tuple[WorkSide, ...], int, float]:
    """The part of a work item that follows from the op's kernel: flops, sides, kernels, unfinished."""
    if kernel is None:
        return 0.0, (NOTHING,) * len(op.operands), (NOTHING,) * len(op.results), 0, 0.0
    values, attained = problem.program.values, profile.attained
    # Operands of a contraction go to the matrix unit, not through the vector unit.
    pass_bytes = 0.0 if op.kind.matrix_unit else attained.pass_bytes
    operands = [
        _work_side(side, values[v].shape, side.bytes, side.largest * pass_bytes)
        for side, v in zip(kernel.operands, op.operands, strict=True)
    ]
    packs, results = packs_result(op, profile), []
    for side, v in zip(kernel.results, op.results, strict=True):
        narrow = side.bytes < 4 * side.elements
        written = side.bytes * (attained.narrow_write if narrow else 1.0)
        packed = profile.packed_part * written if packs and narrow else 0.0
        results.append(_work_side(side, values[v].shape, side.read, written, packed))
    flops, kernels = arithmetic(problem.program, op, profile), 0 if kernel.rides else 1
    return flops, tuple(operands), tuple(results), kernels, float(kernel.unfinished)


def _work_side(side: KernelSide, shape: tuple[int, ...], read: int, through: float, packed: float = 0.0) -> WorkSide:
    return WorkSide(
        float(read), through, side.flops, float(side.passing), side.staying, side.beside, float(side.widest),
        float(side.fetched), packed, _parts_of_rows(side, shape),
    )  # fmt: skip


def _parts_of_rows(side: KernelSide, shape: tuple[int, ...]) -> tuple[tuple[Rows, float], ...]:
    """Arrays of a side and their part of its bytes, but those whose dimensions are in another order than in the side's
    own shape: its sharding says nothing of their rows."""
    every = side.bytes + side.read or sum(side.rows.values())  # a merged reduction reads nothing itself
    return tuple(
        (array, size / every)
        for array, size in side.rows.items()
        if size and (array[0] == shape or sorted(array[0]) != sorted(shape))
    )


# ---------------------------------------------------------------- sums
# The program's sums of partial results as cost items; equal sums form one item. `plan.partials` says how a sum is
# reduced under a plan. Sums are why Megatron needs two all-reduces a block and direction and not five.


@dataclass(frozen=True, slots=True)
class Term:
    """A term of a sum. bytes: of the whole result. alone: it may be reduce-scattered in steps where it is reduced by
    itself."""

    pattern: int
    bytes: int
    alone: bool


@dataclass(frozen=True, slots=True)
class Carried:
    """A loop-carried sum by op patterns, see `plan.loops.Accumulation`. sums: those that each trip adds to it,
    with their terms that inner loops carry, see `SumItem`. first: (pattern, operand position) of the reader of each."""

    carry: int
    path: tuple[PathUse, ...]
    first: tuple[tuple[int, int], ...]
    sums: tuple[tuple[Steps, tuple[Carried, ...]], ...]

    def left(self, lowered: Mapping[int, OpSharding]) -> tuple[DeferredReduction, ...]:
        """The deferred reduction of each sum; empty if none is deferred."""
        path = [
            (lowered[use.op].operands[use.position], None if use.maker == LEAF else lowered[use.maker])
            for use in self.path
        ]
        sums = [(steps, op_sharding_finder(within, lowered)) for steps, within in self.sums]
        first = [lowered[pattern].operands[k] for pattern, k in self.first]
        return left_open(sums, path, first, lowered[self.carry].shardings[0])

    @property
    def patterns(self) -> frozenset[int]:
        inner = frozenset[int]().union(*(carried.patterns for _, within in self.sums for carried in within))
        steps = [step.op for steps, _ in self.sums for step in steps if step.op >= 0]
        return inner.union([self.carry, *(use.op for use in self.path), *steps])


def op_sharding_finder(within: tuple[Carried, ...], lowered: Mapping[int, OpSharding]) -> Callable[[int], OpSharding]:
    """A function from the op of a step to its op sharding. The op is a pattern or, below 0, one of `within` (-1 is the
    first)."""
    if not within:
        return lowered.__getitem__
    partial_carries = {
        -1 - place: partial_carry(lowered[carried.carry], carried.left(lowered)) for place, carried in enumerate(within)
    }
    return lambda op: partial_carries[op] if op < 0 else lowered[op]


@dataclass(frozen=True)
class SumItem:
    """Equal sums. steps: see `sums.Sum`, with op patterns or, below 0, loop-carried sums, see `op_sharding_finder`.
    readers: patterns and operand positions of all readers of the sum, or of a view of it. needed: fraction of the bits
    that they need. late: nothing waits for them, see `early_values`. within: its terms that are loop-carried sums.
    into: the loop-carried sum it is added to, and its number there. each: all-reduces in one run, see
    `reductions_each`. share: in the collectives that they become part of, see `combined_shares`, on average.
    runs: of all of them together in one run of the program. ops, end: the terms of one of them, and the value at its
    end."""

    terms: tuple[Term, ...]
    steps: Steps
    readers: tuple[tuple[int, int], ...]
    needed: float
    late: bool
    within: tuple[Carried, ...]
    into: tuple[Carried, int] | None
    each: float
    share: float
    runs: float
    ops: tuple[int, ...]
    end: int

    @cached_property
    def patterns(self) -> frozenset[int]:
        """Patterns that determine its reductions."""
        loops = frozenset[int]().union(*(carried.patterns for carried in (*self.within, *(self.into or ())[:1])))
        steps = (step.op for step in self.steps if step.op >= 0)
        return loops.union([*steps, *(pattern for pattern, _ in self.readers)])

    def left(self, lowered: Mapping[int, OpSharding]) -> DeferredReduction | None:
        """Its deferred reduction in a loop-carried sum; None where it is reduced in each trip."""
        if self.into is None:
            return None
        carried, place = self.into
        deferred = carried.left(lowered)
        return deferred[place] if deferred else None

    @property
    def of_loops(self) -> bool:
        """Whether it is added to a loop-carried sum, or has one as a term."""
        return bool(self.within or self.into)

    @cached_property
    def decisive(self) -> tuple[int, ...]:
        """Patterns other than readers that determine its reductions; for sums of loops all of `patterns`."""
        return tuple(sorted(self.patterns)) if self.of_loops else tuple(dict.fromkeys(step.op for step in self.steps))

    @cached_property
    def term(self) -> tuple[int, ...]:
        """[steps] index in `terms` of the term that a step adds."""
        return tuple(accumulate((step.does == "term" for step in self.steps[:-1]), initial=0))


def sum_items(problem: Problem, compilation: Compilation, shares: list[float]) -> tuple[SumItem, ...]:
    """The program's sums. shares: [ops] see `combined_shares`."""
    program, pattern, late = problem.program, problem.op_pattern, compilation.late
    alike: dict[tuple[Any, ...], list[Sum]] = defaultdict(list)
    loops = _Loops(problem)
    for summed in problem.sums:
        numbers = summed.terms
        first = numbers[0]
        steps, within = loops.seen(summed)
        ops, patterns = [program.ops[n] for n in numbers], [step.op for step in steps if step.does == "term"]
        terms = tuple(
            Term(number, program.values[op.results[0]].bytes, in_steps(op))
            for op, number in zip(ops, patterns, strict=True)
        )
        read = tuple(sorted({(pattern[op], k) for op, k in readers(program, summed.end)}))
        result = program.ops[first].results[0]
        each = reductions_each(program, summed.end, compilation.profile) if loop_at(program, first, 0) >= 0 else 1.0
        key = (
            terms,
            steps,
            read,
            compilation.needs.of_value(summed.end),
            late[result],
            within,
            loops.adding(summed),
            each,
        )
        alike[key].append(summed)
    items = []
    for key, sums in alike.items():
        trips = [trips_at(program, summed.terms[0], 0) for summed in sums]
        runs = sum(trips)
        combined = sum([n * shares[max(summed.terms)] for n, summed in zip(trips, sums, strict=True)])
        share = combined / runs if runs else 1.0
        items.append(SumItem(*key, share=share, runs=runs, ops=sums[0].terms, end=sums[0].end))
    return tuple(items)


class _Loops:
    """The loop-carried sums of a problem, by op patterns."""

    def __init__(self, problem: Problem) -> None:
        self._pattern = problem.op_pattern
        self._of_carry = {accumulation.carry: accumulation for accumulation in problem.accumulations}
        self._of_end = {
            end: (accumulation, k) for accumulation in problem.accumulations for k, end in enumerate(accumulation.ends)
        }
        self._sums = {each.end: each for each in problem.sums} if problem.accumulations else {}

    def seen(self, summed: Sum) -> tuple[Steps, tuple[Carried, ...]]:
        """(steps of a sum, its terms that are loop-carried sums)."""
        steps, within = [], []
        for does, op in summed.steps:
            accumulation = self._of_carry.get(op)
            if accumulation is None:
                steps.append(SumStep(does, self._pattern[op]))
            else:
                within.append(self._carried(accumulation))
                steps.append(SumStep(does, -len(within)))
        return tuple(steps), tuple(within)

    def adding(self, summed: Sum) -> tuple[Carried, int] | None:
        """(the loop-carried sum that a sum is added to, its number there), or None."""
        if summed.end not in self._of_end:
            return None
        accumulation, place = self._of_end[summed.end]
        return self._carried(accumulation), place

    def _carried(self, accumulation: Accumulation) -> Carried:
        of = self._pattern
        path = tuple(
            [
                PathUse(of[use.op], use.position, LEAF if use.maker == LEAF else of[use.maker])
                for use in accumulation.path
            ]
        )
        sums = tuple([self.seen(self._sums[end]) for end in accumulation.ends])
        first = tuple([(self._pattern[op], k) for op, k in accumulation.first])
        return Carried(self._pattern[accumulation.carry], path, first, sums)


def reduced(item: SumItem, lowered: Mapping[int, OpSharding]) -> Iterator[Reduced]:
    """The reductions of a sum."""
    op_sharding_of = op_sharding_finder(item.within, lowered)
    left = item.left(lowered)
    if left is not None:
        if left.scattered is not None:
            yield Reduced(0, left.scattered, len(item.terms), (), op_sharding_of(item.steps[0].op))
        return
    for part in reductions_of(item.steps, op_sharding_of):
        cut = (*part.cut_before, *part.cut)
        if part.ends_sum and part.partial.reduced:
            wanted = [lowered[pattern].operands[position] for pattern, position in item.readers]
            cut = (*cut, *cut_by_readers(part.partial.reduced, wanted, part.partial.to))
        first = op_sharding_of(item.steps[part.first].op)
        yield Reduced(item.term[part.first], partial_of(first), part.terms, in_turn(cut), first, part.separate)


@dataclass(frozen=True, slots=True)
class Reduced:
    """Terms that one reduction completes. place: of the first in `SumItem.terms`. partial: its partial value, None
    where it is complete. count: of terms. cut: axes by which uses split it. op_sharding: of the first. separate: see
    `Reduction.separate`."""

    place: int
    partial: Partial | None
    count: int
    cut: Cuts
    op_sharding: OpSharding
    separate: bool = False


# ---------------------------------------------------------------- halo exchanges
# Halo exchanges as cost items: equal arrays that are read through windows form one item, and all ops that read an
# array share its exchange.

NeighbourReader = tuple[int, tuple[Window, ...]]  # pattern and windows of an op


@dataclass(frozen=True, slots=True)
class NeighbourItem:
    """Arrays of equal size that ops in one loop read through windows. bytes: of one array. readers: distinct ones.
    runs: reads of all these arrays in one run of the program, one reader each. op, value: one reader, and what it
    reads."""

    bytes: int
    readers: tuple[NeighbourReader, ...]
    runs: float
    op: int
    value: int

    @property
    def patterns(self) -> frozenset[int]:
        """Patterns that determine what is exchanged."""
        return frozenset([pattern for pattern, _ in self.readers])

    def reads(self, lowered: Mapping[int, OpSharding]) -> list[WindowRead]:
        """[readers] how each reads the array. lowered: pattern -> its op sharding."""
        return [read_of(windows, lowered[pattern]) for pattern, windows in self.readers]


def neighbour_items(problem: Problem) -> tuple[NeighbourItem, ...]:
    """All arrays of the program that are read through windows."""
    program, pattern = problem.program, problem.op_pattern
    runs: dict[tuple[int, tuple[NeighbourReader, ...]], float] = defaultdict(float)
    example: dict[tuple[int, tuple[NeighbourReader, ...]], tuple[int, int]] = {}
    for value, array in enumerate(program.values):
        for _, windowed_ops in windowed(program, value):
            ops = [program.ops[number] for number in windowed_ops]
            unlike = dict.fromkeys((pattern[n], op.windows) for n, op in zip(windowed_ops, ops, strict=True))
            key = array.bytes, tuple(unlike)
            runs[key] += max(op.trips for op in ops)
            example.setdefault(key, (windowed_ops[0], value))
    return tuple(NeighbourItem(*key, count, *example[key]) for key, count in runs.items())


# ---------------------------------------------------------------- shares of combined reductions
# The share of each reduction in the collective that XLA combines it into.


def reduction_shares(problem: Problem, compilation: Compilation) -> list[float]:
    """[ops] see `combined_shares`. A sum is reduced as its last term."""
    program, late = problem.program, compilation.late
    earlier = {term for summed in problem.sums for term in summed.terms if term != max(summed.terms)}
    groups = [
        frozenset([g for g, kind in zip(p.groups, p.form.kinds, strict=True) if kind is FactorKind.REDUCTION])
        for p in problem.patterns
    ]
    over: list[tuple[frozenset[int], str, str] | None] = [None] * len(program.ops)
    for number, (op, pattern) in enumerate(zip(program.ops, problem.op_pattern, strict=True)):
        if groups[pattern] and op.results and number not in earlier:
            how = "add" if op.kind.matrix_unit else op.detail
            over[number] = groups[pattern], how, program.values[op.results[0]].dtype
    return combined_shares(
        program, over, [all(late[value] for value in op.results) for op in program.ops], compilation.profile
    )
