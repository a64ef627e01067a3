"""Sums of partial results in a lowered plan: terms stay as their ops compute them, and the sum is scattered once, at its end.

Enters: the shardings of all values, before. Leaves: which values to leave partial, and which sums to scatter; see `plan.sums` for why.
"""

from __future__ import annotations

from toast_cli.plan.sharding import Sharding
from toast_cli.plan.sums import is_view, scatters_into
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ADD

# The sharding in which a value is computed, partial, the one it is scattered to, and axes it is all-reduced over besides.
Scatter = tuple[Sharding, Sharding, tuple[int, ...]]


def accumulated(
    program: Program,
    shardings: list[Sharding],
    computed: dict[int, Sharding],
    reduced: dict[int, tuple[int, ...]],
    required: dict[tuple[int, int], Sharding],
) -> tuple[list[Sharding], dict[int, Sharding], frozenset[int]]:
    """`shardings` and `computed` of the same plan with every sum of scattered terms scattered as one, and these sums.

    Args:
        reduced: what values in `computed` are all-reduced over, where they are.
    """
    partial: dict[int, Scatter] = {
        value: (at, shardings[value], reduced.get(value, ())) for value, at in computed.items()
    }
    sums: list[int] = []
    for number, op in enumerate(program.ops):
        found = _handed_on(program, number, op, partial, shardings, required)
        if found is not None:
            partial[op.results[0]] = found
            if op.name == ADD:
                sums.append(number)
    if not sums:
        return shardings, computed, frozenset()
    shardings, computed = list(shardings), dict(computed)
    terms: set[int] = set()
    ends: set[int] = set()
    for number in reversed(sums):
        op = program.ops[number]
        if op.results[0] not in terms:
            ends.add(op.results[0])
            computed[op.results[0]] = partial[op.results[0]][0]
        for value in op.operands:
            _leave_partial(program, value, partial, shardings, computed, terms)
    return shardings, computed, frozenset(ends)


def _handed_on(
    program: Program,
    number: int,
    op: Op,
    partial: dict[int, Scatter],
    shardings: list[Sharding],
    required: dict[tuple[int, int], Sharding],
) -> Scatter | None:
    """How the result of an op that only adds up or views partial values would be computed and scattered; None for any other."""
    if op.name != ADD and not (len(op.results) == 1 and op.operands and is_view(op, program)):
        return None
    if scatters_into(op, program):
        return None
    read = op.operands if op.name == ADD else op.operands[:1]
    if any(v not in partial or len(program.users[v]) != 1 or (number, k) in required for k, v in enumerate(read)):
        return None
    if op.name == ADD:
        return partial[read[0]] if partial[read[0]] == partial[read[1]] else None
    computed_in, _, reduced = partial[read[0]]
    at = _seen_through(op, computed_in)
    return None if at is None else (at, shardings[op.results[0]], reduced)


def _seen_through(op: Op, operand: Sharding) -> Sharding | None:
    """The sharding of a view of something that lies so; None where dimensions are cut or put together."""
    axes_of = {factors: axes for factors, axes in zip(op.rule.operands[0], operand, strict=True) if factors}
    found = tuple(axes_of.pop(factors, ()) for factors in op.rule.results[0])
    return None if any(axes_of.values()) else found


def _leave_partial(
    program: Program,
    value: int,
    partial: dict[int, Scatter],
    shardings: list[Sharding],
    computed: dict[int, Sharding],
    terms: set[int],
) -> None:
    """The value, and what it is a view of, stays as it is computed."""
    while True:
        terms.add(value)
        shardings[value] = partial[value][0]
        computed.pop(value, None)
        op = program.ops[program.producer[value]]
        if op.name == ADD or not op.operands or op.operands[0] not in partial or not is_view(op, program):
            return
        value = op.operands[0]
