"""Collectives as the compiler makes them: in which type they move, which become others, which are combined, which
nothing waits for, and which reduce-scatters stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from typing import NamedTuple

from toast_cli.hardware.model import Mesh
from toast_cli.plan.partials import in_one_step
from toast_cli.plan.problem import Problem
from toast_cli.plan.sharding import OpSharding, Sharding, axes_summed_over, in_mesh_order, shards
from toast_cli.price.profile import CompilerProfile
from toast_cli.program.model import Op, Program, factors_of
from toast_cli.program.ops import ADD, ARGUMENT, CARRY, CONVERT, RAGGED_DOT, SELECT
from toast_cli.program.values import loop_at, read_behind, transposed


class Narrowing:
    """The bits of a program's floating-point elements that collectives move; all of them without this pass.

    XLA:TPU puts a conversion to a narrower type before the collective it follows, and looks through ops that only move
    data; a product of f32, which it computes in one bf16 pass unless told otherwise, counts as such a conversion, but
    not one with a vector, which it computes as a multiplication and a sum, in f32. (libtpu 0.0.42.1 does so with
    all-gathers, all-to-alls, permutes and all-reduces, and not with reduce-scatters.)
    """

    def __init__(self, program: Program, profile: CompilerProfile) -> None:
        self._program, self._narrows, self._product_bits = program, "narrowing" in profile.passes, profile.product_bits
        self._bits = [value.bits for value in program.values]
        self._floating = [value.dtype.startswith(("f", "bf")) for value in program.values]
        self._needed = list(self._bits)
        for value in reversed(range(len(program.values))):
            if program.users[value]:
                self._needed[value] = max(self._read(value, op) for op, _ in program.users[value])

    def of_value(self, value: int) -> float:
        """Fraction of a value's bits that its readers need, at most 1."""
        return self._needed[value] / self._bits[value] if self._bits[value] else 1.0

    def of_use(self, value: int, op: int) -> float:
        """Fraction of a value's bits that one reader needs, at most 1."""
        return self._read(value, op) / self._bits[value] if self._bits[value] else 1.0

    def _read(self, value: int, number: int) -> int:
        op, bits = self._program.ops[number], self._bits[value]
        if not (self._narrows and self._floating[value]):
            return bits
        if op.kind.matrix_unit:
            narrows = self._program.values[value].dtype == "f32" and not op.multiplies_by_vector
            return self._product_bits if narrows else bits
        results = [v for v in op.results if self._floating[v]]
        if op.name == CONVERT and results:
            return min(bits, *(self._needed[v] for v in results))
        if op.kind.rearranges or op.name == SELECT:
            return max((self._needed[v] for v in results), default=bits)
        return bits


def stays_gather(profile: CompilerProfile, shape: tuple[int, ...], shards: int) -> bool:
    """Whether the chip's compiler keeps an all-gather of an array of that shape from that many shards.

    That of a vector in pieces of less than a row of a tile becomes an all-reduce of the local piece padded with zeros
    (libtpu 0.0.42.1 for slices of v4, v5e, v5p and v6e).
    """
    return "small-gathers" not in profile.passes or len(shape) != 1 or shape[0] // shards >= LANES


LARGE_SLICE = 64  # devices


def stays_slice_gather(profile: CompilerProfile, mesh: Mesh, axes: tuple[int, ...], size: float) -> bool:
    """Whether the chip's compiler keeps an all-gather over `axes` whose result has `size` bytes on each device.

    Over all devices of a large slice it becomes an all-reduce of the local piece padded with zeros, which uses all
    links at once. `python -m benchmarks.singles` compiles gathers by libtpu 0.0.42.1: from 64 devices on, not of 32; on
    v4 and v5p of every size that was tried (64 MiB), on v5e and v6e for results of up to 16 MiB before narrowing.
    """
    return (
        "slice-gathers" not in profile.passes
        or mesh.devices < LARGE_SLICE
        or prod(mesh.sizes[axis] for axis in axes) < mesh.devices
        or size > profile.slice_gather_bytes
        or any(link.kind not in ("ring", "line") for axis in axes for link in mesh.axes[axis].links)
    )


