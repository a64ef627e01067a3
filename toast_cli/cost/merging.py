"""Sums of partial results are reduced once: XLA turns `all-reduce(a) + all-reduce(b)` into `all-reduce(a + b)`.

The gradient of a block's input is such a sum: one term per projection that read it. This is why Megatron needs two all-reduces
a block and direction and not five. (XLA's all-reduce reassociation.) Terms count as summed together when each has no other
reader; of the n that reduce over one group, all are partial when it is split, and each pays an n-th of the one reduction.

Enters: a `Problem`. Leaves: per op and slot the share of its own reductions that it pays.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from toast_cli.cost.fusion import VIEWS
from toast_cli.dimensions.model import SlotKind
from toast_cli.plan.problem import Problem

_SUM = "stablehlo.add"
_PASSED = VIEWS - {"stablehlo.convert"}  # a conversion rounds: XLA does not move a reduction across it


def reduction_shares(problem: Problem) -> list[tuple[float, ...]]:
    """[ops][slots] 1/n where n partial results are summed before they are reduced over that slot's group; () where all are alone."""
    program = problem.program
    shares: list[tuple[float, ...]] = [()] * len(program.ops)
    terms: dict[int, list[int]] = defaultdict(list)  # op that ends a sum -> ops whose results it adds up
    for number, op in enumerate(program.ops):
        if op.results and _reduced_groups(problem, number):
            end = _end_of_sum(problem, op.results[0])
            if end >= 0:
                terms[end].append(number)
    for members in terms.values():
        count = Counter(group for number in members for group in _reduced_groups(problem, number))
        if max(count.values()) > 1:
            for number in members:
                groups = problem.patterns[problem.op_pattern[number]].groups
                shares[number] = tuple(1.0 / max(1, count[group]) for group in groups)
    return shares


def _reduced_groups(problem: Problem, number: int) -> frozenset[int]:
    pattern = problem.patterns[problem.op_pattern[number]]
    kinds = pattern.form.kinds
    return frozenset(group for slot, group in enumerate(pattern.groups) if kinds[slot] is SlotKind.REDUCTION)


def _end_of_sum(problem: Problem, value: int) -> int:
    """The last addition of the sum that a value is a term of, -1 when it is none; every step on the way has one reader."""
    program = problem.program
    end = -1
    while len(program.users[value]) == 1:
        (reader, _), *_ = program.users[value]
        op = program.ops[reader]
        if op.name == _SUM:
            end = reader
        elif op.name not in _PASSED:
            break
        value = op.results[0]
    return end
