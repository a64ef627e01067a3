"""Ops that are the same on a shard as on the whole array: only their types change.

Elementwise ops, contractions, transposes, reshapes whose splits match, broadcasts, and ops along unsharded dimensions
(sorts, Cholesky factors) with batch dimensions. A contraction over a sharded dimension leaves partial sums.
"""

from __future__ import annotations

from math import prod
from typing import Any

from toast_cli.emit.spmd.devices import Piece
from toast_cli.emit.spmd.site import Site
from toast_cli.kernels.local import run_on_part
from toast_cli.plan.sharding import local_shape, replicated, shards
from toast_cli.program.model import Rule
from toast_cli.program.ops import BROADCAST_IN_DIM
from toast_cli.xla import ir

# Ops that can be told to make only a part of a dimension that no operand has.
_MAKES_DIMENSIONS = frozenset({BROADCAST_IN_DIM, "stablehlo.custom_call"})


def plain(site: Site) -> list[Piece]:
    """The same operation on shards."""
    keeps = frozenset() if site.op.name in _MAKES_DIMENSIONS else _made(site.op.rule)
    at = site.alignment(keeps=keeps)
    site.bring_all(at.operands)
    return site.localise(at.results, at.partial)


def _made(rule: Rule) -> frozenset[int]:
    """Factors that only results have, such as a reshape's whose splits do not match: a shard cannot be made of what a
    device has of the operands."""
    read = {factor for dims in rule.operands for factors in dims for factor in factors}
    return frozenset(range(len(rule.sizes))) - read


def on_every_device(site: Site) -> list[Piece]:
    """The operation on replicated arrays, on every device: the fallback."""
    site.bring_all(tuple(site.replicated(k) for k in range(len(site.operands))))
    return site.localise(tuple(replicated(len(site.result(k).shape)) for k in range(len(site.op.results))))


def one_device(site: Site) -> list[Piece]:
    """The replica id or partition id, in a program for one device."""
    value = site.result(0)
    return site.replaced([site.build.constant(0, value.dtype)], (replicated(0),))


def custom_call(site: Site) -> list[Piece]:
    """The same call on shards, with the kernel adapted to their shape."""
    kernel, at = site.op.kernel, site.alignment()
    pieces = plain(site)
    if kernel is not None:
        pieces_of = {factor: prod(site.sizes[axis] for axis in axes) for factor, axes in at.axes.items()}
        run_on_part(site.operation, kernel, pieces_of)
    return pieces


def constant(site: Site) -> list[Piece]:
    """A splat is made in the local shape; each device slices its part of other constants."""
    (wanted,) = site.wanted
    if not any(wanted):
        return site.localise(site.wanted)
    element = splat(site.operation)
    if element is None:
        return site.localise((replicated(len(wanted)),))
    value = site.result(0)
    kind = site.build.type(value.dtype, local_shape(value.shape, wanted, site.sizes))
    site.operation.attributes["value"] = ir.DenseElementsAttr.get_splat(kind, element)
    return site.localise(site.wanted)


def splat(operation: Any) -> Any | None:
    """The one element, as an attribute, of a constant of equal elements; None for other constants, and types
    unknown to Python (complex)."""
    try:
        literal = operation.attributes["value"]
    except TypeError:
        return None
    return literal.get_splat_value() if isinstance(literal, ir.DenseElementsAttr) and literal.is_splat else None


def iota(site: Site) -> list[Piece]:
    """An iota that starts at the offset of the device's shard."""
    (wanted,) = site.wanted
    dim = int(site.operation.attributes["iota_dimension"].value)
    (piece,) = site.localise(site.wanted)
    if not wanted[dim]:
        return [piece]
    build, value = site.build, site.result(0)
    with site.behind():
        length = value.shape[dim] // shards((wanted[dim],), site.sizes)
        begin = build.convert(site.devices.offset(wanted[dim], length), value.dtype)
        shape = local_shape(value.shape, wanted, site.sizes)
        return [Piece(build.binary("add", piece.handle, build.broadcast(begin, shape)), wanted)]
