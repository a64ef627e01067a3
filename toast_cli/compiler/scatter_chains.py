"""Scatter chains: what several look-ups of a table leave as its gradient is added up look-up by look-up.

XLA simplifies `a + scatter(zeros, updates)` to `scatter(a, updates)` (see `program.sums.scatters_into`), which writes
where `a` was: of an encoder's and a decoder's look-ups and the product with a tied table, two arrays of the table's
size are there at a time, not three (XLA:TPU's reports of BART's training step under data parallelism, with AdamW and
with Adafactor). The last sum is computed where it is read. Without this pass all of them are, and everything that is
added up waits for that.

Enters: a program and an op. Leaves: whether its sum is written because the next scatter adds to it.
"""

from __future__ import annotations

from toast_cli.program.model import Op, Program
from toast_cli.program.sums import scatters_into

NAME = "scatter-chains"


def is_added_to(op: Op, program: Program) -> bool:
    """Whether an op is a sum of such a chain, and another one follows."""
    if not scatters_into(op, program):
        return False
    return any(scatters_into(program.ops[user], program) for user, _ in program.users[op.results[0]])
