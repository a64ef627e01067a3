"""Broadcast gathers: instead of a broadcast, its operand is gathered and broadcast afterwards.

This also holds for elementwise functions of a broadcast, and for gathers along dimensions of the broadcast's operand
(libtpu 0.0.42.1; the gradients of splash attention read such arrays). Without this pass the whole broadcast is
gathered.

Enters: a program, a value, and the dimensions that are gathered. Leaves: the fraction of the value that moves.
"""

from __future__ import annotations

from collections.abc import Collection

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Program
from toast_cli.program.ops import BROADCAST_IN_DIM

NAME = "broadcast-gathers"


def gathered_part(profile: CompilerProfile, program: Program, value: int, dims: Collection[int]) -> float:
    """Fraction, at most 1, of a value that its all-gather moves. dims: its split dimensions."""
    part, found = 1.0, set(dims)
    while NAME in profile.passes:
        op = program.ops[program.producer[value]]
        if op.name == BROADCAST_IN_DIM:
            place = {factors: d for d, factors in enumerate(op.rule.operands[0]) if factors}
            read = [place.get(op.rule.results[0][d]) for d in found]
            if None in read:
                break
            found = {d for d in read if d is not None}
            part *= program.values[op.operands[0]].elements / max(1, program.values[value].elements)
        elif not (op.kind.elementwise and len(op.operands) == 1):
            break
        value = op.operands[0]
    return part
