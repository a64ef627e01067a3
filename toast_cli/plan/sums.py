"""Partial results that are added up: they stay partial to the end of the sum and are reduced once.

The gradient of a block's input is such a sum, one term per projection that read it; so is the gradient of a weight that is used again and
again. XLA turns `all-reduce(a) + all-reduce(b)` into `all-reduce(a + b)` (its all-reduce reassociation) where both go over the same devices
and are read by nobody else. An addition whose other side is not partial, or over other mesh axes, ends the sum; so does one of a look-up's
gradient and something else, if it is all-reduced (`scatters_into`). Which axes terms are partial over a plan decides; which ops could be terms, and in which order they are added up, follows from the program.

Enters: a program, and which of its ops can be terms. Leaves: its sums, of one term or more, and for one of them what a plan leaves of it to
be reduced.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ADD, REDUCE, SCATTER
from toast_cli.program.rematerialised import expands_scalar

PLUS = -1  # a step that adds up what the two steps before it left
INTO = -2  # the same, where one of them is scattered into the other


@dataclass(frozen=True, slots=True)
class Sum:
    """terms: op numbers, in the order they are read. steps: the sum in reverse Polish notation, places in `terms`, `PLUS` and `INTO`. end:
    the value that it is."""

    terms: tuple[int, ...]
    steps: tuple[int, ...]
    end: int


@dataclass(frozen=True, slots=True)
class Partial:
    """What a term is partial over: axes it is all-reduced over and axes it is scattered over. kept: how it is split meanwhile."""

    reduced: tuple[int, ...]
    scattered: tuple[int, ...]
    kept: Hashable


@dataclass(frozen=True, slots=True)
class Together:
    """Terms that are reduced in one go: the first of them, how many, and whether they are all there are, so that the sum's end is what is reduced."""

    first: int
    count: int
    whole: bool


def find_sums(program: Program, can_be_term: Sequence[bool]) -> list[Sum]:
    """Every sum of results of such ops, as long as can be; those of one term too.

    Args:
        can_be_term: [ops] whether an op adds up over something that may be split, and leaves what it finds as it is.
    """
    written: dict[int, list[int]] = {}  # value -> the sum it is, in reverse Polish notation, of op numbers
    for number, op in enumerate(program.ops):
        if len(op.results) != 1:
            continue
        if can_be_term[number]:
            written[op.results[0]] = [number]
        elif op.operands and all(v in written and len(program.users[v]) == 1 for v in _read(op)):
            if op.name == ADD:
                fewer, more = sorted((written.pop(v) for v in op.operands), key=len)
                more += fewer  # so that long sums take no quadratic time
                more.append(INTO if scatters_into(op, program) else PLUS)
                written[op.results[0]] = more
            elif is_view(op, program):
                written[op.results[0]] = written.pop(op.operands[0])
    return [_as_sum(steps, end) for end, steps in written.items()]


def reduced_together(steps: Sequence[int], keys: Sequence[Partial | None]) -> Iterator[Together]:
    """What is reduced, and of which terms.

    Args:
        steps: of a `Sum`. keys: [terms] None where it is not partial.
    """
    waiting: list[tuple[Partial | None, int, int]] = []  # (key, first term, how many)
    for step in steps:
        if step >= 0:
            waiting.append((keys[step], step, 1))
            continue
        right, left = waiting.pop(), waiting.pop()
        apart = step == INTO and left[0] is not None and len(left[0].scattered) != 1
        if left[0] == right[0] and not apart:
            waiting.append((left[0], left[1], left[2] + right[2]))
            continue
        for key, first, count in (left, right):
            if key is not None:
                yield Together(first, count, whole=False)
        waiting.append((None, left[1], 0))
    for key, first, count in waiting:
        if key is not None:
            yield Together(first, count, whole=True)


def scatters_into(op: Op, program: Program) -> bool:
    """Whether the op is an addition of which one side, and only one, is a scatter into an array made from constants.

    XLA simplifies `a + scatter(zeros, updates)` to `scatter(a, updates)` before it partitions; so `a` is reduced before the scatter and the
    scatter's result once more. Constraints between the two, which say where each is reduce-scattered, keep XLA from that; over several axes
    products are scattered one axis at a time and look-ups over all at once (see `PartitionedProgram.path`), and stay apart.
    """
    return op.name == ADD and sum(_starts_anew(program.ops[program.producer[v]], program) for v in op.operands) == 1


def _starts_anew(op: Op, program: Program) -> bool:
    if op.name != SCATTER:
        return False
    base = program.ops[program.producer[op.operands[0]]]
    return base.kind.source or expands_scalar(base, program)


def is_view(op: Op, program: Program) -> bool:
    """Whether an op only changes the form of its one operand: a sum over dimensions of size 1 does no more.

    A conversion is none: it rounds.
    """
    if not op.kind.view and (op.name != REDUCE or len(op.results) > 1):
        return False
    return program.values[op.operands[0]].elements == program.values[op.results[0]].elements


def _read(op: Op) -> tuple[int, ...]:
    return op.operands if op.name == ADD else op.operands[:1]


def _as_sum(steps: list[int], end: int) -> Sum:
    terms = tuple(step for step in steps if step >= 0)
    places = iter(range(len(terms)))
    return Sum(terms, tuple(step if step < 0 else next(places) for step in steps), end)
