"""Ops that are the same on a shard as on the whole array: only their types change.

Elementwise ops, contractions, transposes, reshapes whose splits match, broadcasts, and ops along unsharded dimensions
(sorts, Cholesky factors) with batch dimensions. A contraction over a sharded dimension leaves partial sums.
"""

from __future__ import annotations

from toast_cli.emit.spmd.piece import Piece
from toast_cli.emit.spmd.site import Site
from toast_cli.plan.sharding import replicated


def plain(site: Site) -> list[Piece]:
    """The same operation on shards."""
    at = site.alignment()
    site.bring_all(at.operands)
    return site.localise(at.results, at.partial)


def whole(site: Site) -> list[Piece]:
    """The operation on replicated arrays, on every device: the fallback."""
    site.bring_all(tuple(site.whole(k) for k in range(len(site.operands))))
    return site.localise(tuple(replicated(len(site.result(k).shape)) for k in range(len(site.op.results))))


def one_device(site: Site) -> list[Piece]:
    """The replica id or partition id, in a program for one device."""
    value = site.result(0)
    return site.replaced([site.build.constant(0, value.dtype)], (replicated(0),))
