"""Sunk conversions: what is only widened where it is read is moved before it is widened.

XLA sinks conversions, and reshapes, below the collectives that move their results (seen in programs compiled by libtpu
0.0.42.1 and by XLA:CPU of jaxlib 0.10.2), where the narrower array is not in memory in its wide form anyway. Without
this pass an array moves in its own type.

Enters: a program and which of its values are stored. Leaves: how many bytes a reshard of a value moves.
"""

from __future__ import annotations

from toast_cli.program.model import Program
from toast_cli.program.ops import CONVERT, RESHAPE

NAME = "sunk-conversions"


def moved_bytes(program: Program, stored: list[bool], value: int) -> int:
    """Bytes of the value as it moves."""
    least = program.values[value].bytes
    while not stored[value]:
        op = program.ops[program.producer[value]]
        if op.name not in (CONVERT, RESHAPE):
            break
        value = op.operands[0]
        least = min(least, program.values[value].bytes)
    return least
