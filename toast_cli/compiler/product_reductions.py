"""Product reductions: the kernel of a contraction adds up its result before it writes it.

A reduction that is all that reads a contraction's result, finished or not, runs in the contraction's kernel, along any
dimensions: of distances to a codebook only the number of the nearest entry is written, and of scores only their
largest. Seen in single products and convolutions, in f32 and bf16, and in a vector-quantised autoencoder, compiled by
libtpu 0.0.42.1 for v5e. Where the result is read once more for what the reduction found (a softmax) it is written.
Without this pass it always is.

Enters: a program, a contraction and an operation that reads its result. Leaves: whether the one is part of the other's
kernel.
"""

from __future__ import annotations

from toast_cli.program.model import Program
from toast_cli.program.ops import REDUCE

NAME = "product-reductions"
NOTHING = -1


def reduces(program: Program, latest: list[float], reader: int, product: int, value: int) -> bool:
    """Whether op `reader` is a reduction of `value`, which the kernel of `product` makes, and of nothing that is not
    there then. latest: see `output_fusion.finishes`."""
    op = program.ops[reader]
    others = (latest[v] for v in op.operands if v != value)
    return op.name == REDUCE and max(others, default=NOTHING) <= product
