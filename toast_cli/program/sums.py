"""Sums: values that are added up, and nothing else is made of on the way.

The gradient of a block's input is such a sum, with a term for each projection that read it; so is the gradient of a
weight that is used again and again. Which ops could be terms, and in which order they are added up, follows from the
program alone; what a plan leaves partial of them is in `plan.partials`.

Enters: a program. Leaves: `Sum`s, and who reads what is added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ADD, CARRY, CONVERT, REDUCE, SCATTER
from toast_cli.program.rematerialised import expands_scalar

# What a step of a sum does: brings in a term, sees the step before it through a view, or adds up the two before it.
# "into" adds up as well, where one of the two is scattered into the other (see `scatters_into`).
Does = Literal["term", "view", "add", "into"]


class SumStep(NamedTuple):
    """op: its number in the program, or of its pattern, as the user of a `Sum` needs it."""

    does: Does
    op: int


Steps = tuple[SumStep, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """steps: in reverse Polish notation, with op numbers. end: the value that the sum is."""

    steps: Steps
    end: int

    @property
    def terms(self) -> tuple[int, ...]:
        return tuple([step.op for step in self.steps if step.does == "term"])


def find_sums(program: Program, can_be_term: Sequence[bool]) -> list[Sum]:
    """Every sum of results of such ops, as long as can be; those of one term too.

    Args:
        can_be_term: [ops] whether an op adds up over something that may be split, and leaves what it finds as it is.
    """
    written: dict[int, list[SumStep]] = {}  # value -> the steps of the sum it is
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
    """Whether an op that combines elements adds them up."""
    return not op.name.endswith(("reduce", "reduce_window", "scatter")) or op.detail == "add"


def _read_only_here(program: Program, value: int, op: Op) -> bool:
    maker = program.ops[program.producer[value]]
    if maker.name == CARRY:  # what a loop results in is a value of the program around it
        return len(read_behind(program, value)) == 1 and program.loops[maker.loop].parent == op.loop
    return len(program.users[value]) == 1 and maker.loop == op.loop


def read_behind(program: Program, carried: int) -> list[tuple[int, int]]:
    """Uses of what a loop carries that read what the loop results in."""
    loop = program.loops[program.ops[program.producer[carried]].loop]
    return [use for use in program.users[carried] if not loop.first <= use[0] < loop.last]


def _read(op: Op) -> tuple[int, ...]:
    return op.operands if op.name == ADD else op.operands[:1]


def is_view(op: Op, program: Program) -> bool:
    """Whether an op only changes the form of its one operand: a sum over dimensions of size 1 does no more. A
    conversion is none: it rounds."""
    if not op.kind.view and (op.name != REDUCE or len(op.results) > 1):
        return False
    return program.values[op.operands[0]].elements == program.values[op.results[0]].elements


def scatters_into(op: Op, program: Program) -> bool:
    """Whether the op is an addition of which one side, and only one, is a scatter into an array made from constants.

    XLA simplifies `a + scatter(zeros, updates)` to `scatter(a, updates)` before it partitions, unless a constraint
    stands in between, as one does behind every scatter that leaves a partial result (see
    `emit.marks.scattered_terms`): sums of such are all-reduced once, as any others. Where both sides are
    reduce-scattered, XLA adds up what both keep a piece of where it sees that the pieces are the same: not over several
    axes (products are scattered in two steps and look-ups over all at once, see `plan.partials.completed`), not where
    the array is split besides (the pieces' offsets are worked out in different ways), and not where a side is
    transposed in between, as the gradient of a table is that is multiplied by as `x @ table.T`.
    """
    return op.name == ADD and sum(_starts_anew(program.ops[program.producer[v]], program) for v in op.operands) == 1


def _starts_anew(op: Op, program: Program) -> bool:
    if op.name != SCATTER:
        return False
    base = program.ops[program.producer[op.operands[0]]]
    return base.kind.source or expands_scalar(base, program)


def readers(program: Program, value: int) -> list[tuple[int, int]]:
    """Uses of a value, or of what it becomes by a change of form and type that nobody else reads it for; of what a loop
    results in, those of the value itself."""
    if program.ops[program.producer[value]].name == CARRY:
        return read_behind(program, value)
    while len(uses := program.users[value]) == 1:
        op = program.ops[uses[0][0]]
        if len(op.results) != 1 or not (op.name == CONVERT or is_view(op, program)):
            break
        value = op.results[0]
    return program.users[value]
