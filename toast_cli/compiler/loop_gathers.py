"""Loop gathers first: a loop gathers all loop-invariant arrays at the start of an iteration, instead of where they are
read.

Seen in loops compiled by libtpu 0.0.42.1 for v5e, and for no other chip. Without this pass a copy is made by its first
reader.

Enters: a loop and the first reader of a copy in it. Leaves: when the copy is made.
"""

from __future__ import annotations

from toast_cli.program.model import Program

NAME = "loop-gathers-first"


def made_at(program: Program, loop: int, home: int, first: int) -> int:
    """Half step at which a copy of an array of loop `home` (-1: outside of all loops) is made in `loop`, whose first
    read is at `first`."""
    return min(first, 2 * program.loops[loop].first) if loop >= 0 and loop != home else first
