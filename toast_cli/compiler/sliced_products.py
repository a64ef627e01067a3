"""Sliced products: a contraction of which only a slice is read makes no more than the slice.

XLA puts the slice before the contraction, on the operand that has the dimension (`AlgebraicSimplifier`, slice of a
dot): a prefill that returns the logits of the last position multiplies that position alone, so that the logits of all
others are never in memory. Seen in a prefill of GPT-2 compiled by libtpu 0.0.42.1 for v5e: 0.85 GiB predicted and 0.48
needed. Time still counts the whole product. Without this pass the whole product is written.

Enters: a program and the result of a contraction. Leaves: whether a slice of it is all that is made.
"""

from __future__ import annotations

from toast_cli.program.model import Program
from toast_cli.program.ops import SLICE

NAME = "sliced-products"


def is_sliced(program: Program, value: int) -> bool:
    """Whether all that reads the result of a contraction is one slice in the same loop."""
    users, maker = program.users[value], program.ops[program.producer[value]]
    if len(users) != 1 or not maker.kind.contraction:
        return False
    reader = program.ops[users[0][0]]
    return reader.name == SLICE and reader.loop == maker.loop
