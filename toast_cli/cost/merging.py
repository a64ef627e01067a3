"""Sums of partial results are reduced once (see `plan.sums`): terms that are partial over the same axes under the plan at hand share one
reduction. This is why Megatron needs two all-reduces a block and direction and not five.

Enters: a `Problem`. Leaves: its sums as cost items, each for all that look alike; and for an item and a plan, which terms are reduced together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from toast_cli.dimensions.model import SlotKind
from toast_cli.plan.iteration import Iteration, OpPattern
from toast_cli.plan.problem import Problem
from toast_cli.plan.sums import find_sums, reduced_together
from toast_cli.program.model import PRODUCTS, Op


@dataclass(frozen=True, slots=True)
class Term:
    """bytes: of the whole result. product: whether the op is one."""

    pattern: int
    bytes: int
    product: bool


@dataclass(frozen=True, slots=True)
class SumItem:
    """Sums that look alike. steps: see `Sum`. late: nothing waits for them, see `waiting`. in_loop: within a loop. runs: of all of them
    together in one run of the program. ops: the terms of one of them."""

    terms: tuple[Term, ...]
    steps: tuple[int, ...]
    late: bool
    in_loop: bool
    runs: float
    ops: tuple[int, ...]


def sum_items(problem: Problem, late: list[bool]) -> tuple[tuple[SumItem, ...], frozenset[int]]:
    """The program's sums, and all ops that are terms of one; late: [values]."""
    program = problem.program
    runs: dict[tuple[tuple[Term, ...], tuple[int, ...], bool, bool], float] = defaultdict(float)
    example: dict[object, tuple[int, ...]] = {}
    sums = find_sums(program, [_can_be_term(problem, number) for number in range(len(program.ops))])
    for found in sums:
        first = program.ops[found.terms[0]]
        terms = tuple(_term(problem, number) for number in found.terms)
        key = (terms, found.steps, late[first.results[0]], first.loop >= 0)
        runs[key] += first.trips
        example.setdefault(key, found.terms)
    items = tuple(SumItem(*key, count, example[key]) for key, count in runs.items())
    return items, frozenset(number for found in sums for number in found.terms)


def together(problem: Problem, item: SumItem, lowered: Mapping[int, Iteration]) -> list[tuple[int, int]]:
    """Pairs of a term and how many are reduced with it, see `reduced_together`; `lowered`: pattern -> what it iterates over."""
    keys = {t.pattern: _partial(problem.patterns[t.pattern], lowered[t.pattern]) for t in item.terms}
    return list(reduced_together(item.steps, [keys[t.pattern] for t in item.terms]))


def _can_be_term(problem: Problem, number: int) -> bool:
    op, pattern = problem.program.ops[number], problem.patterns[problem.op_pattern[number]]
    return _adds_up(op) and SlotKind.REDUCTION in pattern.form.kinds and not pattern.result_pins


def _adds_up(op: Op) -> bool:
    return len(op.results) == 1 and (not op.name.endswith(("reduce", "reduce_window", "scatter")) or op.detail == "add")


def _term(problem: Problem, number: int) -> Term:
    op = problem.program.ops[number]
    return Term(problem.op_pattern[number], problem.program.values[op.results[0]].bytes, op.name in PRODUCTS)


def _partial(pattern: OpPattern, iteration: Iteration) -> Hashable:
    """What a result is partial over, where that goes, and along which groups it is split meanwhile; None where it is not partial."""
    if not iteration.reduced and not iteration.scattered[0]:
        return None
    kept = {slot for slots in pattern.form.results[0] for slot in slots if iteration.slot_axes[slot]}
    return (
        iteration.reduced,
        iteration.scattered[0],
        frozenset((pattern.groups[slot], iteration.slot_axes[slot]) for slot in kept),
    )
