"""Sums of partial results are reduced once: XLA turns `all-reduce(a) + all-reduce(b)` into `all-reduce(a + b)`.

The gradient of a block's input is such a sum: one term per projection that read it. This is why Megatron needs two all-reduces
a block and direction and not five. (XLA's all-reduce reassociation.) Terms count as summed together when each has no other reader
and they reduce over a group in common; which term pays does not matter, so each of n pays an n-th.

Enters: a `Problem`. Leaves: per op the share of its own reductions that it pays.
"""

from __future__ import annotations

from collections import defaultdict

from toast_cli.cost.fusion import VIEWS
from toast_cli.dimensions.model import SlotKind
from toast_cli.plan.problem import Problem

_SUM = "stablehlo.add"
_PASSED = VIEWS - {"stablehlo.convert"}  # a conversion rounds: XLA does not move a reduction across it


def reduction_shares(problem: Problem) -> list[float]:
    """[ops] 1 for an op whose partial result is reduced alone, 1/n for one of n that are summed first."""
    program = problem.program
    shares = [1.0] * len(program.ops)
    terms: dict[int, list[int]] = defaultdict(list)  # op that ends a sum -> ops whose results it adds up
    for number, op in enumerate(program.ops):
        if op.results and _reduced_groups(problem, number):
            end = _end_of_sum(problem, op.results[0])
            if end >= 0:
                terms[end].append(number)
    for members in terms.values():
        for together in _sharing_a_group(problem, members):
            for number in together:
                shares[number] = 1.0 / len(together)
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


def _sharing_a_group(problem: Problem, members: list[int]) -> list[list[int]]:
    """Members of one sum, those that reduce over a common group together."""
    sets: list[tuple[set[int], list[int]]] = []
    for number in members:
        groups = set(_reduced_groups(problem, number))
        joined = [number]
        apart = []
        for other, numbers in sets:
            if other & groups:
                groups |= other
                joined = numbers + joined
            else:
                apart.append((other, numbers))
        sets = [*apart, (groups, joined)]
    return [numbers for _, numbers in sets]
