"""Gives values made from constants alone the shardings that their uses require.

Enters: a program and a `PartitionedProgram`. Leaves: a `PartitionedProgram` in which each such value has the sharding
that its uses require. Recomputing one costs nothing, so the sharding a plan gives it does not matter; but HLO, and a
loop that it is passed through, keeps one copy of it. Where uses disagree and other such values are derived from it, it
is replicated, and each use slices it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding, replicated
from toast_cli.program.model import Op, Program
from toast_cli.program.rematerialised import remade_values


def settled(program: Program, lowered: PartitionedProgram) -> PartitionedProgram:
    """The program with new shardings for values made from constants alone."""
    remade = remade_values(program)
    shardings = list(lowered.shardings)
    required = dict(lowered.required)
    for value in reversed(range(len(program.values))):
        if not remade[value] or not shardings[value]:
            continue
        read: dict[tuple[int, int], Sharding] = {}
        derived: set[Sharding] = set()
        for number, position in program.users[value]:
            want = required.pop((number, position), shardings[value])
            op = program.ops[number]
            if op.results and all(remade[result] for result in op.results):
                derived.add(seen_from(op, position, shardings[op.results[0]]))
            else:
                read[number, position] = want
        if derived:
            agreed = derived | set(read.values())
            shardings[value] = agreed.pop() if len(agreed) == 1 else replicated(len(shardings[value]))
        elif read:
            shardings[value] = Counter(read.values()).most_common(1)[0][0]
        required.update({use: want for use, want in read.items() if want != shardings[value]})
    return replace(lowered, shardings=shardings, required=required)


def seen_from(op: Op, position: int, result: Sharding) -> Sharding:
    """The sharding of an operand that goes with the sharding of the result, dimension by dimension."""
    axes_of = {factors: axes for factors, axes in zip(op.rule.results[0], result, strict=True) if factors}
    return tuple(axes_of.get(factors, ()) for factors in op.rule.operands[position])
