"""Sums of partial results are reduced once (see `plan.sums`): of the n terms that are partial over one group, each pays an n-th of the
one reduction. This is why Megatron needs two all-reduces a block and direction and not five.

Enters: a `Problem`. Leaves: per op and slot the share of its own reductions that it pays.
"""

from __future__ import annotations

from toast_cli.dimensions.model import SlotKind
from toast_cli.plan.problem import Problem
from toast_cli.plan.sums import term_counts


def reduction_shares(problem: Problem) -> list[tuple[float, ...]]:
    """[ops][slots] 1/n where n partial results are summed before they are reduced over that slot's group; () where all are alone."""
    reduced = [reduced_groups(problem, number) for number in range(len(problem.program.ops))]
    counts = term_counts(problem.program, reduced)
    shares: list[tuple[float, ...]] = [()] * len(reduced)
    for number in {number for number, _ in counts}:
        groups = problem.patterns[problem.op_pattern[number]].groups
        shares[number] = tuple(1.0 / counts.get((number, group), 1) for group in groups)
    return shares


def reduced_groups(problem: Problem, number: int) -> frozenset[int]:
    """Groups an op sums over."""
    pattern = problem.patterns[problem.op_pattern[number]]
    kinds = pattern.form.kinds
    return frozenset(group for slot, group in enumerate(pattern.groups) if kinds[slot] is SlotKind.REDUCTION)
