"""Shared exponentials: what two contractions read, and takes exponentials to compute, counts as written.

Where two contractions read exponentials and the like of one array (the probabilities of an attention), XLA:TPU (libtpu
0.0.42.1) writes them in some programs and has both contractions compute them in others. Memory is counted as if they
were written, which is the safe side, and time as if they were not. Convolutions compute them. Without this pass nobody
writes them.

Enters: the contractions that read a value. Leaves: whether the value counts as written.
"""

from __future__ import annotations

from toast_cli.program.ops import OpKind

NAME = "shared-exponentials"


def is_written(readers: list[OpKind]) -> bool:
    """Whether two contractions share what they read; readers: each as often as it reads."""
    return sum(kind.contraction for kind in readers) > 1
