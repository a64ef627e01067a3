"""Small gathers: an all-gather of a vector in pieces of less than a row of a tile becomes an all-reduce of the local
piece padded with zeros.

Seen in programs compiled by libtpu 0.0.42.1 for slices of v4, v5e, v5p and v6e. Without this pass every all-gather
stays one.

Enters: the shape of an array and the number of its shards. Leaves: whether an all-gather of it stays one.
"""

from __future__ import annotations

from toast_cli.compiler.profile import CompilerProfile

NAME = "small-gathers"


def stays_gather(profile: CompilerProfile, shape: tuple[int, ...], shards: int) -> bool:
    """Whether the chip's compiler keeps an all-gather of an array of that shape from that many shards."""
    return NAME not in profile.passes or len(shape) != 1 or shape[0] // shards >= profile.scatter.tile[1]
