"""Parts of a program that may do otherwise than decisions say, see `decisions.Override`.

Ops are told apart by what they are made of and read by, round after round (as colours are refined to tell graphs
apart, Weisfeiler, Leman 1968): what the forward pass does with an array may be told from what the backward pass does.
Enters: a problem. Leaves: the part of each op, and the same problem whose patterns know their part.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from toast_cli.plan.iteration import NO_PART, OpPattern
from toast_cli.plan.problem import Problem
from toast_cli.program.model import Program

MOST_OPERANDS = 8  # of an op whose operands are looked at


def with_parts(problem: Problem, parts: Sequence[int]) -> Problem:
    """The problem with its ops in these parts. parts: [ops] number of each one's part, or `NO_PART`."""
    numbers: dict[tuple[int, int], int] = {}
    patterns: list[OpPattern] = []
    op_pattern: list[int] = []
    for old, part in zip(problem.op_pattern, parts, strict=True):
        at = numbers.setdefault((old, part), len(patterns))
        if at == len(patterns):
            patterns.append(replace(problem.patterns[old], part=part))
        op_pattern.append(at)
    return replace(problem, patterns=tuple(patterns), op_pattern=tuple(op_pattern))


def has_parts(problem: Problem) -> bool:
    """Whether some of its ops are in a part already."""
    return any(pattern.part != NO_PART for pattern in problem.patterns)


def fine_parts(problem: Problem, most: int) -> list[int]:
    """[ops] the finest parts that tell no more than `most` apart; patterns, where there are more of those. A result
    that takes over an argument's buffer is in the part of that."""
    program = problem.program
    parts = list(problem.op_pattern)
    while True:
        finer = _refined(program, parts)
        if not len(set(parts)) < len(set(finer)) <= most:
            break
        parts = finer
    first = len(program.ops) - len(program.results)
    joined = {part: part for part in parts}

    def stands_for(part: int) -> int:
        while joined[part] != part:
            part = joined[part]
        return part

    for number, argument in enumerate(program.arguments):
        if argument.aliased_result >= 0:
            joined[stands_for(parts[first + argument.aliased_result])] = stands_for(parts[number])
    return [stands_for(part) for part in parts]


def _refined(program: Program, parts: Sequence[int]) -> list[int]:
    """Parts told apart by those of the ops that make what they read, and of those that read what they make."""
    numbers: dict[Hashable, int] = {}
    found: list[int] = []
    for op, part in zip(program.ops, parts, strict=True):
        made = [parts[program.producer[value]] for value in op.operands] if len(op.operands) <= MOST_OPERANDS else []
        read = {(parts[user], position) for value in op.results for user, position in program.users[value]}
        found.append(numbers.setdefault((part, tuple(made), frozenset(read)), len(numbers)))
    return found
