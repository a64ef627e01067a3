"""Sums of partial results are reduced once (see `plan.sums`): of the n terms that are partial over one group, each pays an n-th of the
one reduction. This is why Megatron needs two all-reduces a block and direction and not five.

Enters: a `Problem`. Leaves: per op and slot the share of its own reductions that it pays.
"""

from __future__ import annotations

from collections.abc import Hashable

from toast_cli.dimensions.model import SlotKind
from toast_cli.plan.problem import Problem
from toast_cli.plan.sums import term_counts


def reduction_shares(problem: Problem) -> list[tuple[float, ...]]:
    """[ops][slots] 1/n where n partial results are summed before they are reduced over that slot's group; () where all are alone."""
    counts = term_counts(problem.program, [sums_of(problem, number) for number in range(len(problem.program.ops))])
    shares: list[tuple[float, ...]] = [()] * len(problem.program.ops)
    for number in {number for number, _ in counts}:
        groups = problem.patterns[problem.op_pattern[number]].groups
        kept = kept_groups(problem, number)
        shares[number] = tuple(1.0 / counts.get((number, (group, kept)), 1) for group in groups)
    return shares


def sums_of(problem: Problem, number: int) -> frozenset[Hashable]:
    """Groups an op sums over, each beside those it keeps: terms that can be split in different ways are reduced each on its own."""
    pattern = problem.patterns[problem.op_pattern[number]]
    kinds = pattern.form.kinds
    reduced = {group for slot, group in enumerate(pattern.groups) if kinds[slot] is SlotKind.REDUCTION}
    return frozenset((group, kept_groups(problem, number)) for group in reduced) if reduced else frozenset()


def kept_groups(problem: Problem, number: int) -> frozenset[int]:
    """Groups along which an op's results can be split as it computes them."""
    pattern = problem.patterns[problem.op_pattern[number]]
    slots = {slot for dims in pattern.form.results for dim in dims for slot in dim}
    return frozenset(pattern.groups[s] for s in slots if pattern.form.kinds[s] is not SlotKind.BLOCKED)
