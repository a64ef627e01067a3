"""Ops that read neighbouring or shifted elements: convolutions, pooling, slices, pads, reversals.

Along a sharded dimension each device gets the range of the operand that its part of the result depends on (see
`moves`), and then runs the same op on it, with adapted padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from toast_cli.emit.regions.moves import NeededRange, Piece, exchange, filled, from_whole, groups
from toast_cli.emit.regions.site import Alignment, Site, body_reducer
from toast_cli.frontend.rules import convolution_dims
from toast_cli.plan.reshard import Permute, exchanged, permutes, ranges_needed
from toast_cli.plan.sharding import shards
from toast_cli.program.model import Window
from toast_cli.xla import splat_number


@dataclass(frozen=True, slots=True)
class Tile:
    """The range that a device reads for its part of the result along one dimension. low, high: padding at its ends.
    span: elements with holes and padding."""

    need: NeededRange
    low: int
    high: int
    span: int


def slices(site: Site) -> list[Piece]:
    """A slice."""
    aligned, tiles = bring_ranges(site)
    names = ("start_indices", "limit_indices")
    starts, limits = ([int(n) for n in site.operation.attributes[name]] for name in names)
    for dim, own in enumerate(site.operation.operands[0].type.shape):
        if dim in tiles:
            starts[dim], limits[dim] = 0, tiles[dim].span
        elif aligned.operands[0][dim]:
            limits[dim] = own
    for name, numbers in zip(names, (starts, limits), strict=True):
        site.operation.attributes[name] = site.build.i64s(numbers)
    return site.localise(aligned.results)


def pad(site: Site) -> list[Piece]:
    """A pad, with or without interior padding."""
    aligned, tiles = bring_ranges(site, fill=1)
    names = ("edge_padding_low", "edge_padding_high")
    lows, highs = ([int(n) for n in site.operation.attributes[name]] for name in names)
    for dim, tile in tiles.items():
        lows[dim], highs[dim] = tile.low, tile.high
    for name, numbers in zip(names, (lows, highs), strict=True):
        site.operation.attributes[name] = site.build.i64s(numbers)
    return site.localise(aligned.results)


def reduce_window(site: Site) -> list[Piece]:
    """Pooling and cumulative sums, of one array or several at once."""
    aligned, tiles = bring_ranges(site, fill=len(site.op.results), arrays=len(site.op.results))
    repad(site, tiles, len(site.result(0).shape))
    return site.localise(aligned.results)


def convolution(site: Site) -> list[Piece]:
    """A convolution; each device has fewer groups if feature or batch groups are sharded.

    If image and kernel are sharded along the same windows and the result is not (the gradient of a kernel), each device
    sums over its part of the kernel, and the results are partial.
    """
    image, kernel, _ = convolution_dims(site.operation)
    summed = [w for w in site.op.windows if is_summed(site, w)]
    aligned, tiles = bring_ranges(site, summed=summed)
    partial = aligned.partial
    for window in summed:
        partial += site.operands[1].sharding[window.kernel_dim]
    repad(site, {int(image[dim]): tile for dim, tile in tiles.items()}, len(image) - 2)
    for name, dim in (("feature_group_count", image.index("f")), ("batch_group_count", image.index("b"))):
        count = int(site.operation.attributes[name].value)
        common = site.op.rule.operands[1][kernel.index("o")]
        parts = prod(
            shards((aligned.axes.get(f, ()),), site.sizes) for f in site.op.rule.operands[0][dim] if f in common
        )
        site.operation.attributes[name] = site.build.i64(count // parts)
    return site.localise(aligned.results, partial)


def is_summed(site: Site, window: Window) -> bool:
    """True if a convolution contracts a window along which image and kernel are sharded."""
    axes = site.operands[0].sharding[window.operand_dim]
    return (
        bool(axes)
        and axes == site.operands[1].sharding[window.kernel_dim]
        and not site.wanted[0][window.result_dim]
        and window.dilation == 1
    )


def select_and_scatter(site: Site) -> list[Piece]:
    """The gradient of max-pooling: each device processes all windows that overlap its shard, and keeps the elements in
    it.

    Windows that reach into padding, and scatters other than addition, are not sharded.
    """
    rule = site.op.rule
    windows = {window.operand_dim: window for window in site.op.windows}
    padded = any(n for n in padding_of(site, len(windows)))
    adds = body_reducer(site.operation.regions[1]) == "add"
    impossible = set[int]()
    for dim, window in windows.items():
        for f in rule.operands[0][dim]:
            (wanted,) = [axes for axes, factors in zip(site.wanted[0], rule.results[0], strict=True) if f in factors]
            parts = shards((wanted,), site.sizes)
            alike = window.inputs % parts == 0 and window.inputs // parts % window.stride == 0  # on all devices
            if padded or not adds or not alike:
                impossible.add(f)
    aligned = site.alignment(splits=rule.permutation - impossible, keeps=frozenset(impossible))
    site.bring_all(aligned.operands)
    build = site.build
    operand, source, keep = site.operands[0].handle, site.operands[1].handle, {}
    for dim, window in windows.items():
        axes = aligned.operands[0][dim]
        if not axes:
            continue
        own, step = window.inputs // shards((axes,), site.sizes), window.stride
        first = min(-((window.size - 1) // step), 0)
        count = (own - 1) // step - first + 1
        length = max(step * (count - 1) + window.size, own - step * first)
        need = NeededRange(dim, axes, window.inputs, step * first, own, length)
        spans = tuple([need.span(k) for k in range(shards((axes,), site.sizes))])
        sent = permutes(spans, window.inputs)
        operand = stretched(site, operand, [need], [sent])
        need = NeededRange(dim, axes, window.outputs, first, own // step, count)
        source = from_whole(build, site.devices, source, need)
        keep[dim] = (-step * first, own - step * first)
    site.operation.operands[0], site.operation.operands[1] = operand, source
    if not keep:
        return site.localise(aligned.results)
    result = site.operation.results[0]
    result.set_type(operand.type)
    with site.behind():
        handle = result
        for dim, (begin, end) in keep.items():
            handle = build.slice_dim(handle, dim, begin, end)
    return [Piece(handle, aligned.results[0])]


def padding_of(site: Site, dims: int) -> list[int]:
    """Low and high padding, dimension by dimension."""
    attributes = site.operation.attributes
    return [int(n) for n in np.array(attributes["padding"]).ravel()] if "padding" in attributes else [0] * 2 * dims


def reverse(site: Site) -> list[Piece]:
    """A reversal; along sharded dimensions one permute also exchanges the shards."""
    aligned = site.alignment(splits=site.op.rule.permutation)
    site.bring_all(aligned.operands)
    (piece,) = site.localise(aligned.results)
    axes = tuple(axis for dim in site.operation.attributes["dimensions"] for axis in aligned.results[0][int(dim)])
    if not axes:
        return [piece]
    with site.behind():
        pairs = [pair for g in groups(axes, site.sizes) for pair in zip(g, reversed(g), strict=True)]
        handle = site.build.permute(piece.handle, pairs)
    return [Piece(handle, piece.sharding)]


# -- ranges -----------------------------------------------------------------------------------------------------------


def bring_ranges(
    site: Site, fill: int | None = None, arrays: int = 1, summed: Sequence[Window] = ()
) -> tuple[Alignment, dict[int, Tile]]:
    """Brings the operands, the first `arrays` of them as ranges of windows along sharded dimensions.

    Args:
        fill: the operand with the value beyond the ends of the first one; None for 0. Those of further arrays
            follow it.
        summed: windows along which the second operand is sharded and contracted.

    Returns all shardings, and for each dimension that is sharded along windows the operation's local `Tile`.
    """
    rule = site.op.rule
    windows = {window.operand_dim: window for window in site.op.windows}
    impossible = {f for dim, w in windows.items() for f in rule.operands[0][dim] if not can_split(w, site, f)}
    impossible |= {f for window in summed for f in rule.operands[0][window.operand_dim]}
    current = [piece.sharding for piece in site.operands]
    aligned = site.alignment(splits=rule.permutation - impossible, keeps=frozenset(impossible))
    tiles, needed = {}, [list(sharding) for sharding in aligned.operands]
    sent: dict[int, tuple[Permute, ...] | None] = {}
    for dim, window in windows.items():
        axes = current[0][dim] if window in summed else aligned.operands[0][dim]
        if axes:
            parts = shards((axes,), site.sizes)
            tiles[dim] = tile_of(window, axes, parts, summed=window in summed)
            if window in summed:
                needed[0][dim], needed[1][window.kernel_dim] = axes, axes
            sent[dim] = exchanged(window, parts, summed=window in summed)
    for k in range(len(site.operands)):
        site.bring(k, tuple(needed[0 if k < arrays else k]))
    site.read()
    for k in range(arrays):
        handle = stretched(site, site.operands[k].handle, [tile.need for tile in tiles.values()], list(sent.values()))
        value = site.operands[fill + k].handle if fill is not None else None
        if value is not None and splat_number(value) != 0:
            for tile in tiles.values():
                handle = filled(site.build, site.devices, handle, tile.need, value)
        site.operation.operands[k] = handle
    return aligned, tiles


def stretched(site: Site, handle: Any, needs: list[NeededRange], sent: list[tuple[Permute, ...] | None]) -> Any:
    """Extends a piece to ranges along several dimensions, one after the other; zeros beyond the ends of the array.

    sent: the permutes for each; None if it is gathered. Ops that read an array through equal windows share the result.
    """

    def make() -> Any:
        extended = handle
        for need, by in zip(needs, sent, strict=True):
            if by is None:
                extended = site.build.all_gather(extended, need.dim, groups(need.axes, site.sizes))
                extended = from_whole(site.build, site.devices, extended, need)
            else:
                extended = exchange(site.build, site.devices, extended, need, by)
        return extended

    return site.scopes.get((handle, tuple(needs), site.op.windows), make) if needs else handle


def can_split(window: Window, site: Site, factor: int) -> bool:
    """True if all devices' ranges are alike, however the dimension is sharded here."""
    parts = 1
    for sharding, dims in zip(site.wanted, site.op.rule.results, strict=True):
        for axes, factors in zip(sharding, dims, strict=True):
            if factor in factors:
                parts = max(parts, shards((axes,), site.sizes))
    own, rest = divmod(window.outputs, parts)
    return (
        rest == 0
        and window.inputs % parts == 0
        and window.stride * own % window.dilation == 0
        and (parts == 1 or tile_of(window, (), parts).need.length > 0)
    )


