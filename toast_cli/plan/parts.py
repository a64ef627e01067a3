"""Parts of a program that may do otherwise than decisions say, see `decisions.Override`.

Ops are told apart by what they are made of and read by, round after round (as colours are refined to tell graphs
apart, Weisfeiler, Leman 1968): what the forward pass does with an array may be told from what the backward pass does.
Enters: a problem. Leaves: the part of each op, and the same problem whose patterns know their part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from toast_cli.plan.decisions import Decision, Override, Plan
from toast_cli.plan.iteration import NO_PART, OpPattern
from toast_cli.plan.problem import Problem
from toast_cli.program.disjoint_set import DisjointSets
from toast_cli.program.model import Program
from toast_cli.program.roles import carried_results

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


def ops_of_parts(problem: Problem) -> dict[int, tuple[int, ...]]:
    """Part -> its ops."""
    found: dict[int, list[int]] = defaultdict(list)
    for op, pattern in enumerate(problem.op_pattern):
        if problem.patterns[pattern].part != NO_PART:
            found[problem.patterns[pattern].part].append(op)
    return {part: tuple(ops) for part, ops in sorted(found.items())}


def parted_into(problem: Problem, places: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> Problem:
    """The problem with each of these sets of ops as a part, numbered as they first come.

    Args:
        places: ops, and slots of them that an axis is to split. Raises ValueError where there are no such ops or slots,
            or one op is in several sets.
    """
    parts = [NO_PART] * len(problem.op_pattern)
    numbers: dict[tuple[int, ...], int] = {}
    for ops, slots in places:
        new = ops not in numbers
        number = numbers.setdefault(ops, len(numbers))
        for op in ops:
            if not 0 <= op < len(parts) or (new and parts[op] != NO_PART):
                raise ValueError("it does otherwise in other ops")
            if any(not 0 <= slot < len(problem.patterns[problem.op_pattern[op]].groups) for slot in slots):
                raise ValueError("it splits what is not there")
            parts[op] = number
    return with_parts(problem, parts) if numbers else problem


def has_parts(problem: Problem) -> bool:
    """Whether some of its ops are in a part already."""
    return any(pattern.part != NO_PART for pattern in problem.patterns)


def fine_parts(problem: Problem, most: int) -> list[int]:
    """[ops] the finest parts that tell no more than `most` apart; patterns, where there are more of those. A result
    that replaces an argument is in the part of that."""
    program = problem.program
    parts = list(problem.op_pattern)
    while True:
        finer = _refined(program, parts)
        if not len(set(parts)) < len(set(finer)) <= most:
            break
        parts = finer
    first = len(program.ops) - len(program.results)
    joined = DisjointSets[int]()
    for number, result in enumerate(carried_results(program)):
        if result >= 0:
            joined.union(parts[number], parts[first + result])
    return [joined.find(part) for part in parts]


def narrowed(problem: Problem, fine: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """The problem with those of its ops in parts that overrides of the plan are about, and the plan for it. Ops of one
    pattern that are to do the same are one part."""
    told: dict[int, list[tuple[int, int, tuple[int, ...]]]] = defaultdict(list)  # fine part -> what is said of it
    for number, decision in enumerate(plan):
        if isinstance(decision, Override):
            for part, slots in decision.places:
                told[part].append((number, decision.axis, slots))
    coarse: dict[int, set[int]] = defaultdict(set)
    for old, at in zip(problem.op_pattern, fine.op_pattern, strict=True):
        coarse[fine.patterns[at].part].add(old)
    alike: dict[object, int] = {}
    number_of = {
        part: alike.setdefault((tuple(said), tuple(sorted(coarse[part]))), len(alike)) for part, said in told.items()
    }
    parts = [number_of.get(fine.patterns[at].part, NO_PART) for at in fine.op_pattern]
    found: list[Decision] = []
    for decision in plan:
        if isinstance(decision, Override):
            places = sorted({(number_of[part], slots) for part, slots in decision.places})
            found.append(decision._replace(places=tuple(places)))
        else:
            found.append(decision)
    return with_parts(problem, parts), tuple(found)


def _refined(program: Program, parts: Sequence[int]) -> list[int]:
    """Parts told apart by those of the ops that make what they read, and of those that read what they make."""
    numbers: dict[Hashable, int] = {}
    found: list[int] = []
    for op, part in zip(program.ops, parts, strict=True):
        made = [parts[program.producer[value]] for value in op.operands] if len(op.operands) <= MOST_OPERANDS else []
        read = {(parts[user], position) for value in op.results for user, position in program.users[value]}
        found.append(numbers.setdefault((part, tuple(made), frozenset(read)), len(numbers)))
    return found
