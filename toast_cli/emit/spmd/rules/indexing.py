"""Gathers, scatters, and dynamic slices and updates on local shapes.

If the indexed dimension is sharded (the rows of a table), each device gathers the rows it has and zero for the rest, so
results are partial sums; and each device updates the rows it has, since updates outside an array do nothing. If the
indices are sharded, each device gathers its own rows; scatters are then partial, and all but one device start from
zero.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from toast_cli.emit.spmd.devices import Piece
from toast_cli.emit.spmd.rules.reducing import body_reducer, start_once
from toast_cli.emit.spmd.site import Site
from toast_cli.xla.build import identity

# Index types for computing: signed, and wide enough.
_SIGNED = {"ui32": "i64", "i64": "i64", "ui64": "i64"}


def gather(site: Site) -> list[Piece]:
    """A gather from a table that may be sharded along any dimension."""
    where = Places.of(site, "start_index_map", "offset_dims")
    sizes = [int(n) for n in site.operation.attributes["slice_sizes"]]
    table, rule = site.operand(0), site.op.rule
    blocks = {d for d in where.indexed if sizes[d] not in (1, table.shape[d])}
    at = site.alignment(keeps=factors_of(rule.operands[0], blocks))
    site.bring_all(at.operands)
    local = site.local(0)
    split = {d for d in where.indexed if at.operands[0][d] and sizes[d] == 1}
    for d, axes in enumerate(at.operands[0]):
        if axes and d not in split and sizes[d] == table.shape[d]:
            sizes[d] = local[d]
    site.operation.attributes["slice_sizes"] = site.build.i64s(sizes)
    if not split:
        return site.localise(at.results, at.partial)
    mask = where.shift(site, split, clamped=True)
    (piece,) = site.localise(at.results)
    with site.behind():
        build, shape = site.build, tuple(piece.handle.type.shape)
        batch = [d for d in range(len(shape)) if d not in where.window]
        nothing = build.constant(0, table.dtype, shape)
        found = build.select(build.broadcast(mask, shape, batch), piece.handle, nothing)
    return [Piece(found, at.results[0], at.partial, "or" if table.dtype == "i1" else "add")]


def scatter(site: Site) -> list[Piece]:
    """A scatter into one or several arrays."""
    where = Places.of(site, "scatter_dims_to_operand_dims", "update_window_dims")
    count, rule = len(site.op.results), site.op.rule
    reducer = body_reducer(site.operation.regions[0])
    if count > 1 or reducer is None or identity(reducer, site.result(0).dtype) is None:
        keeps = rule.reduction  # the order of updates matters
    else:
        keeps = frozenset[int]()
    # A window of some rows of a sharded dimension may cross the boundary of a shard. One as long as the dimension is
    # split like it, and its index stays: every device drops an update that does not begin at 0.
    array, update = site.operand(0).shape, site.operand(count + 1).shape
    windowed = [d for d in range(len(array)) if d not in where.inserted]
    rows = {d: update[along] for d, along in zip(windowed, where.window, strict=True) if d in where.indexed}
    keeps |= factors_of(rule.operands[0], {d for d, size in rows.items() if size not in (1, array[d])})
    at = site.alignment(keeps=keeps)
    for k, sharding in enumerate(at.operands):
        site.bring(k, sharding)
    if at.partial:
        assert reducer is not None
        start_once(site, 0, reducer, at.partial)
    site.read()
    split = {d for d in where.indexed if at.operands[0][d] and rows.get(d, 1) != array[d]}
    if split:
        where.shift(site, split, clamped=False)
    return site.localise(at.results, at.partial, reducer or "add")


def dynamic_slice(site: Site) -> list[Piece]:
    """A dynamic slice. Dimensions that are sliced whole are whole in a shard. Starts are clamped: if a device takes a
    slice of the slice, XLA adds the starts of both, and does not clamp the first."""
    at = site.alignment()
    site.bring_all(at.operands)
    taken = [int(n) for n in site.operation.attributes["slice_sizes"]]
    for d, (size, whole) in enumerate(zip(taken, site.operand(0).shape, strict=True)):
        if 1 < size < whole:
            site.operation.operands[1 + d] = clamped(site, 1 + d, whole - size)
    for d, (own, axes) in enumerate(zip(site.local(0), at.operands[0], strict=True)):
        if axes:
            taken[d] = own
    site.operation.attributes["slice_sizes"] = site.build.i64s(taken)
    return site.localise(at.results)


def dynamic_update_slice(site: Site) -> list[Piece]:
    """Along a sharded dimension each device writes the part of the update that is in its shard."""
    at = site.alignment()
    site.bring_all(at.operands)
    whole, update = site.operand(0).shape, site.operand(1).shape
    split = [d for d, axes in enumerate(at.operands[0]) if axes and not at.operands[1][d]]
    if not split:
        return site.localise(at.results)
    build, local = site.build, site.local(0)
    given = tuple(site.operands[1].handle.type.shape)
    low = [local[d] if d in split else 0 for d in range(len(whole))]
    fill = build.constant(0, site.operand(0).dtype)
    around = build.pad(site.operands[1].handle, fill, low, low)
    inside = build.pad(build.constant(1, "i1", given), build.constant(0, "i1"), low, low)
    shape = tuple(local[d] if d in split else given[d] for d in range(len(whole)))
    starts, begins = [], []
    for d in range(len(whole)):
        start = site.operands[2 + d].handle
        if d not in split:
            starts.append(site.devices.constant(0))
            begins.append(start)
            continue
        dtype = site.operand(2 + d).dtype
        start = build.convert(clamped(site, 2 + d, whole[d] - update[d]), "i32")
        own = build.binary("add", site.devices.offset(at.operands[0][d], local[d]), site.devices.constant(local[d]))
        starts.append(build.binary("subtract", own, start))
        begins.append(build.constant(0, dtype))
    part = build.dynamic_slice(around, starts, shape)
    mask = build.dynamic_slice(inside, starts, shape)
    piece = site.operands[0].handle
    there = piece if shape == local else build.dynamic_slice(piece, begins, shape)
    site.operation.operands[1] = build.select(mask, part, there)
    for d, begin in enumerate(begins):
        site.operation.operands[2 + d] = begin
    return site.localise(at.results)


def clamped(site: Site, k: int, most: int) -> Any:
    """Operand k, a scalar, clamped to 0 .. `most`."""
    build, start, dtype = site.build, site.operands[k].handle, site.operand(k).dtype
    return build.one("clamp", [build.constant(0, dtype), start, build.constant(most, dtype)], start.type)


def factors_of(dims: tuple[tuple[int, ...], ...], chosen: set[int]) -> frozenset[int]:
    """Factors of these dimensions."""
    return frozenset(factor for d in chosen for factor in dims[d])


@dataclass(frozen=True)
class Places:
    """The index structure of a gather or scatter.

    Attributes:
        operand: position of the indices. vector: their index vector dimension; their rank if they are scalars.
        indexed: the array's dimensions that the index components index, in order.
        window: dimensions of the result (of the updates) that do not come from the indices. inserted: dimensions of
            the array that the windows lack.
    """

    operand: int
    vector: int
    indexed: tuple[int, ...]
    window: tuple[int, ...]
    inserted: tuple[int, ...]

    @classmethod
    def of(cls, site: Site, indexed: str, window: str) -> Places:
        """Reads the dimension numbers of a gather or scatter."""
        name = "dimension_numbers" if "dimension_numbers" in site.operation.attributes else "scatter_dimension_numbers"
        text = str(site.operation.attributes[name])

        def numbers(key: str) -> tuple[int, ...]:
            found = re.search(rf"\b{key} = \[([^\]]*)\]", text)
            return tuple(int(n) for n in found[1].split(",") if n.strip()) if found else ()

        vector = re.search(r"index_vector_dim = (\d+)", text)
        inserted = numbers("inserted_window_dims") + numbers("input_batching_dims")
        return cls(
            len(site.op.results) if site.operation.name == "stablehlo.scatter" else 1,
            int(vector[1]) if vector else 0,
            numbers(indexed),
            numbers(window),
            inserted,
        )

    def shift(self, site: Site, split: set[int], *, clamped: bool) -> Any:
        """Replaces the operation's indices by indices into the device's shard.

        Args:
            split: sharded dimensions. clamped: indices outside the whole array mean its ends.

        Returns a mask of those in the shard: booleans in the shape of the indices without the index vector dimension.
        """
        build, whole, local = site.build, site.operand(0).shape, site.local(0)
        indices = site.operands[self.operand].handle
        shape = tuple(indices.type.shape)
        dtype = _SIGNED.get(site.operand(self.operand).dtype, "i32")
        table = build.convert(indices, dtype)
        rows = tuple(n for d, n in enumerate(shape) if d != self.vector)
        single = self.vector == len(shape)
        zero = build.constant(0, dtype)
        mask, parts = None, []
        for k, d in enumerate(self.indexed):
            part = table if single else build.slice_dim(table, self.vector, k, k + 1)
            if d in split:
                if clamped:
                    last = build.constant(whole[d] - 1, dtype)
                    part = build.one("clamp", [zero, part, last], part.type)
                at = tuple(part.type.shape)
                begin = build.convert(site.devices.offset(site.operands[0].sharding[d], local[d]), dtype)
                part = build.binary("subtract", part, build.broadcast(begin, at))
                first = build.compare("GE", part, build.constant(0, dtype, at))
                last = build.compare("LT", part, build.constant(local[d], dtype, at))
                inside = build.reshape(build.binary("and", first, last), rows)
                mask = inside if mask is None else build.binary("and", mask, inside)
            parts.append(part)
        site.operation.operands[self.operand] = parts[0] if single else build.concatenate(parts, self.vector)
        return mask
