"""Arrays as cost items: values that the same pattern makes and the same readers read; their bytes in the compiler's
layouts, and the kernels around them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod
from typing import Any

from toast_cli.dimensions.model import FactorKind
from toast_cli.plan.loops import LOOP_READS
from toast_cli.plan.problem import Problem
from toast_cli.plan.reshard import EXCHANGE, GATHER, Copy, moves_of, runs_by_region
from toast_cli.plan.sharding import Sharding, refines, shards
from toast_cli.price.compilation import Compilation, Making, making_whole
from toast_cli.price.compiled_collectives import Narrowing
from toast_cli.price.convolutions import ConvolvedArgument, Images
from toast_cli.price.cost import KernelUse, kernel_seconds
from toast_cli.price.fusion import MaskedSoftmax
from toast_cli.price.layouts import (
    UNPADDED,
    RowCopy,
    Tiling,
    copied_rows,
    growth_in,
    innermost_dims,
    pieces_are_copied,
    slowdown,
    tile_growth,
    tile_of,
)
from toast_cli.price.liveness import relaid_bytes
from toast_cli.price.on_chip import kept_bytes
from toast_cli.price.profile import CompilerProfile
from toast_cli.program.ops import BROADCAST_IN_DIM
from toast_cli.program.values import Region, all_readings, readings

NO_REGION = -1


@dataclass(frozen=True, slots=True, order=True)
class ItemReader:
    """A group of equal reads of an array item.

    Attributes:
        pattern, position: ops of this pattern read it as this operand.
        region: number shared by reads that share copies: those in the same loop, or all outside of loops, and not in
            sibling branches. runs: reads of each array in one run.
        ahead_region, ahead_runs: the same for copies made ahead of loops that only read the array. whole_ahead: see
            `regions.Reading`, false where there are none.
        needed: fraction of the bits that these readers need, see `Narrowing`.
    """

    pattern: int
    position: int
    region: int
    runs: float
    ahead_region: int
    ahead_runs: float
    whole_ahead: bool
    needed: float

    @property
    def whole_if_ahead(self) -> bool | None:
        """`Reading.whole_ahead`, None if the readers are in no such loop."""
        return self.whole_ahead if self.region != self.ahead_region else None


@dataclass(frozen=True, slots=True)
class ArrayItem:
    """Values that one pattern makes and that have equal readers.

    Attributes:
        pattern, result: the pattern that makes them, and the number of its result.
        bytes: of one whole array. written_bytes: the same as it is stored in memory, see `written_parts`.
        shape, tiling: they decide how much memory the array takes, see `layouts`. images: see `convolutions`.
        row_copies, softmax: see there, and `masked_softmaxes`.
        free: it is derived from constants alone. stored: it is written to memory.
        waited_for: its collectives are neither early nor late, see `early_values`.
        readers: those that may need another sharding than it is made in. at_edges: some of them read all of it in each
            trip of a loop that does not make it, so that the plan decides where it is gathered for them.
        region: the manual region whose first result it is, or -1.
        costs: it may have a cost: it is stored, may be partial, or has such readers.
        making: work to compute one whole array that is not stored, see `making_whole`. as_made: it also has readers
            that take it in its own sharding under every plan.
        values: numbers of the values.
    """

    pattern: int
    result: int
    bytes: int
    written_bytes: float
    shape: tuple[int, ...]
    tiling: Tiling
    images: Images | None
    row_copies: tuple[RowCopy, ...]
    softmax: MaskedSoftmax | None
    free: bool
    stored: bool
    waited_for: bool
    readers: tuple[ItemReader, ...]
    at_edges: bool
    region: int
    costs: bool
    values: tuple[int, ...]
    making: Making | None
    as_made: bool

    def runs_of(self, places: Sequence[int], *, ahead: bool) -> float:
        """How often one array is moved in one run for the readers at `places`. ahead: of loops, see `Copy`."""
        served = [self.readers[place] for place in places]
        stops = [(r.ahead_region, r.ahead_runs) if ahead else (r.region, r.runs) for r in served]
        return sum(runs_by_region(stops).values())


def array_items(problem: Problem, compilation: Compilation) -> tuple[ArrayItem, ...]:
    """The array items of all values of the program."""
    program, stored, late, needs = problem.program, compilation.stored, compilation.late, compilation.needs
    producer = program.producer
    place = [0] * len(program.values)
    for op in program.ops:
        for k, value in enumerate(op.results):
            place[value] = k
    # Sum items account for these uses.
    into_carries = frozenset(use for accumulation in problem.accumulations for use in accumulation.first)
    members: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for value in range(len(program.values)):
        maker = producer[value]
        if maker < 0:
            continue
        readers = _readers_of(problem, needs, value, into_carries)
        key = (
            problem.op_pattern[maker],
            place[value],
            program.values[value].bytes,
            program.values[value].bytes * compilation.parts[value],
            program.values[value].shape,
            compilation.tiled[value],
            compilation.images[value],
            compilation.row_copies.get(value, ()),
            compilation.softmaxes.get(value),
            problem.free[value],
            stored[value],
            not (compilation.early[value] or late[value]),
            readers,
            maker if program.ops[maker].region is not None and place[value] == 0 else NO_REGION,
        )
        members[key].append(value)
    items: list[ArrayItem] = []
    for key, values in members.items():
        (pattern, k), measures, readers, region = key[:2], key[2:-2], key[-2], key[-1]
        left = tuple(r for r in sorted(readers) if not reads_as_made(problem, pattern, k, r.pattern, r.position))
        shared = left and len(readers) > 1  # readers may take different shards
        making = making_whole(program, stored, problem.free, compilation.profile, values[0]) if shared else None
        partial = FactorKind.REDUCTION in problem.patterns[pattern].form.kinds
        held = stored[values[0]] or values[0] in compilation.row_copies or region != NO_REGION
        at_edges = LOOP_READS in problem.roles and any(reader.whole_if_ahead is False for reader in left)
        item = ArrayItem(
            pattern, k, *measures, left, at_edges, region, costs=held or partial or bool(left), values=tuple(values),
            making=making, as_made=len(left) < len(readers),
        )  # fmt: skip
        items.append(item)
    return tuple(items)


def _readers_of(
    problem: Problem, needs: Narrowing, value: int, but: frozenset[tuple[int, int]]
) -> frozenset[ItemReader]:
    """All reads of a value, `but` for some."""
    program = problem.program
    if not program.values[value].shape:  # a scalar has one sharding
        return frozenset()
    # Numbered in the order of first reads, so that arrays with equal reads in different loops share an item.
    regions: dict[Region, int] = {}
    item_readers: list[ItemReader] = []
    uses, reads = program.users[value], all_readings(program)[value]
    if not but.isdisjoint(uses):
        uses = [use for use in uses if use not in but]
        reads = readings(program, value, uses)
    for (op, k), read in zip(uses, reads, strict=True):
        inside, ahead = [regions.setdefault(stop.region, len(regions)) for stop in (read.inside, read.ahead)]
        runs, whole_ahead = (inside, read.inside.runs, ahead, read.ahead.runs), bool(read.whole_ahead)
        item_readers.append(ItemReader(problem.op_pattern[op], k, *runs, whole_ahead, needs.of_use(value, op)))
    return frozenset(item_readers)


def reads_as_made(problem: Problem, maker: int, result: int, reader: int, position: int) -> bool:
    """Whether ops of pattern `reader` read this result of pattern `maker` in its own sharding under every plan: it is
    neither partial nor pinned, both patterns choose alike, and the same factors make up the array."""
    maker_pattern, reader_pattern = problem.patterns[maker], problem.patterns[reader]
    if maker_pattern.result_pins or reader_pattern.operand_pins or FactorKind.REDUCTION in maker_pattern.form.kinds:
        return False
    alike = problem.chosen_by[maker] == problem.chosen_by[reader]
    return alike and maker_pattern.form.results[result] == reader_pattern.form.operands[position]


def reader_op(problem: Problem, item: ArrayItem, pattern: int, position: int) -> int:
    """The op of that pattern that reads the item's first array as that operand; the array's producer if there is
    none."""
    for op, place in problem.program.users[item.values[0]]:
        if place == position and problem.op_pattern[op] == pattern:
            return op
    return problem.program.producer[item.values[0]]


# ---------------------------------------------------------------- bytes in layouts
# Bytes of arrays in the compiler's layouts: in tiles, in the layouts that convolutions require, and in gathered
# pieces.


class Layouts:
    """Layouts of the arrays of one problem."""

    def __init__(self, problem: Problem, profile: CompilerProfile) -> None:
        self._problem, self._profile = problem, profile
        self._sizes, self._tile = problem.mesh.sizes, tile_of(profile)

    def kept(self, item: ArrayItem, sharding: Sharding) -> float:
        """Bytes on one device of the item's array where it is made, including tile padding and all layouts that are
        kept."""
        shape = self._local_shape(item.shape, sharding) if item.images else ()
        if not item.images or not item.images.applies(shape):
            return self.laid_out(item, item.written_bytes, sharding, sharding)
        return item.images.kept(shape, item.tiling.dims, self._tile) * item.written_bytes / prod(item.shape)

    def convolved(self, item: ArrayItem, copied: ConvolvedArgument, sharding: Sharding) -> float:
        """Bytes on one device of the copy of an argument that convolutions read."""
        shape, dims = self._local_shape(item.shape, sharding), item.tiling.dims
        few = copied.images.applies(shape)
        elements = copied.images.kept(shape, dims, self._tile) if few else prod(shape)
        return elements * (1.0 if few else tile_growth(shape, dims, self._tile)) * copied.bits / 8

    def row_copies(self, item: ArrayItem, sharding: Sharding) -> Iterator[tuple[RowCopy, float, float]]:
        """(copy, its bytes on one device, its tiles) of each copy into tiles of rows."""
        local = self._local_shape(item.shape, sharding)
        for copy in item.row_copies:
            wasted, tiles = copied_rows(local, copy, self._tile, 8 * item.bytes // max(1, prod(item.shape)))
            if tiles:
                yield copy, wasted * item.written_bytes / shards(sharding, self._sizes), tiles

    def spread(self, item: ArrayItem, sharding: Sharding) -> float:
        """Bytes on one device of the arrays that a softmax reads beside its scores, see `masked_softmaxes`."""
        if item.softmax is None or not item.softmax.applies(self._local_shape(item.shape, sharding)):
            return 0.0
        return self.kept(item, sharding) * item.softmax.spread / 4

    def laid_out(self, item: ArrayItem, size: float, sharding: Sharding, source: Sharding) -> float:
        """Bytes on one device of the item's array, `size` bytes when whole, including tile padding. source: its
        sharding where it is made, whose tiles copies keep."""
        tiling = item.tiling
        dims = tuple(range(len(item.shape))) if tiling.copies and sharding == source else tiling.dims
        if dims:
            local, like = (self._local_shape(item.shape, s) for s in (sharding, source))
            wasted = growth_in(local, replace(tiling, dims=dims), self._tile, like)
        else:
            wasted = tiling.fixed
        return size / shards(sharding, self._sizes) * wasted

    def is_put_together(self, item: ArrayItem, copy: Copy, source: Sharding) -> bool:
        """Whether the last gather of a copy copies its pieces, see `pieces_are_copied`."""
        before, last = source, None
        for step, after in copy.steps:
            if step.kind == GATHER:
                last = before, after
            before = after
        if last is None:
            return False
        piece, ops = self._local_shape(item.shape, last[0]), self._problem.program.ops
        readers = (item.readers[place] for place in copy.places)
        looked_up = any(
            reader.position == 0 and ops[reader_op(self._problem, item, reader.pattern, 0)].kind.lookup
            for reader in readers
        )
        return any(
            pieces_are_copied(self._profile, piece, dim, looked_up=looked_up)
            for dim, (there, left) in enumerate(zip(*last, strict=True))
            if len(left) < len(there)
        )

    def _local_shape(self, shape: tuple[int, ...], sharding: Sharding) -> tuple[int, ...]:
        return largest_shard(shape, sharding, self._sizes)


@lru_cache(maxsize=100_000)
def largest_shard(shape: tuple[int, ...], sharding: Sharding, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the largest shard of an array."""
    return tuple([ceil(n / shards((axes,), sizes)) for n, axes in zip(shape, sharding, strict=True)])


