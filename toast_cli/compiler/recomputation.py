"""Recomputation: each kernel that reads a value recomputes it where that moves fewer bytes.

With n readers, a value of v bytes that is computed from i bytes in memory moves

    computed again: n i          written: i + v + n v

bytes (transcendental functions are no dearer than additions on units that have them in hardware). The result of a
contraction is not recomputed; its bytes are in registers when the value is written, so they count in `n i` but not in
`i`. Seen in programs compiled by libtpu 0.0.42.1 for v4 to v6e. Without this pass a value that several kernels read is
written once.

Enters: the number of kernels that read a value, and the bytes it is computed from. Leaves: whether it is recomputed.
"""

from __future__ import annotations

NAME = "recomputation"


def pays(readers: int, size: int, read: int, fresh: int) -> bool:
    """Whether `readers` kernels recompute a value of `size` bytes from `read` bytes, of which `fresh` are results of
    contractions."""
    return readers * read < read - fresh + size + readers * size
