"""Partial results that are added up: they stay partial to the end of the sum and are reduced once.

The gradient of a block's input is such a sum, one term per projection that read it; so is the gradient of a weight that is used again and
again. XLA turns `all-reduce(a) + all-reduce(b)` into `all-reduce(a + b)` (its all-reduce reassociation), where both are read by nobody else.
An addition whose other side is not partial ends the sum.

Enters: a program, and for each op what it sums over. Leaves: which ops are terms of one sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from toast_cli.program.model import Op, Program

ADD = "stablehlo.add"
# What changes the form of a term and nothing about what is added up. Not a conversion: it rounds.
_VIEWS = frozenset(
    f"stablehlo.{name}" for name in ("reshape", "transpose", "broadcast_in_dim", "bitcast_convert", "slice")
)
Reduced = frozenset[Hashable]
NOTHING: Reduced = frozenset()


def term_counts(program: Program, reduced: Sequence[Reduced]) -> dict[tuple[int, Hashable], int]:
    """(op, sum) -> how many results partial over that sum are added up before they are reduced, this op's among them; no entry for 1.

    `reduced` [ops]: what each op sums over; two terms can be added up where they have one of these in common.
    """
    partial = _partial_over(program, reduced)
    ends: dict[tuple[int, Hashable], int] = {}  # (value, what it is summed over) -> the value that ends its sum
    for value in reversed(range(len(program.values))):
        onward = _goes_into(program, value)
        for group in partial[value]:
            ends[value, group] = ends.get((onward, group), value)
    terms: dict[tuple[int, Hashable], list[int]] = defaultdict(list)
    for number, groups in enumerate(reduced):
        for value in program.ops[number].results[:1]:
            for group in groups:
                terms[ends[value, group], group].append(number)
    return {
        (number, group): len(members) for (_, group), members in terms.items() if len(members) > 1 for number in members
    }


def is_view(op: Op, program: Program) -> bool:
    """Whether an op only changes the form of its one operand: a sum over dimensions of size 1 does no more."""
    if op.name == "stablehlo.reduce" and len(op.results) == 1:
        return program.values[op.operands[0]].elements == program.values[op.results[0]].elements
    return op.name in _VIEWS


def _partial_over(program: Program, reduced: Sequence[Reduced]) -> list[Reduced]:
    """[values] what it is partial over if that is split in the ops that sum over it."""
    partial = [NOTHING] * len(program.values)
    for number, op in enumerate(program.ops):
        groups = reduced[number]
        if not groups and op.results and op.operands and all(len(program.users[v]) == 1 for v in op.operands[:2]):
            if op.name == ADD:
                groups = partial[op.operands[0]] & partial[op.operands[1]]
            elif is_view(op, program):
                groups = partial[op.operands[0]]
        for value in op.results:
            partial[value] = groups
    return partial


def _goes_into(program: Program, value: int) -> int:
    """The result of the one op that reads the value; -1 where there are more, or none."""
    uses = program.users[value]
    results = program.ops[uses[0][0]].results if len(uses) == 1 else ()
    return results[0] if results else -1
