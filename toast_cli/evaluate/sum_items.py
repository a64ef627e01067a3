"""Partial results and what completes them: an all-reduce, a reduce-scatter where the plan says so, or where every device goes on with its own
piece. Sums of partial results are reduced once (see `plan.sums`): terms that are partial over the same axes under the plan at hand share one
reduction. This is why Megatron needs two all-reduces a block and direction and not five.

Enters: a `Problem`. Leaves: its sums, those of one term too, as cost items, each for all that look alike; and for an item and a plan, which
terms are reduced together and how.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from toast_cli.compiler.narrowing import Narrowing
from toast_cli.dimensions.model import SlotKind
from toast_cli.plan.iteration import Iteration, OpPattern
from toast_cli.plan.problem import Problem
from toast_cli.plan.sums import Partial, Sum, Together, find_sums, is_view, reduced_together
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import CONVERT


@dataclass(frozen=True, slots=True)
class Term:
    """bytes: of the whole result. product: whether the op is one."""

    pattern: int
    bytes: int
    product: bool


@dataclass(frozen=True, slots=True)
class SumItem:
    """Sums that look alike. steps: see `Sum`. readers: patterns and operand positions of all that read the sum, or a view of it. needed: part
    of the bits of the sum that they need. late: nothing waits for them, see `overlap`. in_loop: within a loop. runs: of all of them together in one run of the program. ops: the
    terms of one of them."""

    terms: tuple[Term, ...]
    steps: tuple[int, ...]
    readers: tuple[tuple[int, int], ...]
    needed: float
    late: bool
    in_loop: bool
    runs: float
    ops: tuple[int, ...]


_Alike = tuple[tuple[Term, ...], tuple[int, ...], tuple[tuple[int, int], ...], float, bool, bool]


def sum_items(problem: Problem, late: list[bool], needs: Narrowing) -> tuple[tuple[SumItem, ...], frozenset[int]]:
    """The program's sums, and all ops that are terms of one; late: [values]."""
    program = problem.program
    runs: dict[_Alike, float] = defaultdict(float)
    example: dict[object, tuple[int, ...]] = {}
    partial = [number for number in range(len(program.ops)) if _can_be_partial(problem, number)]
    can_be_term = [False] * len(program.ops)
    for number in partial:
        can_be_term[number] = _adds_up(program.ops[number])
    alone = [Sum((number,), (0,), program.ops[number].results[0]) for number in partial if not can_be_term[number]]
    sums = [*find_sums(program, can_be_term), *alone]
    for found in sums:
        first = program.ops[found.terms[0]]
        terms = tuple(_term(problem, number) for number in found.terms)
        readers = tuple(sorted({(problem.op_pattern[op], k) for op, k in _readers(program, found.end)}))
        key = (terms, found.steps, readers, needs.of_value(found.end), late[first.results[0]], first.loop >= 0)
        runs[key] += first.trips
        example.setdefault(key, found.terms)
    items = tuple(SumItem(*key, count, example[key]) for key, count in runs.items())
    return items, frozenset(number for found in sums for number in found.terms)


def together(problem: Problem, item: SumItem, lowered: Mapping[int, Iteration]) -> list[Together]:
    """What is reduced together, see `reduced_together`; `lowered`: pattern -> what it iterates over."""
    if len(item.terms) == 1:
        iteration = lowered[item.terms[0].pattern]
        return [Together(0, 1, whole=True)] if iteration.reduced or iteration.scattered[0] else []
    keys = {t.pattern: _partial(problem.patterns[t.pattern], lowered[t.pattern]) for t in item.terms}
    return list(reduced_together(item.steps, [keys[t.pattern] for t in item.terms]))


def cut_by_readers(item: SumItem, reduced: tuple[int, ...], lowered: Mapping[int, Iteration]) -> tuple[int, ...]:
    """Of the axes a sum is reduced over, those by which all that read it cut it in the same way: each device keeps a piece of the total."""
    wanted = {lowered[pattern].operands[position] for pattern, position in item.readers}
    if len(wanted) != 1:
        return ()
    (sharding,) = wanted
    return tuple(axis for axis in reduced if any(axis in axes for axes in sharding))


def _can_be_partial(problem: Problem, number: int) -> bool:
    pattern = problem.patterns[problem.op_pattern[number]]
    one_result = len(problem.program.ops[number].results) == 1
    return one_result and SlotKind.REDUCTION in pattern.form.kinds and not pattern.result_pins


def _adds_up(op: Op) -> bool:
    return not op.name.endswith(("reduce", "reduce_window", "scatter")) or op.detail == "add"


def _readers(program: Program, value: int) -> list[tuple[int, int]]:
    """Uses of a value, or of what it becomes by a change of form and type that nobody else reads it for."""
    while len(uses := program.users[value]) == 1:
        op = program.ops[uses[0][0]]
        if len(op.results) != 1 or not (op.name == CONVERT or is_view(op, program)):
            break
        value = op.results[0]
    return program.users[value]


def _term(problem: Problem, number: int) -> Term:
    op = problem.program.ops[number]
    return Term(problem.op_pattern[number], problem.program.values[op.results[0]].bytes, op.kind.matrix_unit)


def _partial(pattern: OpPattern, iteration: Iteration) -> Partial | None:
    """What a result is partial over, where that goes, and along which groups it is split meanwhile; None where it is not partial."""
    if not iteration.reduced and not iteration.scattered[0]:
        return None
    kept = {slot for slots in pattern.form.results[0] for slot in slots if iteration.slot_axes[slot]}
    split = frozenset((pattern.groups[slot], iteration.slot_axes[slot]) for slot in kept)
    return Partial(iteration.reduced, iteration.scattered[0], split)
