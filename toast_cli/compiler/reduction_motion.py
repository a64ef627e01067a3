"""Reduction motion: a value that a loop all-reduces in each trip and only accumulates, whole or in slices, is reduced
once after the loop.

XLA:TPU moves the all-reduce after the loop if its result is only read through slices or views that are added to carries
(its while-loop-all-reduce-code-motion): the gradients of an LSTM's weights, of which one product makes all gates.
Gradients that are accumulated whole are already carried partial in the emitted program (see `plan.accumulation`). Seen
in a Flax LSTM compiled by libtpu 0.0.42.1 for v5e: 7 ms of communication in place of 194. Without this pass each trip
all-reduces.

Enters: a program and a value that may be all-reduced. Leaves: the number of all-reduces per computation of the value.
"""

from __future__ import annotations

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Program
from toast_cli.program.ops import ADD, CARRY
from toast_cli.program.sums import read_behind

NAME = "reduction-motion"


def reductions_each(program: Program, value: int, profile: CompilerProfile) -> float:
    """Number of all-reduces per computation of a value: 1, or 1 / trips if they are moved behind the loop."""
    loop = program.ops[program.producer[value]].loop
    if loop < 0 or NAME not in profile.passes or not _is_only_added_up(program, value, loop):
        return 1.0
    return 1.0 / max(1, program.loops[loop].trips)


def _is_only_added_up(program: Program, value: int, loop: int) -> bool:
    """Whether a loop only adds a value, and views of it, to its carries."""
    users = program.users[value]
    for number, position in users:
        op = program.ops[number]
        if op.loop != loop or len(op.results) != 1:
            return False
        (result,) = op.results
        if op.name == ADD and len(op.operands) == 2:
            if not _is_carried_on(program, op.operands[1 - position], result):
                return False
        elif not op.kind.view or not _is_only_added_up(program, result, loop):
            return False
    return bool(users)


def _is_carried_on(program: Program, before: int, after: int) -> bool:
    """Whether `after` is the yield of the carry `before`, and the body uses neither for anything else."""
    maker = program.producer[before]
    if program.ops[maker].name != CARRY or program.users[after] != [(maker, 1)]:
        return False
    return len(program.users[before]) - len(read_behind(program, before)) == 1
