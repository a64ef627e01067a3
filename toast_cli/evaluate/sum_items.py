"""The program's sums of partial results as cost items, each for all that look alike. What becomes of one under a plan
is for `plan.partials` to say. Sums are why Megatron needs two all-reduces a block and direction and not five.

Enters: a `Problem`. Leaves: `SumItem`s, and for one of them and a plan, what is reduced together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from toast_cli.compiler.narrowing import Narrowing
from toast_cli.plan.iteration import Iteration
from toast_cli.plan.partials import Reduction, Steps, SumStep, cut_by_readers, one_at_a_time, readers, reductions_of
from toast_cli.plan.problem import Problem


@dataclass(frozen=True, slots=True)
class Term:
    """bytes: of the whole result. alone: whether it is scattered one axis at a time where it is reduced by itself."""

    pattern: int
    bytes: int
    alone: bool


@dataclass(frozen=True, slots=True)
class SumItem:
    """Sums that look alike. steps: see `partials.Sum`, with op patterns. readers: patterns and operand positions of all
    that read the sum, or a view of it. needed: part of the bits of the sum that they need. late: nothing waits for
    them, see `overlap`. in_loop: within a loop. runs: of all of them together in one run of the program. ops: the terms
    of one of them. decisive: patterns that decide what is reduced, but for readers."""

    terms: tuple[Term, ...]
    steps: Steps
    readers: tuple[tuple[int, int], ...]
    needed: float
    late: bool
    in_loop: bool
    runs: float
    ops: tuple[int, ...]
    decisive: tuple[int, ...]

    @property
    def patterns(self) -> frozenset[int]:
        """All that decide what is reduced."""
        return frozenset([*(step.op for step in self.steps), *(pattern for pattern, _ in self.readers)])

    def term(self, place: int) -> int:
        """The place in `terms` of the term that step `place` brings in."""
        return sum([step.does == "term" for step in self.steps[:place]])


_Alike = tuple[tuple[Term, ...], Steps, tuple[tuple[int, int], ...], float, bool, bool]


def sum_items(problem: Problem, late: list[bool], needs: Narrowing) -> tuple[SumItem, ...]:
    """The program's sums; late: [values]."""
    program, pattern = problem.program, problem.op_pattern
    runs: dict[_Alike, float] = defaultdict(float)
    example: dict[_Alike, tuple[int, ...]] = {}
    for found in problem.sums:
        numbers = found.terms
        first = program.ops[numbers[0]]
        terms = tuple([_term(problem, number) for number in numbers])
        steps = tuple([SumStep(does, pattern[op]) for does, op in found.steps])
        read = tuple(sorted({(pattern[op], k) for op, k in readers(program, found.end)}))
        key = (terms, steps, read, needs.of_value(found.end), late[first.results[0]], first.loop >= 0)
        runs[key] += first.trips
        example.setdefault(key, numbers)
    return tuple(SumItem(*key, count, example[key], _decisive(key[1])) for key, count in runs.items())


def _decisive(steps: Steps) -> tuple[int, ...]:
    return tuple(dict.fromkeys([step.op for step in steps]))


def reduced(item: SumItem, lowered: Mapping[int, Iteration]) -> Iterator[tuple[int, Reduction, tuple[int, ...]]]:
    """What is reduced together, each with the place of its first term in `terms` and the axes that uses cut it along.

    Args:
        lowered: pattern -> what it iterates over.
    """
    for part in reductions_of(item.steps, lowered.__getitem__):
        cut = (*part.cut_before, *part.cut)
        if part.whole and part.partial.reduced:
            wanted = [lowered[pattern].operands[position] for pattern, position in item.readers]
            cut = tuple(dict.fromkeys((*cut, *cut_by_readers(part.partial.reduced, wanted))))
        yield item.term(part.first), part, cut


def _term(problem: Problem, number: int) -> Term:
    op = problem.program.ops[number]
    return Term(problem.op_pattern[number], problem.program.values[op.results[0]].bytes, one_at_a_time(op, 1))
