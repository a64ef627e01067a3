"""Ops that make an array from nothing: constants, iota, random bits."""

from __future__ import annotations

from typing import Any

from toast_cli.emit.spmd.piece import Piece, local_shape
from toast_cli.emit.spmd.site import Site
from toast_cli.plan.sharding import replicated, shards
from toast_cli.xla import ir


def constant(site: Site) -> list[Piece]:
    """Equal elements are as many as are needed; of others each device takes its part."""
    (wanted,) = site.wanted
    literal = site.operation.attributes["value"]
    if not any(wanted):
        return site.localise(site.wanted)
    if not isinstance(literal, ir.DenseElementsAttr) or not literal.is_splat:
        return site.localise((replicated(len(wanted)),))
    value = site.result(0)
    kind = site.build.type(value.dtype, local_shape(value.shape, wanted, site.sizes))
    site.operation.attributes["value"] = ir.DenseElementsAttr.get_splat(kind, splat_value(literal))
    return site.localise(site.wanted)


def splat_value(literal: Any) -> Any:
    """The one value of a constant of equal elements, as an attribute."""
    return literal.get_splat_value()


def iota(site: Site) -> list[Piece]:
    """Counting begins where the device's piece does."""
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
