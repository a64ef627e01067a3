"""Sliced products: a contraction whose only reader is a slice computes only the slice.

XLA puts the slice before the contraction, on the operand that has the dimension (`AlgebraicSimplifier`, slice of a
dot): a prefill that returns the logits of the last position multiplies that position alone, so that the logits of all
others are never in memory. Seen in a prefill of GPT-2 compiled by libtpu 0.0.42.1 for v5e: 0.85 GiB predicted and 0.48
needed. XLA:GPU hands the whole product to its library first: a prefill of OPT on 8 H100 needs twice as much. Without
this pass the whole product is computed and written.

Enters: a program and the result of a contraction. Leaves: whether only a slice of it is computed, and which fraction.
"""

from __future__ import annotations

from toast_cli.program.model import Op, Program
from toast_cli.program.ops import SLICE

NAME = "sliced-products"


def is_sliced(program: Program, value: int) -> bool:
    """Whether a slice in the same loop is the only reader of a contraction's result."""
    users, maker = program.users[value], program.ops[program.producer[value]]
    if len(users) != 1 or not maker.kind.contraction:
        return False
    reader = program.ops[users[0][0]]
    return reader.name == SLICE and reader.loop == maker.loop


def part_made(program: Program, op: Op) -> float:
    """Fraction of a contraction's result that is computed."""
    if not op.kind.contraction or not is_sliced(program, op.results[0]):
        return 1.0
    read = program.ops[program.users[op.results[0]][0][0]].results[0]
    return program.values[read].elements / max(program.values[op.results[0]].elements, 1)
