"""Scatter starts: one kernel initialises the operands of several scatters.

A scatter into zeros (a sum over the edges of each node, the gradient of a look-up) adds to them in their own buffer.
XLA:GPU makes the zeros of all scatters of one shape in one kernel, before the first of them, so that the arrays of the
last ones are live through the whole step: 6 of the 12 of a graph network's training step at its peak. XLA:TPU makes
each as its scatter runs. Seen in a network of jraph (`python -m benchmarks.real.quick "jraph network" --split fit
--mesh h100-8`) and in networks with attention over edges, compiled by jaxlib 0.10.2 for H100. Without this pass an
array is live from its scatter on.

Enters: a program and its schedule. Leaves: for each array how long it is live before its scatter.
"""

from __future__ import annotations

from typing import NamedTuple

from toast_cli.compiler.liveness import Interval, Lives
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Program
from toast_cli.program.ops import SCATTER
from toast_cli.program.sums import scatters_into

NAME = "scatter-starts"


class ScatterStart(NamedTuple):
    """interval: from the array's initialisation to its scatter. added: the scatter adds directly to the other operand
    of an addition (see `scatters_into`), unless its result is partial."""

    interval: Interval
    added: bool


def scatter_starts(
    program: Program, free: tuple[bool, ...], lives: Lives, profile: CompilerProfile
) -> dict[int, ScatterStart]:
    """Result of a scatter -> the early initialisation of its array. free: [values] made of constants alone."""
    if NAME not in profile.passes:
        return {}
    alike: dict[tuple[tuple[int, ...], str, int], list[int]] = {}
    for number, op in enumerate(program.ops):
        if op.name == SCATTER and len(op.results) == 1 and free[op.operands[0]]:
            value = program.values[op.results[0]]
            alike.setdefault((value.shape, value.dtype, op.loop), []).append(number)
    waits = {}
    for numbers in alike.values():
        first = min(lives.times[number] for number in numbers)
        for number in numbers:
            if first < lives.times[number]:
                result = program.ops[number].results[0]
                added = any(scatters_into(program.ops[user], program) for user, _ in program.users[result])
                waits[result] = ScatterStart((first, lives.times[number] - 1), added)
    return waits
