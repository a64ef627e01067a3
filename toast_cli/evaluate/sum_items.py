"""The program's sums of partial results as cost items; equal sums form one item. `plan.partials` says how a sum is
reduced under a plan. Sums are why Megatron needs two all-reduces a block and direction and not five.

In: a `Problem`. Out: `SumItem`s, and for one of them and a plan, its reductions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from toast_cli.compiler.collectives import Narrowing, reductions_each
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.plan.accumulation import LEAF, Accumulation, DeferredReduction, PathUse, left_open, partial_carry
from toast_cli.plan.op_sharding import OpSharding
from toast_cli.plan.partials import Cuts, Partial, cut_by_readers, in_steps, in_turn, partial_of, reductions_of
from toast_cli.plan.problem import Problem
from toast_cli.program.regions import loop_at, trips_at
from toast_cli.program.sums import Steps, Sum, SumStep, readers


@dataclass(frozen=True, slots=True)
class Term:
    """A term of a sum. bytes: of the whole result. alone: it may be reduce-scattered in steps where it is reduced by
    itself."""

    pattern: int
    bytes: int
    alone: bool


@dataclass(frozen=True, slots=True)
class Carried:
    """A loop-carried sum by op patterns, see `plan.accumulation.Accumulation`. sums: those that each trip adds to it,
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
        inner = frozenset[int]().union(*(one.patterns for _, within in self.sums for one in within))
        steps = [step.op for steps, _ in self.sums for step in steps if step.op >= 0]
        return inner.union([self.carry, *(use.op for use in self.path), *steps])


def op_sharding_finder(within: tuple[Carried, ...], lowered: Mapping[int, OpSharding]) -> Callable[[int], OpSharding]:
    """A function from the op of a step to its op sharding. The op is a pattern or, below 0, one of `within` (-1 is the
    first)."""
    if not within:
        return lowered.__getitem__
    found = {-1 - place: partial_carry(lowered[one.carry], one.left(lowered)) for place, one in enumerate(within)}
    return lambda op: found[op] if op < 0 else lowered[op]


@dataclass(frozen=True)
class SumItem:
    """Equal sums. steps: see `sums.Sum`, with op patterns or, below 0, loop-carried sums, see `op_sharding_finder`.
    readers: patterns and operand positions of all readers of the sum, or of a view of it. needed: fraction of the bits
    that they need. late: nothing waits for them, see `early_values`. in_loop: within a loop. within: its terms that are
    loop-carried sums. into: the loop-carried sum it is added to, and its number there. each: all-reduces in one run,
    see `reductions_each`. share: in the collectives that they become part of, see `combined_shares`, on average.
    runs: of all of them together in one run of the program. ops, end: the terms of one of them, and the value at its
    end. decisive: patterns other than readers that determine its reductions; for sums of loops all of `patterns`."""

    terms: tuple[Term, ...]
    steps: Steps
    readers: tuple[tuple[int, int], ...]
    needed: float
    late: bool
    in_loop: bool
    within: tuple[Carried, ...]
    into: tuple[Carried, int] | None
    each: float
    share: float
    runs: float
    ops: tuple[int, ...]
    end: int
    decisive: tuple[int, ...]

    @cached_property
    def patterns(self) -> frozenset[int]:
        """Patterns that determine its reductions."""
        loops = frozenset[int]().union(*(one.patterns for one in (*self.within, *(self.into or ())[:1])))
        steps = (step.op for step in self.steps if step.op >= 0)
        return loops.union([*steps, *(pattern for pattern, _ in self.readers)])

    def left(self, lowered: Mapping[int, OpSharding]) -> DeferredReduction | None:
        """Its deferred reduction in a loop-carried sum; None where it is reduced in each trip."""
        if self.into is None:
            return None
        carried, place = self.into
        found = carried.left(lowered)
        return found[place] if found else None

    @property
    def of_loops(self) -> bool:
        """Whether it is added to a loop-carried sum, or has one as a term."""
        return bool(self.within or self.into)

    @cached_property
    def term(self) -> tuple[int, ...]:
        """[steps] index in `terms` of the term that a step adds."""
        return tuple(accumulate((step.does == "term" for step in self.steps[:-1]), initial=0))


_Alike = tuple[
    tuple[Term, ...],
    Steps,
    tuple[tuple[int, int], ...],
    float,
    bool,
    bool,
    tuple[Carried, ...],
    tuple[Carried, int] | None,
    float,
]


