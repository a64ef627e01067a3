"""Custom calls on shards; a hand-written kernel gets a smaller grid."""

from __future__ import annotations

from math import prod

from toast_cli.emit.spmd.piece import Piece
from toast_cli.emit.spmd.rules.plain import plain
from toast_cli.emit.spmd.site import Site
from toast_cli.kernels.local import run_on_part


def custom_call(site: Site) -> list[Piece]:
    """The same call on shards, with the kernel adapted to their shape."""
    kernel, at = site.op.kernel, site.alignment()
    pieces = plain(site)
    if kernel is not None:
        pieces_of = {factor: prod(site.sizes[axis] for axis in axes) for factor, axes in at.axes.items()}
        run_on_part(site.operation, kernel, pieces_of)
    return pieces
