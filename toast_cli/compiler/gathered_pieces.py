"""Gathered pieces: a copy assembles the pieces of an all-gather, unless they are whole tiles.

An all-gather writes the pieces one after another, each in tiles of its own. These form the matrix without a copy if
each has whole rows of tiles, 8 of f32 as of bf16, along the gathered dimension; the rows of tiles may be either
dimension for a product, but must be the looked-up one for look-ups. Otherwise a copy assembles it, and both are in
memory: a table of 50,257 words on 16 devices, and any that is split along less than 128 features each and looked up.
Seen in single look-ups and products of gathered matrices (64 to 2,048 features, 15,000 to 640,000 rows) compiled by
libtpu 0.0.42.1 for v4, v5e and v6e (`python -m benchmarks.singles`). Without this pass a gathered array is in memory
once.

Enters: the local piece, and the gathered dimension. Leaves: whether it is copied.
"""

from __future__ import annotations

from toast_cli.compiler.profile import CompilerProfile

NAME = "gathered-pieces"


def are_copied(profile: CompilerProfile, piece: tuple[int, ...], dim: int, *, looked_up: bool) -> bool:
    """Whether gathered pieces are copied. piece: local shape of a matrix before it is gathered along `dim`."""
    if NAME not in profile.passes or len(piece) != 2:
        return False
    rows, lanes = profile.memory_tile
    return piece[dim] % (lanes if looked_up and dim == 1 else rows) != 0
