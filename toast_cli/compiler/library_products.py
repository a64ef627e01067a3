"""Library products: the kernel of a contraction computes little besides the contraction.

XLA:GPU has contractions computed by cuBLAS or by a Triton kernel of its own. On the way in and out such a kernel
rearranges, converts, scales, adds a bias or takes the larger of two numbers: whatever reads one large array alone and
evaluates no function. All else (an activation, a gate, a residual, an optimiser's update, a sum) is a kernel of its own
that reads what the contraction wrote, or writes what it reads. XLA:TPU computes all that in the contraction's kernel.
Seen in perceptrons, attentions and transformers' steps that XLA:GPU of jax 0.11.2 compiled on an H200
(`benchmarks/gpu_timer.py`). Without this pass contractions are fused as `output_fusion` and `multi_output_fusion` say.


An array whose rows lie apart in memory (a batch of heads, [batch, sequence, heads, features]) is copied into the order
that the library wants, unless an elementwise kernel makes it, which then writes it in that order, or the other side
has so few rows that XLA multiplies without the library (a decoding step); and a transposition
that takes more than three groups of dimensions is a kernel of its own.

All that counts for time alone. Memory is counted as if the contraction did it, and one factor stands for what XLA:GPU
keeps besides (see `temporaries`), which is nearer to its buffer assignments.

Enters: an op, and what is read to compute its operands. Leaves: whether it is part of a contraction's kernel, and which
operands of a contraction are copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from math import prod

from toast_cli.program.model import Op, Program
from toast_cli.program.ops import SELECT, TRANSPOSE

NAME = "library-products"
SMALL = 8  # ratio of bytes from which an array counts as small beside another (a bias)
MOST_GROUPS = 3
FEW_ROWS = 16


def finishes(op: Op, size: int, made: int, others: Iterable[int]) -> bool:
    """Whether an op with `made` result bytes is fused into the epilogue of a contraction of `size` bytes. others: ranks
    of the arrays that each other operand is computed from."""
    other = op.kind.transcendental or op.kind.polynomial or op.name == SELECT
    return not other and not reorders(op) and made <= size and all(rank <= 1 for rank in others)


def computes(effort: int, read: Iterable[int]) -> bool:
    """Whether a contraction fuses the computation of an operand. effort: 0 if that evaluates no function. read: bytes
    of each array that it reads."""
    sizes = sorted(read, reverse=True)
    return effort == 0 and not any(SMALL * size > sizes[0] for size in sizes[1:])


def reorders(op: Op) -> bool:
    """Whether an op transposes more than a library call can absorb."""
    if op.name != TRANSPOSE:
        return False
    taken, made = (_factors(op, dims) for dims in (op.rule.operands[0], op.rule.results[0]))
    places = [taken.index(factor) for factor in made]
    return 1 + sum(after != before + 1 for before, after in pairwise(places)) > MOST_GROUPS


def copied_operands(program: Program, op: Op) -> tuple[int, ...]:
    """Positions of a contraction's operands that are copied into another dimension order."""
    if not op.kind.contraction or len(op.operands) != 2:
        return ()
    left, right, out = (set(_factors(op, dims)) for dims in (*op.rule.operands[:2], op.rule.results[0]))
    if min(prod(op.rule.sizes[factor] for factor in side & out) for side in (left - right, right - left)) < FEW_ROWS:
        return ()
    found = []
    for position, value in enumerate(op.operands):
        sides = [(f in left & right, f in out) for f in _factors(op, op.rule.operands[position])]
        groups = [side for side, _ in groupby(sides)]
        if len(set(groups)) < len(groups) and not _is_made_elementwise(program, value):
            found.append(position)
    return tuple(found)


def _is_made_elementwise(program: Program, value: int) -> bool:
    maker = program.ops[program.producer[value]]
    while maker.kind.view:
        maker = program.ops[program.producer[maker.operands[0]]]
    return maker.kind.elementwise


def _factors(op: Op, dims: Sequence[Sequence[int]]) -> list[int]:
    """Factors of more than one element, in the order of an array's dimensions."""
    return [factor for dim in dims for factor in dim if op.rule.sizes[factor] > 1]
