"""Ops that are the same on a piece as on the whole: only their types change.

Elementwise work, contractions, transposes, reshapes whose splits line up, broadcasts, and everything that goes along
whole dimensions (sorts, Cholesky factors) and has others that pass through. A contraction over a split dimension
leaves sums that are partial.
"""

from __future__ import annotations

from toast_cli.emit.spmd.piece import Piece
from toast_cli.emit.spmd.site import Site
from toast_cli.plan.sharding import replicated


def plain(site: Site) -> list[Piece]:
    """The same operation on pieces."""
    at = site.alignment()
    site.bring_all(at.operands)
    return site.localise(at.results, at.partial)


def whole(site: Site) -> list[Piece]:
    """The operation on whole arrays, on every device: what nobody knows better."""
    site.bring_all(tuple(site.whole(k) for k in range(len(site.operands))))
    return site.localise(tuple(replicated(len(site.result(k).shape)) for k in range(len(site.op.results))))


def one_device(site: Site) -> list[Piece]:
    """The number of a device, in a program for one device."""
    value = site.result(0)
    return site.replaced([site.build.constant(0, value.dtype)], (replicated(0),))
