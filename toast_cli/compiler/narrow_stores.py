"""Narrow stores: a contraction's result that is later widened is written before it is widened.

A bf16 result that is converted to f32 (and perhaps reshaped) for its readers is stored as bf16, since each reader can
fuse the conversion. Seen in programs compiled by libtpu 0.0.42.1 for v4 to v6e. Without this pass the widened array is
written.

Enters: a program, and a value that would be written. Leaves: the values that are written instead.
"""

from __future__ import annotations

from toast_cli.program.model import Program
from toast_cli.program.ops import CONVERT, RESHAPE

NAME = "narrow-stores"


def narrower_views(program: Program, sizes: list[int], stored: list[bool], value: int) -> list[int]:
    """The values that a contraction's result is a widening view of, the narrowest last; empty if it widens none.

    sizes: [values] bytes. stored: [values] whether it is written, as decided so far.
    """
    ops, producer = program.ops, program.producer
    found: list[int] = []
    views: list[int] = []
    source = value
    while (op := ops[producer[source]]).name in (CONVERT, RESHAPE):
        source = op.operands[0]
        views.append(source)
        if stored[source] or sizes[source] > sizes[value]:
            break
        if sizes[source] < sizes[value]:
            found = views.copy()
    return found
