"""The per-device lowering of each kind of op. Of ops that are not listed, elementwise ones and those of CHLO are
computed on shards, all others replicated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any

from toast_cli.emit.regions.moves import Piece
from toast_cli.emit.regions.site import LocalRule, Site, body_reducer, reduce, start_once
from toast_cli.emit.regions.windows import convolution, pad, reduce_window, reverse, select_and_scatter, slices
from toast_cli.frontend.rules import RaggedDot, group_factor, ragged_dot
from toast_cli.kernels.describe import run_on_part
from toast_cli.plan.sharding import local_shape, replicated, shards
from toast_cli.program.ops import BLOCK_SCALED_DOT, BROADCAST_IN_DIM, RAGGED_DOT, OpKind
from toast_cli.xla import ir
from toast_cli.xla.build import INDEX, Builder, identity

# ---------------------------------------------------------------- ops that are the same on a shard
# Elementwise ops, contractions, transposes, reshapes whose splits match, broadcasts, and ops along unsharded
# dimensions (sorts, Cholesky factors) with batch dimensions. A contraction over a sharded dimension leaves partial
# sums.

# Ops that can be told to make only a part of a dimension that no operand has.
_MAKES_DIMENSIONS = frozenset({BROADCAST_IN_DIM, "stablehlo.custom_call"})


def plain(site: Site) -> list[Piece]:
    """The same operation on shards."""
    keeps = frozenset[int]()
    if site.op.name not in _MAKES_DIMENSIONS:
        # Factors that only results have, such as a reshape's whose splits do not match: a shard cannot be made of what
        # a device has of the operands.
        read = {factor for dims in site.op.rule.operands for factors in dims for factor in factors}
        keeps = frozenset(range(len(site.op.rule.sizes))) - read
    aligned = site.alignment(keeps=keeps)
    site.bring_all(aligned.operands)
    return site.localise(aligned.results, aligned.partial)


def on_every_device(site: Site) -> list[Piece]:
    """The operation on replicated arrays, on every device: the fallback."""
    site.bring_all(tuple(site.replicated(k) for k in range(len(site.operands))))
    return site.localise(tuple(replicated(len(site.result(k).shape)) for k in range(len(site.op.results))))


def custom_call(site: Site) -> list[Piece]:
    """The same call on shards, with the kernel adapted to their shape."""
    kernel, aligned = site.op.kernel, site.alignment()
    pieces = plain(site)
    if kernel is not None:
        pieces_of = {factor: prod(site.sizes[axis] for axis in axes) for factor, axes in aligned.axes.items()}
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


# ---------------------------------------------------------------- indexing
# If the indexed dimension is sharded (the rows of a table), each device gathers the rows it has and zero for the rest,
# so results are partial sums; and each device updates the rows it has, since updates outside an array do nothing. If
# the indices are sharded, each device gathers its own rows; scatters are then partial, and all but one device start
# from zero.

# Index types for computing: signed, and wide enough.
_SIGNED = {"ui32": "i64", "i64": "i64", "ui64": "i64"}


def gather(site: Site) -> list[Piece]:
    """A gather from a table that may be sharded along any dimension."""
    where = Places.of(site, "start_index_map", "offset_dims")
    sizes = [int(n) for n in site.operation.attributes["slice_sizes"]]
    table, rule = site.operand(0), site.op.rule
    blocks = {d for d in where.indexed if sizes[d] not in (1, table.shape[d])}
    aligned = site.alignment(keeps=factors_of(rule.operands[0], blocks))
    site.bring_all(aligned.operands)
    local = site.local(0)
    split = {d for d in where.indexed if aligned.operands[0][d] and sizes[d] == 1}
    for d, axes in enumerate(aligned.operands[0]):
        if axes and d not in split and sizes[d] == table.shape[d]:
            sizes[d] = local[d]
    site.operation.attributes["slice_sizes"] = site.build.i64s(sizes)
    if not split:
        return site.localise(aligned.results, aligned.partial)
    mask = where.shift(site, split, clamped=True)
    (piece,) = site.localise(aligned.results)
    with site.behind():
        build, shape = site.build, tuple(piece.handle.type.shape)
        batch = [d for d in range(len(shape)) if d not in where.window]
        nothing = build.constant(0, table.dtype, shape)
        masked = build.select(build.broadcast(mask, shape, batch), piece.handle, nothing)
    return [Piece(masked, aligned.results[0], aligned.partial, "or" if table.dtype == "i1" else "add")]


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
    aligned = site.alignment(keeps=keeps)
    for k, sharding in enumerate(aligned.operands):
        site.bring(k, sharding)
    if aligned.partial:
        assert reducer is not None
        start_once(site, 0, reducer, aligned.partial)
    site.read()
    split = {d for d in where.indexed if aligned.operands[0][d] and rows.get(d, 1) != array[d]}
    if split:
        where.shift(site, split, clamped=False)
    return site.localise(aligned.results, aligned.partial, reducer or "add")


def dynamic_slice(site: Site) -> list[Piece]:
    """A dynamic slice. Dimensions that are sliced whole are whole in a shard. Starts are clamped: if a device takes a
    slice of the slice, XLA adds the starts of both, and does not clamp the first."""
    aligned = site.alignment()
    site.bring_all(aligned.operands)
    sizes = [int(n) for n in site.operation.attributes["slice_sizes"]]
    for d, (size, length) in enumerate(zip(sizes, site.operand(0).shape, strict=True)):
        if 1 < size < length:
            site.operation.operands[1 + d] = clamped(site, 1 + d, length - size)
    for d, (own, axes) in enumerate(zip(site.local(0), aligned.operands[0], strict=True)):
        if axes:
            sizes[d] = own
    site.operation.attributes["slice_sizes"] = site.build.i64s(sizes)
    return site.localise(aligned.results)


def dynamic_update_slice(site: Site) -> list[Piece]:
    """Along a sharded dimension each device writes the part of the update that is in its shard."""
    aligned = site.alignment()
    site.bring_all(aligned.operands)
    array_shape, update = site.operand(0).shape, site.operand(1).shape
    split = [d for d, axes in enumerate(aligned.operands[0]) if axes and not aligned.operands[1][d]]
    if not split:
        return site.localise(aligned.results)
    build, local = site.build, site.local(0)
    update_shape = tuple(site.operands[1].handle.type.shape)
    low = [local[d] if d in split else 0 for d in range(len(array_shape))]
    fill = build.constant(0, site.operand(0).dtype)
    around = build.pad(site.operands[1].handle, fill, low, low)
    inside = build.pad(build.constant(1, "i1", update_shape), build.constant(0, "i1"), low, low)
    shape = tuple(local[d] if d in split else update_shape[d] for d in range(len(array_shape)))
    starts, begins = [], []
    for d in range(len(array_shape)):
        start = site.operands[2 + d].handle
        if d not in split:
            starts.append(site.devices.constant(0))
            begins.append(start)
            continue
        dtype = site.operand(2 + d).dtype
        start = build.convert(clamped(site, 2 + d, array_shape[d] - update[d]), "i32")
        own = build.binary(
            "add", site.devices.offset(aligned.operands[0][d], local[d]), site.devices.constant(local[d])
        )
        starts.append(build.binary("subtract", own, start))
        begins.append(build.constant(0, dtype))
    part = build.dynamic_slice(around, starts, shape)
    mask = build.dynamic_slice(inside, starts, shape)
    piece = site.operands[0].handle
    current = piece if shape == local else build.dynamic_slice(piece, begins, shape)
    site.operation.operands[1] = build.select(mask, part, current)
    for d, begin in enumerate(begins):
        site.operation.operands[2 + d] = begin
    return site.localise(aligned.results)


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
            numbers_text = re.search(rf"\b{key} = \[([^\]]*)\]", text)
            return tuple(int(n) for n in numbers_text[1].split(",") if n.strip()) if numbers_text else ()

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
        build, array_shape, local = site.build, site.operand(0).shape, site.local(0)
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
                    last = build.constant(array_shape[d] - 1, dtype)
                    part = build.one("clamp", [zero, part, last], part.type)
                part_shape = tuple(part.type.shape)
                begin = build.convert(site.devices.offset(site.operands[0].sharding[d], local[d]), dtype)
                part = build.binary("subtract", part, build.broadcast(begin, part_shape))
                first = build.compare("GE", part, build.constant(0, dtype, part_shape))
                last = build.compare("LT", part, build.constant(local[d], dtype, part_shape))
                inside = build.reshape(build.binary("and", first, last), rows)
                mask = inside if mask is None else build.binary("and", mask, inside)
            parts.append(part)
        site.operation.operands[self.operand] = parts[0] if single else build.concatenate(parts, self.vector)
        return mask


# ---------------------------------------------------------------- ragged products
# A device with some of the rows counts how many of them belong to each group, from the cumulative sum of the group
# sizes. A device with some of the groups moves their rows to the front, where the operation expects them, and moves
# the results back; all other rows are zero, and the results partial.


def ragged(site: Site) -> list[Piece]:
    """A ragged dot, sharded along any dimension."""
    numbers = ragged_dot(site.operation)
    aligned = site.alignment()
    site.bring_all(aligned.operands)
    if numbers is None:
        return site.localise(aligned.results, aligned.partial)
    by_rows = aligned.operands[0][numbers.ragged]
    by_groups = aligned.axes.get(group_factor(site.op.rule, numbers), ())
    if not by_rows and not by_groups:
        return site.localise(aligned.results, aligned.partial)
    build, rows = site.build, site.local(0)[numbers.ragged]
    sizes = site.operands[2].handle
    first, end = group_bounds(build, sizes)
    offset = site.devices.offset(by_rows, rows) if by_rows else build.constant(0, INDEX)
    first, end = (within(build, bound, offset, rows) for bound in (first, end))
    if not by_groups:
        site.operation.operands[2] = build.convert(build.binary("subtract", end, first), site.operand(2).dtype)
        return site.localise(aligned.results, aligned.partial)
    count = sizes.type.shape[0] // shards((by_groups,), site.sizes)
    own = site.devices.offset(by_groups, count)
    first, end = (build.dynamic_slice(bound, [own], (count,)) for bound in (first, end))
    site.operation.operands[2] = build.convert(build.binary("subtract", end, first), site.operand(2).dtype)
    begin = build.reshape(build.slice_dim(first, 0, 0, 1), ())
    last = build.reshape(build.slice_dim(end, 0, count - 1, count), ())
    for k, dim in enumerate((numbers.ragged, numbers.right_ragged)):
        if dim >= 0:
            site.operation.operands[k] = shifted(build, site.operands[k].handle, dim, begin, rows, behind=True)
    (piece,) = site.localise(aligned.results, aligned.partial)
    if count == 1:
        piece = _beside_empty_group(site, numbers, piece)
    if numbers.contracts_rows:
        return [piece]
    with site.behind():
        shape, dim = tuple(piece.handle.type.shape), numbers.result_ragged
        count_of_rows = build.broadcast(build.binary("subtract", last, begin), shape)
        inside = build.compare("LT", build.iota(INDEX, shape, dim), count_of_rows)
        masked = build.select(inside, piece.handle, build.constant(0, site.result(0).dtype, shape))
        back = build.binary("subtract", build.constant(rows, INDEX), begin)
        return [Piece(shifted(build, masked, dim, back, rows, behind=False), piece.sharding, piece.partial)]


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
    sums = build.make(
        "reduce_window",
        [sizes, build.constant(0, INDEX)],
        [sizes.type],
        regions=1,
        window_dimensions=build.i64s([1] * (len(shape) - 1) + [groups]),
        padding=build.table([[0, 0]] * (len(shape) - 1) + [[groups - 1, 0]]),
    )
    build.body(sums.regions[0], [build.type(INDEX, ())] * 2, lambda a, b: [build.binary("add", a, b)])
    return build.binary("subtract", sums.results[0], sizes), sums.results[0]


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


_SAME_ON_PIECES = """
broadcast_in_dim cholesky concatenate dot_general fft map optimization_barrier reshape sort
transpose triangular_solve
"""

RULES: dict[str, LocalRule] = {
    **{f"stablehlo.{name}": plain for name in _SAME_ON_PIECES.split()},
    "stablehlo.custom_call": custom_call,
    "stablehlo.constant": constant,
    "stablehlo.iota": iota,
    "stablehlo.slice": slices,
    "stablehlo.pad": pad,
    "stablehlo.reduce_window": reduce_window,
    "stablehlo.convolution": convolution,
    "stablehlo.reverse": reverse,
    "stablehlo.select_and_scatter": select_and_scatter,
    "stablehlo.reduce": reduce,
    "stablehlo.gather": gather,
    "stablehlo.scatter": scatter,
    "stablehlo.dynamic_slice": dynamic_slice,
    "stablehlo.dynamic_update_slice": dynamic_update_slice,
    RAGGED_DOT: ragged,
    BLOCK_SCALED_DOT: plain,
}


def rule_of(kind: OpKind) -> LocalRule:
    """The per-device lowering of an op."""
    rule = RULES.get(kind.name)
    return rule or (plain if kind.elementwise or kind.name.startswith("chlo.") else on_every_device)
