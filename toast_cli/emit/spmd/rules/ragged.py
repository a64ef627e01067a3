"""Ragged dots (`chlo.ragged_dot`) on local shapes.

A device with some of the rows counts how many of them belong to each group, from the cumulative sum of the group sizes.
A device with some of the groups moves their rows to the front, where the operation expects them, and moves the results
back; all other rows are zero, and the results partial.
"""

from __future__ import annotations

from typing import Any

from toast_cli.emit.spmd.devices import Piece
from toast_cli.emit.spmd.site import Site
from toast_cli.frontend.ragged_dots import RaggedDot, group_factor, ragged_dot
from toast_cli.plan.sharding import shards
from toast_cli.xla.build import INDEX, Builder


def ragged(site: Site) -> list[Piece]:
    """A ragged dot, sharded along any dimension."""
    numbers = ragged_dot(site.operation)
    at = site.alignment()
    site.bring_all(at.operands)
    if numbers is None:
        return site.localise(at.results, at.partial)
    by_rows = at.operands[0][numbers.ragged]
    by_groups = at.axes.get(group_factor(site.op.rule, numbers), ())
    if not by_rows and not by_groups:
        return site.localise(at.results, at.partial)
    build, rows = site.build, site.local(0)[numbers.ragged]
    sizes = site.operands[2].handle
    first, end = group_bounds(build, sizes)
    offset = site.devices.offset(by_rows, rows) if by_rows else build.constant(0, INDEX)
    first, end = (within(build, bound, offset, rows) for bound in (first, end))
    if not by_groups:
        site.operation.operands[2] = build.convert(build.binary("subtract", end, first), site.operand(2).dtype)
        return site.localise(at.results, at.partial)
    count = sizes.type.shape[0] // shards((by_groups,), site.sizes)
    own = site.devices.offset(by_groups, count)
    first, end = (build.dynamic_slice(bound, [own], (count,)) for bound in (first, end))
    site.operation.operands[2] = build.convert(build.binary("subtract", end, first), site.operand(2).dtype)
    begin = build.reshape(build.slice_dim(first, 0, 0, 1), ())
    last = build.reshape(build.slice_dim(end, 0, count - 1, count), ())
    for k, dim in enumerate((numbers.ragged, numbers.right_ragged)):
        if dim >= 0:
            site.operation.operands[k] = shifted(build, site.operands[k].handle, dim, begin, rows, behind=True)
    (piece,) = site.localise(at.results, at.partial)
    if count == 1:
        piece = _beside_empty_group(site, numbers, piece)
    if numbers.contracts_rows:
        return [piece]
    with site.behind():
        shape, dim = tuple(piece.handle.type.shape), numbers.result_ragged
        count_of_rows = build.broadcast(build.binary("subtract", last, begin), shape)
        inside = build.compare("LT", build.iota(INDEX, shape, dim), count_of_rows)
        found = build.select(inside, piece.handle, build.constant(0, site.result(0).dtype, shape))
        back = build.binary("subtract", build.constant(rows, INDEX), begin)
        return [Piece(shifted(build, found, dim, back, rows, behind=False), piece.sharding, piece.partial)]


def _beside_empty_group(site: Site, numbers: RaggedDot, piece: Piece) -> Piece:
    """Adds an empty group to a device's only one. XLA:TPU (libtpu 0.0.42.1) puts the size of a single group in scalar
    memory, where its kernel does not find it."""
    build, operation = site.build, site.operation

    def longer(value: Any, dim: int) -> Any:
        shape = tuple(value.type.shape)
        more = [int(d == dim) for d in range(len(shape))]
        return build.pad(value, build.constant(0, str(value.type.element_type)), [0] * len(shape), more)

    operation.operands[2] = longer(operation.operands[2], 0)
    if numbers.group >= 0:
        operation.operands[1] = longer(operation.operands[1], numbers.group)
        return piece
    dtype, (_, *others) = site.result(0).dtype, tuple(piece.handle.type.shape)
    piece.handle.set_type(build.type(dtype, (2, *others)))
    with site.behind():
        return Piece(build.slice_dim(piece.handle, 0, 0, 1), piece.sharding, piece.partial)


def group_bounds(build: Builder, sizes: Any) -> tuple[Any, Any]:
    """The first row of each group, and the one after its last: cumulative sums along the last dimension of `sizes`."""
    sizes = build.convert(sizes, INDEX)
    shape = tuple(sizes.type.shape)
    *_, groups = shape
    made = build.make(
        "reduce_window",
        [sizes, build.constant(0, INDEX)],
        [sizes.type],
        regions=1,
        window_dimensions=build.i64s([1] * (len(shape) - 1) + [groups]),
        padding=build.table([[0, 0]] * (len(shape) - 1) + [[groups - 1, 0]]),
    )
    build.body(made.regions[0], [build.type(INDEX, ())] * 2, lambda a, b: [build.binary("add", a, b)])
    return build.binary("subtract", made.results[0], sizes), made.results[0]


def within(build: Builder, bounds: Any, offset: Any, rows: int) -> Any:
    """Converts bounds among all rows to bounds among the `rows` from `offset` on."""
    local = build.binary("subtract", bounds, build.broadcast(offset, tuple(bounds.type.shape)))
    return build.one("clamp", [build.constant(0, INDEX), local, build.constant(rows, INDEX)], local.type)


def shifted(build: Builder, value: Any, dim: int, start: Any, rows: int, *, behind: bool) -> Any:
    """Slices `rows` rows from `start` on, of the value with as many zeros behind it or else in front of it."""
    shape = tuple(value.type.shape)
    zeros = [rows if d == dim else 0 for d in range(len(shape))]
    none = [0] * len(shape)
    fill = build.constant(0, str(value.type.element_type))
    longer = build.pad(value, fill, *((none, zeros) if behind else (zeros, none)))
    return build.dynamic_slice(
        longer, [start if d == dim else build.constant(0, INDEX) for d in range(len(shape))], shape
    )