# ---------------------------------------------------------------- kernels around arrays
# Compute time around arrays: kernels that slice and insert halos, compute arrays unsliced, and transpose rows.

COPY = "copy"  # the name of a kernel that lays an array out anew
_TILE_BYTES = 4096


class ArrayKernels:
    """Prices the kernels around the arrays of one problem."""

    def __init__(self, problem: Problem, profile: CompilerProfile) -> None:
        self._problem, self._sizes, self._tile = problem, problem.mesh.sizes, tile_of(profile)
        self._kept_bytes, self._on_chip = kept_bytes(profile), profile.on_chip
        self._attained = profile.attained
        self._elementwise = replace(self._attained, memory=self._attained.elementwise or self._attained.memory)
        self._layouts = Layouts(problem, profile)
        self._turning_cycles, self._retiling_cycles = profile.turning_cycles, profile.retiling_cycles
        self._relaid_bytes = {} if self._tile == UNPADDED else relaid_bytes(problem.program, profile)

    def uses(
        self, item: ArrayItem, source: Sharding, read: Sequence[Sharding], copies: Sequence[Copy]
    ) -> Iterator[KernelUse]:
        """The kernels of an array that is made in sharding `source`.

        Args:
            read: [readers] sharding that each takes. copies: see `Pricer.copies`.
        """
        yield from self._unsliced(item, source, read)
        yield from self._laid_out(item, source, copies)
        yield from self._into_rows(item, source)
        yield from self._spread(item, source)
        yield from self._relaid(item, source)

    def _unsliced(self, item: ArrayItem, source: Sharding, read: Sequence[Sharding]) -> Iterator[KernelUse]:
        """The kernel that computes a whole array, if readers take different shards of it; the shards themselves count
        with the readers."""
        if item.making is None:
            return
        shardings, sizes = {*read, source} if item.as_made else {*read}, self._sizes
        finest = max([shards(s, sizes) for s in shardings if s != source and refines(s, source)], default=0)
        if not finest or len(shardings) == 1:
            return
        ops, pieces = self._problem.program.ops, shards(source, sizes)
        makers = [self._problem.program.producer[value] for value in item.values]
        part, size = 1.0 / pieces - 1.0 / finest, float(item.bytes)
        flops, moved = (0.0, size) if source in shardings else (item.making.flops, size + item.making.read)
        if size <= self._kept_bytes * pieces:
            moved = moved / self._on_chip.vector_speed if self._on_chip.vector_speed else 0.0
        seconds = self._seconds(flops * part, moved * part)
        runs = len(makers) * ops[makers[0]].trips
        if seconds:
            yield KernelUse(
                tuple(makers), ops[makers[0]].name, runs, runs * flops * part, runs * size * part, runs * seconds
            )

    def _laid_out(self, item: ArrayItem, source: Sharding, copies: Sequence[Copy]) -> Iterator[KernelUse]:
        """The kernels that lay rows out for a collective that joins or cuts them, and anew after it.

        A collective concatenates along the rows of tiles, not within a row. So rows whose parts are gathered or
        exchanged (see `dims_of_rows`) are transposed for it, unless they have whole tiles, and again after it
        (libtpu 0.0.42.1 for v4 and v5e: 16 of 256 features of 327,680 rows take 219 and 814 us on v4). Exchanged parts
        of whole tiles are put side by side by one copy (16,384 rows of 2 parts of 128 features: 23 to 139 us on v4);
        gathered ones need none.
        """
        if len(item.tiling.lanes) != 1 or not copies:
            return
        (lane,) = item.tiling.lanes
        for step, before, after, places, ahead in moves_of(source, copies):
            if before[lane] == after[lane]:
                continue
            (sent, padded), (received, kept) = (self._bytes(item, s, lane) for s in (before, after))
            if padded > sent:
                moved = padded + sent + received + kept
            elif step.kind == EXCHANGE:
                moved = received + kept
            else:
                continue
            runs = len(item.values) * item.runs_of(places, ahead=ahead)
            yield self._moving(item, COPY, runs, moved)

    def _into_rows(self, item: ArrayItem, sharding: Sharding) -> Iterator[KernelUse]:
        """The kernels that copy an array into tiles of its rows, see `row_copies`: each tile is transposed."""
        for copy, size, tiles in self._layouts.row_copies(item, sharding):
            moved, runs = size + self._layouts.kept(item, sharding), len(item.values) * copy.runs
            turning = tiles * self._turning_cycles / self._problem.mesh.chip.clock_hertz
            yield self._moving(item, COPY, runs, moved, turning)

    def _spread(self, item: ArrayItem, sharding: Sharding) -> Iterator[KernelUse]:
        """The kernels that write what a softmax reads beside its scores, and its reading, see `masked_softmaxes`."""
        moved, program = 2.0 * self._layouts.spread(item, sharding), self._problem.program
        if moved:
            runs = sum(program.ops[program.producer[value]].trips for value in item.values)
            yield self._moving(item, BROADCAST_IN_DIM, runs, moved)

    def _relaid(self, item: ArrayItem, sharding: Sharding) -> Iterator[KernelUse]:
        """The kernels that copy what a loop carries or stacks around it, and lay out its slices, see `relaid_bytes`.
        XLA:TPU adds the time to rearrange each tile to that for reading and writing a copy; short tiles take longer."""
        chip = self._problem.mesh.chip
        for value in item.values if self._relaid_bytes else ():
            relaid, maker = self._relaid_bytes.get(value), self._problem.program.producer[value]
            if relaid is not None and (relaid.copied or relaid.turned):
                copied, turned = (size / shards(sharding, self._sizes) for size in (relaid.copied, relaid.turned))
                turning = turned / _TILE_BYTES * self._retiling_cycles / chip.clock_hertz
                copying = turning + 2.0 * copied / chip.memory_bytes_per_second
                local, bits = largest_shard(item.shape, sharding, self._sizes), 8 * item.bytes // prod(item.shape)
                tiles = {dim - len(local) for dim in innermost_dims(local, self._tile, bits)}
                slower = slowdown(local, self._tile, bits)
                # Where slices are laid out anew, the kernels that read and write them do it in the argument's tiles.
                again = 0.0 if tiles.isdisjoint(relaid.outermost) else 2.0 * slower - 1.0
                if again and any(sharding[dim] for dim in relaid.updated):
                    again += self._problem.program.ops[maker].trips
                seconds = (slower + again) * copying
                yield KernelUse((maker,), COPY, 2.0, 0.0, 2.0 * copied, seconds)

    def _bytes(self, item: ArrayItem, sharding: Sharding, lane: int) -> tuple[float, float]:
        """Bytes of one device's part of the array, and of the same in tiles that have its rows in the lanes."""
        local = largest_shard(item.shape, sharding, self._sizes)
        size = item.written_bytes / shards(sharding, self._sizes)
        return size, size * tile_growth(local, tuple(range(len(local))), self._tile, lanes=(lane,))

    def _moving(self, item: ArrayItem, name: str, runs: float, moved: float, least: float = 0.0) -> KernelUse:
        """Kernels of that name that read and write `moved` bytes each, in `least` seconds or more."""
        makers = tuple([self._problem.program.producer[value] for value in item.values])
        return KernelUse(makers, name, runs, 0.0, runs * moved, runs * max(least, self._seconds(0.0, moved)))

    def _seconds(self, flops: float, moved: float) -> float:
        return kernel_seconds(self._problem.mesh.chip, self._elementwise, "", 0.0, flops, moved, 0.0)