def tile_of(window: Window, axes: tuple[int, ...], parts: int, *, summed: bool = False) -> Tile:
    """The range that each of `parts` devices needs for its part of the results; `summed`: for all results, with its
    part of the kernel."""
    ranges = ranges_needed(window, parts, summed=summed) or ((0, 0),)
    first, length = ranges[0][0], max(0, ranges[0][1] - ranges[0][0])
    pitch = ranges[1][0] - first if len(ranges) > 1 else 0
    own = window.outputs // parts
    # In elements including holes and padding.
    span = length if summed else window.stride * (own - 1) + (window.size - 1) * window.spread + 1
    low = window.low + first * window.dilation
    high = span - low - ((length - 1) * window.dilation + 1)
    return Tile(NeededRange(window.operand_dim, axes, window.inputs, first, pitch, length), low, high, span)


def repad(site: Site, tiles: dict[int, Tile], dims: int) -> None:
    """Sets the local padding of the dimensions in `tiles`."""
    attributes = site.operation.attributes
    if not tiles:
        return
    padding = padding_of(site, dims)
    for dim, tile in tiles.items():
        padding[2 * dim], padding[2 * dim + 1] = tile.low, tile.high
    attributes["padding"] = site.build.table([padding[k : k + 2] for k in range(0, 2 * dims, 2)])