def reductions_each(program: Program, value: int, profile: CompilerProfile) -> float:
    """Number of all-reduces per computation of a value: 1, or 1 / trips if they are moved behind the loop.

    XLA:TPU moves an all-reduce after the loop if its result is only read through slices or views that are added to
    carries (its while-loop-all-reduce-code-motion): the gradients of an LSTM's weights, of which one product makes all
    gates. Gradients that are accumulated whole are carried partial in the emitted program (see `plan.loops`).
    Seen in a Flax LSTM compiled by libtpu 0.0.42.1 for v5e: 7 ms of communication in place of 194.
    """
    loop = program.ops[program.producer[value]].loop
    if loop < 0 or "reduction-motion" not in profile.passes or not _is_only_added_up(program, value, loop):
        return 1.0
    return 1.0 / max(1, program.loops[loop].trips)


def _is_only_added_up(program: Program, value: int, loop: int) -> bool:
    """Whether a loop only adds a value, and views of it, to its carries."""
    users = program.users[value]
    for number, position in users:
        op = program.ops[number]
        if op.loop != loop or len(op.results) != 1:
            return False
        (result,) = op.results
        if op.name == ADD and len(op.operands) == 2:
            if not _is_carried_on(program, op.operands[1 - position], result):
                return False
        elif not op.kind.view or not _is_only_added_up(program, result, loop):
            return False
    return bool(users)


def _is_carried_on(program: Program, before: int, after: int) -> bool:
    """Whether `after` is the yield of the carry `before`, and the body uses neither for anything else."""
    maker = program.producer[before]
    if program.ops[maker].name != CARRY or program.users[after] != [(maker, 1)]:
        return False
    return len(program.users[before]) - len(read_behind(program, before)) == 1


def early_values(program: Program, free: tuple[bool, ...], profile: CompilerProfile) -> list[bool]:
    """[values] whether each follows from arguments and constants by elementwise work and data movement alone.

    Such values (weights, converted or sliced) are available when the step begins: their gathers can overlap with
    everything before their first reader. Without the pass `overlap` no value is early or late.
    """
    early = [False] * len(program.values)
    if "overlap" not in profile.passes:
        return early
    carries = {op.results[0] for op in program.ops if op.name == CARRY}  # a loop's counter is one that is early
    count = -1
    while count != len(carries):
        count = len(carries)
        for op in program.ops:
            is_early = op.name == ARGUMENT or (op.kind.fusible and all(early[v] for v in op.operands))
            for value in op.results:
                early[value] = is_early or free[value] or value in carries
        carries = {v for v in carries if all(early[o] for o in program.ops[program.producer[v]].operands)}
    return early


def late_values(program: Program, profile: CompilerProfile) -> list[bool]:
    """[values] whether no product is computed from each, through loops as well.

    Such values (gradients on their way into the optimiser) are needed only when the step ends: their reductions can
    overlap with everything after them. Collectives of other values are on the critical path.
    """
    if "overlap" not in profile.passes:
        return [False] * len(program.values)
    late = [True] * len(program.values)
    changed = True
    while changed:  # one more pass for each loop a value is carried through; values only change from late to not late
        changed = False
        for op in reversed(program.ops):
            if op.kind.matrix_unit or not all(late[v] for v in op.results):
                for value in op.operands:
                    if late[value]:
                        late[value] = False
                        changed = changed or op.name == CARRY
    return late


# What an op reduces over, its loop and branches, whether nothing waits for it, number of reductions before it.
_CombiningKey = tuple[Hashable | None, int, tuple[int, ...], bool, int]


