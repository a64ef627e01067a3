"""Reductions along sharded dimensions: each device reduces its shard, and the results are partial.

This suffices if the body is one operation that collectives support. Any other body (an argmax) then reduces the
gathered results of all devices.
"""

from __future__ import annotations

from typing import Any

from toast_cli.emit.spmd.devices import Piece, groups
from toast_cli.emit.spmd.site import Site
from toast_cli.program.ops import REDUCERS
from toast_cli.xla import splat_number
from toast_cli.xla.build import identity


def reduce(site: Site) -> list[Piece]:
    """A reduction of one or several arrays."""
    at = site.alignment()
    if not at.partial:
        site.bring_all(at.operands)
        return site.localise(at.results)
    for k, sharding in enumerate(at.operands):
        site.bring(k, sharding)
    count = len(site.op.results)
    reducer = body_reducer(site.operation.regions[0])
    if reducer is not None and count == 1 and identity(reducer, site.result(0).dtype) is not None:
        start_once(site, count, reducer, at.partial)
        site.read()
        return site.localise(at.results, at.partial, reducer)
    site.read()
    return again(site, site.localise(at.results), at.partial)


def body_reducer(region: Any) -> str | None:
    """The op that a body consists of, if it is one op of its two arguments (`add`); None for any other body."""
    block = region.blocks[0]
    operations = [op.operation for op in block.operations]
    if len(operations) != 2 or len(block.arguments) != 2:
        return None
    name = operations[0].name.removeprefix("stablehlo.")
    reads = list(operations[0].operands)
    both = reads in ([block.arguments[0], block.arguments[1]], [block.arguments[1], block.arguments[0]])
    return name if name in REDUCERS and both and operations[1].operands[0] == operations[0].results[0] else None


def start_once(site: Site, k: int, reducer: str, axes: tuple[int, ...]) -> None:
    """Replaces initial value k by the neutral element on all devices along `axes` but one."""
    neutral = identity(reducer, site.operand(k).dtype)
    if neutral is None or splat_number(site.operands[k].handle) == neutral:
        return
    piece = site.operands[k]
    nothing = site.build.constant(neutral, site.operand(k).dtype, site.local(k))
    site.operands[k] = Piece(site.devices.on_first(axes, piece.handle, nothing), piece.sharding)


def again(site: Site, found: list[Piece], axes: tuple[int, ...]) -> list[Piece]:
    """Gathers the results of all devices along `axes` and reduces them with the same body."""
    build, operation = site.build, site.operation
    with site.behind():
        gathered = []
        for piece in found:
            shape = tuple(piece.handle.type.shape)
            row = build.reshape(piece.handle, (1, *shape))
            gathered.append(build.all_gather(row, 0, groups(axes, site.sizes)))
        second = operation.clone(ip=build.ip).operation
        for k, handle in enumerate(gathered):
            second.operands[k] = handle
        second.attributes["dimensions"] = build.i64s([0])
    return [Piece(result, piece.sharding) for result, piece in zip(second.results, found, strict=True)]
