"""Sums: trees of additions whose intermediate values have no other readers.

The gradient of a block's input is such a sum, with a term for each projection that read it; so is the gradient of a
weight that is used several times. The possible terms and the order of additions follow from the program alone;
`plan.partials` says which of them a plan leaves partial.

In: a program. Out: `Sum`s, and the readers of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ADD, CARRY, CONVERT, REDUCE, SCATTER
from toast_cli.program.rematerialised import expands_scalar

# Kind of a step: pushes a term, applies a view to the last entry, or adds the last two entries. "into" adds as well, if
# one of the two is scattered into the other (see `scatters_into`).
Does = Literal["term", "view", "add", "into"]


class SumStep(NamedTuple):
    """A step of a sum. op: number of the op in the program, or of its pattern."""

    does: Does
    op: int


Steps = tuple[SumStep, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum. steps: in reverse Polish notation, with op numbers. end: the value of the sum."""

    steps: Steps
    end: int

    @property
    def terms(self) -> tuple[int, ...]:
        return tuple([step.op for step in self.steps if step.does == "term"])


def find_sums(program: Program, can_be_term: Sequence[bool]) -> list[Sum]:
    """Every maximal sum of results of such ops, including single terms.

    Args:
        can_be_term: [ops] whether an op sums over a dimension that may be split, and its result may stay partial.
    """
    written: dict[int, list[SumStep]] = {}  # value -> steps of its sum
    for number, op in enumerate(program.ops):
        if len(op.results) != 1:
            continue
        if can_be_term[number]:
            written[op.results[0]] = [SumStep("term", number)]
        elif op.operands and all(v in written and _read_only_here(program, v, op) for v in _read(op)):
            if op.name == ADD:
                fewer, more = sorted((written.pop(v) for v in op.operands), key=len)
                more += fewer  # so that long sums take no quadratic time
                more.append(SumStep("into" if scatters_into(op, program) else "add", number))
                written[op.results[0]] = more
            elif is_view(op, program):
                steps = written[op.results[0]] = written.pop(op.operands[0])
                steps.append(SumStep("view", number))
    return [Sum(tuple(steps), end) for end, steps in written.items()]


def adds_up(op: Op) -> bool:
    """Whether an op that combines elements does so by addition."""
    return not op.name.endswith(("reduce", "reduce_window", "scatter")) or op.detail == "add"


def _read_only_here(program: Program, value: int, op: Op) -> bool:
    maker = program.ops[program.producer[value]]
    if maker.name == CARRY:  # a loop's result is a value of the surrounding program
        return len(read_behind(program, value)) == 1 and program.loops[maker.loop].parent == op.loop
    return len(program.users[value]) == 1 and maker.loop == op.loop


def read_behind(program: Program, carried: int) -> list[tuple[int, int]]:
    """Uses of a loop's carry after the loop, which read the loop's result."""
    loop = program.loops[program.ops[program.producer[carried]].loop]
    return [use for use in program.users[carried] if not loop.first <= use[0] < loop.last]


def _read(op: Op) -> tuple[int, ...]:
    return op.operands if op.name == ADD else op.operands[:1]


def is_view(op: Op, program: Program) -> bool:
    """Whether an op only changes the shape of its one operand; a sum over dimensions of size 1 does. A conversion does
    not count, since it rounds."""
    if not op.kind.view and (op.name != REDUCE or len(op.results) > 1):
        return False
    return program.values[op.operands[0]].elements == program.values[op.results[0]].elements


def scatters_into(op: Op, program: Program) -> bool:
    """Whether the op is an addition with exactly one operand that is a scatter into an array made from constants.

    XLA simplifies `a + scatter(zeros, updates)` to `scatter(a, updates)` before it partitions, unless a constraint is
    in between, as after every scatter with a partial result (see
    `emit.annotations.scattered_terms`): such sums are all-reduced once, like any others. If both operands are
    reduce-scattered, XLA adds the shards first where it sees that they are the same: not over several axes (products
    are scattered in two steps and look-ups over all at once, see `plan.partials.completed`), not where the array is
    also split otherwise (the shards' offsets are computed in different ways), and not where an operand is transposed in
    between, as for the gradient of a table in `x @ table.T`.
    """
    return op.name == ADD and sum(_starts_anew(program.ops[program.producer[v]], program) for v in op.operands) == 1


def _starts_anew(op: Op, program: Program) -> bool:
    if op.name != SCATTER:
        return False
    base = program.ops[program.producer[op.operands[0]]]
    return base.kind.source or expands_scalar(base, program)


def readers(program: Program, value: int) -> list[tuple[int, int]]:
    """Uses of a value, looking through a view or conversion that is its only reader; for a loop's carry, the uses of
    the loop's result."""
    if program.ops[program.producer[value]].name == CARRY:
        return read_behind(program, value)
    while len(uses := program.users[value]) == 1:
        op = program.ops[uses[0][0]]
        if len(op.results) != 1 or not (op.name == CONVERT or is_view(op, program)):
            break
        value = op.results[0]
    return program.users[value]