def combined_shares(
    program: Program, over: Sequence[Hashable | None], late: Sequence[bool], profile: CompilerProfile
) -> list[float]:
    """[ops] share of each reduction in the collective it is combined into, ignoring size limits; 1 if it is not
    combined, 0 if it is combined with all that nothing waits for.

    XLA merges collectives of one kind, type and group, none of which needs another's result, into one of about
    `CompilerProfile.combined_bytes`, within one computation (not across a loop's iterations). Outside of loops all that
    nothing waits for become one (XLA:TPU made one of 20 all-reduces of 128 KiB, and one of 12 of 4 MiB). Other
    all-reduces are combined if they are on one level: over the same dimensions, with equally many reductions on the
    longest paths to them, counting late ones separately (both sums of a batch normalisation; the gradients of a layer
    in a loop over layers). Of a ResNet's 105 all-reduces on v5e-16 XLA:TPU makes 27. Reduce-scatters that something
    waits for, or in loops, stay alone: those of a GRU's three gates do.

    Args:
        over: [ops] what an op reduces over, and how; None if it does not reduce. late: [ops] whether nothing waits for
            it.
    """
    if "reduction-combining" not in profile.passes:
        return [1.0] * len(program.ops)
    producer = program.producer
    before = [0] * len(program.ops)  # [ops] reductions of the same lateness on the longest path to it, itself included
    places: dict[int, _CombiningKey] = {}
    for number, op in enumerate(program.ops):
        longest, last, reduction = 0, late[number], over[number]
        for value in op.operands:
            maker = producer[value]  # may be a later op, for a carry; counts as 0 then
            if before[maker] > longest and late[maker] == last:
                longest = before[maker]
        before[number] = longest if reduction is None else longest + 1
        if reduction is not None:
            places[number] = reduction, loop_at(program, number, 0), op.branches, last, before[number]
    level = Counter(places.values())
    # Loop-carried sums are reduced after their loops, although the carry itself reduces nothing.
    at_end = [last and loop_at(program, number, 0) < 0 for number, last in enumerate(late)]
    return [0.0 if at_end[n] else 1.0 / level[places[n]] if n in places else 1.0 for n in range(len(program.ops))]


def latency_part(kind: str, size: float, share: float, profile: CompilerProfile) -> float:
    """Fraction of a collective's latency that a reduction of `size` bytes pays, given its share in the combined
    collective, whose size is limited.

    Args:
        kind: of the collective. share: see `combined_shares`.
    """
    if "reduction-combining" not in profile.passes or (share and kind != "all-reduce"):
        return 1.0
    return min(1.0, max(share, size / profile.combined_bytes))


# ---------------------------------------------------------------- tiled reduce-scatters
# Tiled reduce-scatters: which of the reduce-scatters that the partitioner writes stay, and which become all-reduces.
#
# XLA:TPU keeps a reduce-scatter only where every device gets whole tiles; elsewhere an all-reduce and a slice remain.
# The rules are those of libtpu 0.0.42.1:
#
# * Two streams run around the ring, and each takes half of every device's piece: halves of the columns' tiles, or of
#   the rows' where the columns' are odd in number. Four devices in a square run four streams. A piece is padded to that
#   as long as it grows by less than half.
# * That holds where the scattered dimension is the outermost. Rows inside another dimension have to be whole tiles as
#   they are, and so have columns; tiles of types narrower than 32 bits hold that many more of them.
# * Columns that are not scattered themselves are taken in equal parts that fit in the kernel's memory beside those of
#   the other devices. Their tiles are divided by primes up to 19 for that: over 8 devices of a v5p a part has at most
#   152 tiles, a vocabulary of 128,256 takes 2 x 3 x 167 and does not fit, 50,257 takes 3 x 131 and does.
# * Vectors, matrices of fewer rows than a tile has, and f16 (with which no TPU computes) stay all-reduces. So does what
#   is summed over a whole slice, of three dimensions or a square one of at least 4 x 4, which uses all links.
#
# An array is row-major. A product has its longest dimension of one operand as rows and its last one as columns, or the
# other way round where a piece then has fewer tiles.

ROWS, LANES = 8, 128  # of a tile
WORD_BITS = 32  # narrower elements are packed into words of this size
STREAMS, SQUARE_STREAMS = 2, 4  # that run at once around a ring, and around four devices in a square
GROWTH = 1.5  # a shard is padded if it grows by less than this factor
NEARLY = 1.1  # a product with its last dimension as columns may have so many more tiles
SQUARE_EDGE = 4  # the shortest edge of a square slice that is reduced by an all-reduce that uses all links
PART_PRIMES = 2, 3, 5, 7, 11, 13, 17, 19  # by which the columns of wide arrays are divided into equal parts
PART_BUFFERS = 4  # of a part that a kernel has beside those for each device
ProductSides = tuple[
    tuple[int, ...], tuple[int, ...]
]  # dimensions of a product's result, by the one operand they come from


