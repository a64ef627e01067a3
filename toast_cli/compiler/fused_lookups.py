"""Fused look-ups: gathers are fused into their readers, and scatters fuse the computation of their updates.

XLA:GPU counts a gather among the cheap operations, as it does a slice, and computes it in each kernel that reads its
rows, forward and backward, unless that is a product or a library's convolution; and a scatter's kernel computes the
updates that it adds. Messages along the edges of a graph, with attention over them, are never materialised. XLA:TPU has
kernels of its own for both, which read and write memory. Seen in graph networks with attention and with sums, compiled
by jaxlib 0.10.2 for H100. Without this pass look-ups and updates are written.

Enters: an op. Leaves: whether it is fused into its readers, or fuses its operands.
"""

from __future__ import annotations

from toast_cli.program.model import Op
from toast_cli.program.ops import SCATTER

NAME = "fused-lookups"


def is_fused(op: Op) -> bool:
    """Whether an op is fused into the kernels that read it, other than contractions."""
    return op.kind.lookup and not op.kind.updates


def computes_updates(op: Op) -> bool:
    """Whether the kernel of an op computes its updates."""
    return op.name == SCATTER