def sum_items(
    problem: Problem, late: list[bool], needs: Narrowing, profile: CompilerProfile, shares: list[float]
) -> tuple[SumItem, ...]:
    """The program's sums; late: [values]. shares: [ops] see `combined_shares`."""
    program, pattern = problem.program, problem.op_pattern
    runs: dict[_Alike, float] = defaultdict(float)
    combined: dict[_Alike, float] = defaultdict(float)
    example: dict[_Alike, tuple[tuple[int, ...], int]] = {}
    loops = _Loops(problem)
    for found in problem.sums:
        numbers = found.terms
        first = numbers[0]
        steps, within = loops.seen(found)
        terms = tuple([_term(problem, number, step.op) for number, step in zip(numbers, _terms(steps), strict=True)])
        read = tuple(sorted({(pattern[op], k) for op, k in readers(program, found.end)}))
        result, in_loop = program.ops[first].results[0], loop_at(program, first, 0) >= 0
        each = reductions_each(program, found.end, profile) if in_loop else 1.0
        key = (terms, steps, read, needs.of_value(found.end), late[result], in_loop, within, loops.adding(found), each)
        trips = trips_at(program, first, 0)
        runs[key] += trips
        combined[key] += trips * shares[max(numbers)]
        example.setdefault(key, (numbers, found.end))
    made = (
        SumItem(*key, combined[key] / count if count else 1.0, count, *example[key], _decisive(key[1]))
        for key, count in runs.items()
    )
    return tuple(replace(item, decisive=tuple(sorted(item.patterns))) if item.of_loops else item for item in made)


def _decisive(steps: Steps) -> tuple[int, ...]:
    return tuple(dict.fromkeys([step.op for step in steps]))


class _Loops:
    """The loop-carried sums of a problem, by op patterns."""

    def __init__(self, problem: Problem) -> None:
        self._pattern = problem.op_pattern
        self._of_carry = {one.carry: one for one in problem.accumulations}
        self._of_end = {end: (one, k) for one in problem.accumulations for k, end in enumerate(one.ends)}
        self._sums = {each.end: each for each in problem.sums} if problem.accumulations else {}

    def seen(self, found: Sum) -> tuple[Steps, tuple[Carried, ...]]:
        """(steps of a sum, its terms that are loop-carried sums)."""
        steps, within = [], []
        for does, op in found.steps:
            one = self._of_carry.get(op)
            if one is None:
                steps.append(SumStep(does, self._pattern[op]))
            else:
                within.append(self._carried(one))
                steps.append(SumStep(does, -len(within)))
        return tuple(steps), tuple(within)

    def adding(self, found: Sum) -> tuple[Carried, int] | None:
        """(the loop-carried sum that a sum is added to, its number there), or None."""
        if found.end not in self._of_end:
            return None
        one, place = self._of_end[found.end]
        return self._carried(one), place

    def _carried(self, one: Accumulation) -> Carried:
        of = self._pattern
        path = tuple(
            [PathUse(of[use.op], use.position, LEAF if use.maker == LEAF else of[use.maker]) for use in one.path]
        )
        sums = tuple([self.seen(self._sums[end]) for end in one.ends])
        first = tuple([(self._pattern[op], k) for op, k in one.first])
        return Carried(self._pattern[one.carry], path, first, sums)


def _terms(steps: Steps) -> list[SumStep]:
    return [step for step in steps if step.does == "term"]


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
        if part.whole and part.partial.reduced:
            wanted = [lowered[pattern].cut(position) for pattern, position in item.readers]
            cut = (*cut, *cut_by_readers(part.partial.reduced, wanted, part.partial.to))
        first = op_sharding_of(item.steps[part.first].op)
        yield Reduced(item.term[part.first], partial_of(first), part.terms, in_turn(cut), first, part.apart)


@dataclass(frozen=True, slots=True)
class Reduced:
    """Terms that one reduction completes. place: of the first in `SumItem.terms`. partial: its partial value, None
    where it is complete. count: of terms. cut: axes by which uses split it. op_sharding: of the first. apart: see
    `Reduction.apart`."""

    place: int
    partial: Partial | None
    count: int
    cut: Cuts
    op_sharding: OpSharding
    apart: bool = False


def _term(problem: Problem, number: int, step: int) -> Term:
    op = problem.program.ops[number]
    return Term(step, problem.program.values[op.results[0]].bytes, in_steps(op))