@dataclass(frozen=True)
class ScatteredArray:
    """An array that is reduce-scattered.

    Attributes:
        shape: local shape before the scatter. dim: the dimension that is scattered. bits: of an element.
        sides: for a contraction's result, its dimensions by the operand they come from.
    """

    shape: tuple[int, ...]
    dim: int
    bits: int
    sides: ProductSides = ((), ())


def stays_scatter(profile: CompilerProfile, mesh: Mesh, axes: tuple[int, ...], array: ScatteredArray) -> bool:
    """Whether the chip's compiler keeps a reduce-scatter over `axes` instead of an all-reduce."""
    if "tiled-reduce-scatter" not in profile.passes:
        return True
    count, torus = prod(mesh.sizes[axis] for axis in axes), _torus(mesh, axes)
    if count == mesh.slice_devices and (len(torus) > 2 or (len(torus) == 2 and torus[0] == torus[1] >= SQUARE_EDGE)):
        return False
    streams = SQUARE_STREAMS if count == 4 and torus == [2, 2] else STREAMS
    return _splits_into_whole_tiles(array, count, streams, profile.scatter_tiles // (count + PART_BUFFERS))


def _torus(mesh: Mesh, axes: tuple[int, ...]) -> list[int]:
    """Number of devices along each torus dimension that the axes join, ascending."""
    sizes: dict[str, int] = {}
    for axis in axes:
        for place, link in enumerate(mesh.axes[axis].links):
            if link.kind in ("ring", "line"):
                dimension = link.dimension or f"{axis}.{place}"
                sizes[dimension] = sizes.get(dimension, 1) * link.size
    return sorted(sizes.values())


@lru_cache(maxsize=50_000)
def _splits_into_whole_tiles(array: ScatteredArray, count: int, streams: int, most: int) -> bool:
    """Whether every device gets whole tiles, the same number for each stream. most: tiles in a part of the columns."""
    shape, dim, packed = array.shape, array.dim, max(1, WORD_BITS // array.bits)
    if len(shape) < 2 or shape[dim] % count:
        return False
    piece = (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])
    row, column = _rows_and_columns(array, piece)
    if min(shape[row], shape[column]) < ROWS:
        return False
    if dim == column:
        return piece[column] % (LANES * packed) == 0
    columns = ceil(piece[column] / LANES)
    if not _in_equal_parts(columns, most):
        return False
    majors = [d for d in range(len(shape)) if d not in (row, column)]
    inside = prod(shape[d] for d in (majors[: majors.index(dim)] if dim in majors else majors))
    if dim in majors and inside > 1:
        return False
    if dim in majors or not majors:
        rows = prod(piece[d] for d in majors) * ceil(piece[row] / ROWS) * ROWS if majors else piece[row]
        halves = streams // 2 if columns % 2 == 0 else streams
        return ceil(rows / (ROWS * halves)) * ROWS * halves < GROWTH * rows
    return inside > 1 and piece[row] % (ROWS * packed) == 0


def _rows_and_columns(array: ScatteredArray, piece: tuple[int, ...]) -> tuple[int, int]:
    """The dimensions of the rows and of the columns of a scattered array, of which each device gets a piece."""
    row, column = len(piece) - 2, len(piece) - 1
    if not all(array.sides):
        return row, column
    row = max(array.sides[column in array.sides[0]], key=lambda d: (array.shape[d], d))
    turned = NEARLY * _tiles(piece, column, row) < _tiles(piece, row, column)
    return (column, row) if turned else (row, column)


def _in_equal_parts(columns: int, most: int) -> bool:
    """Whether so many tiles of columns divide into equal parts of at most `most`."""
    for prime in PART_PRIMES:
        while columns > most and columns % prime == 0:
            columns //= prime
    return columns <= most


def _tiles(shape: tuple[int, ...], row: int, column: int) -> int:
    outer = prod(size for dim, size in enumerate(shape) if dim not in (row, column))
    return ceil(shape[row] / ROWS) * ceil(shape[column] / LANES) * outer


class ScatterSource(NamedTuple):
    """A partial result that is reduce-scattered. alone: no other term is added before."""

    op: int
    result: int
    alone: bool = True


class ScatterDecisions:
    """Memoised decisions for one problem."""

    def __init__(self, problem: Problem, profile: CompilerProfile) -> None:
        self._problem, self._profile = problem, profile
        self._program, self._mesh, self._sizes = problem.program, problem.mesh, problem.mesh.sizes
        self._seen: dict[int, tuple[tuple[int, ...], ProductSides]] = {}
        self._stays: dict[tuple[int, int, tuple[int, ...], Sharding, Sharding, tuple[int, ...], bool], bool] = {}

    def stays(self, source: ScatterSource, axes: tuple[int, ...], sharding: Sharding, op_sharding: OpSharding) -> bool:
        """Whether the reduce-scatter over `axes` of a partial result in this sharding stays one; else it becomes an
        all-reduce and a slice."""
        k = source.result
        key = source.op, k, axes, sharding, op_sharding.reduced_to[k], op_sharding.scattered[k], source.alone
        if key not in self._stays:
            turned = source.alone and self._turned(axes, k, op_sharding)
            self._stays[key] = not turned and self._fits(source, axes, sharding, op_sharding)
        return self._stays[key]

    def reduced_first(self, number: int, op_sharding: OpSharding, axes: tuple[int, ...]) -> bool:
        """Whether a total that its readers slice along `axes`, in that order, is all-reduced first. A compiler forms a
        reduce-scatter over several axes if the slices are in the order of the reducing devices; XLA:TPU does not over
        the whole mesh, also of a loop's sum."""
        if len(axes) < 2:
            return False
        if shards((axes,), self._sizes) == prod(self._sizes) and "tiled-reduce-scatter" in self._profile.passes:
            return True
        if self._program.ops[number].name == CARRY:
            return False
        kinds = self._problem.patterns[self._problem.op_pattern[number]].form.kinds
        summed = [axis for axis in axes_summed_over(kinds, op_sharding.factor_axes) if axis in axes]
        return list(axes) != summed

    def _turned(self, axes: tuple[int, ...], k: int, op_sharding: OpSharding) -> bool:
        """Whether the axes split a dimension in another order than the partitioner scatters them in."""
        if "tiled-reduce-scatter" not in self._profile.passes or in_one_step(op_sharding, k, self._sizes):
            return False
        return not in_mesh_order(tuple(tuple(a for a in split if a in axes) for split in op_sharding.reduced_to[k]))

    def _fits(self, source: ScatterSource, axes: tuple[int, ...], sharding: Sharding, op_sharding: OpSharding) -> bool:
        number, target = source.op, op_sharding.reduced_to[source.result]
        result = self._program.ops[number].results[source.result]
        value = self._program.values[result]
        dims = [dim for dim, split in enumerate(target) if not set(axes).isdisjoint(split)]
        if len(dims) != 1:
            return not dims
        if value.dtype == "f16" and "tiled-reduce-scatter" in self._profile.passes:
            return False
        long, sides = self._as_read(number, result)
        local = tuple([value.shape[d] // shards((sharding[d],), self._sizes) for d in long])
        array = ScatteredArray(local, long.index(dims[0]), value.bits, sides)
        return stays_scatter(self._profile, self._mesh, axes, array)

    def _as_read(self, number: int, result: int) -> tuple[tuple[int, ...], ProductSides]:
        """(dimensions of a result of op `number` in the order in which it is read, without a product's dimensions of
        size 1; the product's sides as positions in that order)."""
        as_read = self._seen.get(result)
        if as_read is None:
            sides = sides_of(self._program.ops[number])
            product = set(sides[0] + sides[1])
            read = transposed(self._program, result) if product else None
            shape = self._program.values[result].shape
            order = read.order if read else range(len(shape))
            long = tuple([d for d in order if shape[d] > 1 or d not in product])
            first, second = (tuple([long.index(d) for d in side if d in long]) for side in sides)
            as_read = self._seen[result] = long, (first, second)
        return as_read


def sides_of(op: Op) -> ProductSides:
    """(dimensions of a product's result from its first operand only, from its second only); empty for other ops and for
    ragged products, whose kernel writes rows."""
    if not op.kind.matrix_unit or op.name == RAGGED_DOT:
        return (), ()
    first, second = factors_of(*op.rule.operands[:2])
    dims = [(dim, set(factors)) for dim, factors in enumerate(op.rule.results[0])]
    return tuple(d for d, f in dims if f & first - second), tuple(d for d, f in dims if f & second - first)
