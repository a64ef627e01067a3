"""Compute time of a work item's ops on one device, given their sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from toast_cli.hardware import matrix_rate
from toast_cli.plan.problem import Problem
from toast_cli.plan.sharding import FactorAxes, OpSharding, Sharding, shards
from toast_cli.price.arrays import largest_shard
from toast_cli.price.convolutions import ConvolvedImage, PixelProducts, convolved_images, is_reversed, pixel_products
from toast_cli.price.cost import (
    STREAMED_ROWS,
    CollectiveUse,
    Grid,
    KernelUse,
    bounded_growth,
    grid_of,
    kernel_seconds,
    local_size,
    product_growth,
)
from toast_cli.price.gpu_libraries import (
    RESULT_TILE,
    copied_operands,
    f32_part,
    gradient_slowdown,
    terms_of_whole_images,
)
from toast_cli.price.items import WorkItem, WorkSide
from toast_cli.price.kernel import Rows, elements_walked
from toast_cli.price.layouts import growth_in, slowdown, tile_growth, tile_of
from toast_cli.price.on_chip import has_small_windows, kept_bytes
from toast_cli.price.profile import CompilerProfile
from toast_cli.price.timeline import InRegion
from toast_cli.program.model import DTYPE_BITS, factors_of
from toast_cli.program.ops import RAGGED_DOT, REDUCE, SCATTER
from toast_cli.program.values import is_transfer

# A reduction reads an array at half the speed of other elementwise work, in any memory: XLA:TPU's cycles of sums of
# squares and of the sums of a softmax, in device memory and on the chip.
REDUCING = 2.0


class WorkPricer:
    """Prices the work of one problem."""

    def __init__(self, problem: Problem, profile: CompilerProfile, regions: RegionPrices) -> None:
        self._problem, self._program, self._chip = problem, problem.program, problem.mesh.chip
        self._regions = regions
        kept = problem.mesh.chip.sustained
        written, streamed = kept * profile.attained.hand_written, profile.attained.streamed or profile.attained.memory
        self._attained = attained = replace(profile.attained, matrix=kept * profile.attained.matrix)
        # Kernels with a contraction, and those without.
        self._elementwise = replace(attained, memory=attained.elementwise or attained.memory)
        self._hand_written = replace(attained, matrix=written, memory=streamed)
        self._grouped = replace(attained, matrix=min(attained.matrix, kept * profile.attained.grouped))
        self._kept_bytes = kept_bytes(profile)
        self._on_chip = profile.on_chip
        self._sizes = problem.mesh.sizes
        self._libraries = "library-products" in profile.passes
        self._copies: dict[int, tuple[int, ...]] = {}
        self._grids: dict[int, Grid] = {}
        self._profile = profile
        self._images: dict[int, tuple[ConvolvedImage, ...]] = {}
        self._pixels: dict[int, PixelProducts | None] = {}
        self._growths: dict[tuple[tuple[tuple[Rows, float], ...], Sharding, bool], float] = {}

    def seconds(self, work: WorkItem, op_sharding: OpSharding) -> float:
        """Compute seconds of all ops of the item, each on its local shape."""
        if work.region >= 0:
            return work.runs * self._regions.price[work.region](op_sharding.factor_axes).seconds
        if (not work.kernels and not work.flops) or self._is_transfer(work):
            return 0.0
        if work.kernel is not None:
            # Its work is divided by the shards of its factors.
            pieces, kernel = prod(self._pieces(op_sharding.factor_axes)), work.kernel
            each = kernel.products / pieces, kernel.vector / pieces, kernel.bytes / pieces
            reached = self._grouped if kernel.only_multiplies else self._hand_written
            return work.runs * kernel_seconds(self._chip, reached, work.dtype, *each)
        sizes, chip, attained = self._sizes, self._chip, self._attained
        cuts = self._pieces(op_sharding.factor_axes) if work.flops or work.kind.matrix_unit else ()
        partial = bool(op_sharding.reduced) or any(op_sharding.scattered)
        # A partial product is written and reduced before its epilogue reads it.
        reduced_first = bool(work.unfinished) and not work.carried and partial
        results = op_sharding.reduced_to if reduced_first else op_sharding.computed
        reads, into, vector, transfers_in, kept_in, ahead = self._operand_traffic(work, op_sharding)
        read, out, finishing, transfers_out, kept_out = self._result_traffic(
            work, results, cramped=self._is_cramped(work, cuts)
        )
        resident = work.in_loop and transfers_in + transfers_out == 0.0
        walked = self._walked(work, cuts)
        flops = work.flops / prod(cuts)
        if walked:  # in any memory
            into = max(into, walked * (attained.pass_bytes + DTYPE_BITS.get(work.dtype, 32) / 8) - reads)
        # Kernels before and after it.
        extra = self._copying(work, op_sharding)
        if work.kind.convolution:  # copies of its operands before it and of its result after it
            moved = self._reversed(work, op_sharding) / (chip.memory_bytes_per_second * attained.memory)
            extra = self._space_to_batch(work, op_sharding) + extra + moved
        if work.kind.lookup and work.kernels:
            extra += self._lookup_steps(work, op_sharding)
        # The kernel itself: a product with its epilogue, or elementwise work.
        rates = attained
        if work.kind.matrix_unit:
            if "ragged-kernels" in self._profile.passes and self._program.ops[work.op].name == RAGGED_DOT:
                rates = self._grouped
            if walked:
                vector, flops = vector + flops, 0.0
            else:
                flops = max(
                    flops * self._growth(work, op_sharding, cuts),
                    self._pixel_transposes(work, op_sharding),
                    self._sliding(work, op_sharding, cuts),
                )
            moved = reads + read + max(into, out)
            if reduced_first:
                written_bytes, reduced_bytes = (
                    work.unfinished / shards(s[0], sizes) for s in (op_sharding.computed, op_sharding.reduced_to)
                )
                if resident and written_bytes <= self._kept_bytes:
                    written_bytes = reduced_bytes = 0.0
                moved = reads + max(into, written_bytes)
                first = kernel_seconds(chip, attained, work.dtype, flops, vector, moved, work.kernels)
                first = max(first, ahead / chip.memory_bytes_per_second)
                finished = read + out + reduced_bytes + self._on_the_chip(kept_out)
                second = kernel_seconds(chip, self._elementwise, "", 0.0, finishing, finished, 0.0)
                return work.runs * (extra + first + second + attained.kernel_seconds)
        else:
            rates, vector, flops = self._elementwise, vector + flops, 0.0
            if resident and self._on_chip.vector_speed:
                moved = self._on_the_chip(self._bytes_touched(work, op_sharding))
            else:
                passes = into * (REDUCING if work.kind.name == REDUCE else 1.0)
                moved = max(passes, reads + read + out + self._on_the_chip(kept_in + kept_out))
        busy = kernel_seconds(chip, rates, work.dtype, flops, vector + finishing, moved, work.kernels)
        return work.runs * (extra + max(busy, ahead / chip.memory_bytes_per_second))

    def transfer_seconds(self, work: WorkItem, op_sharding: OpSharding) -> float:
        """Seconds of transfers between device and host memory."""
        rate = self._chip.host_bytes_per_second
        if not rate or not self._is_transfer(work):
            return 0.0
        size = self._program.values[self._program.ops[work.op].results[0]].bytes
        return work.runs * size / shards(op_sharding.computed[0], self._sizes) / rate

    def _is_transfer(self, work: WorkItem) -> bool:
        return is_transfer(self._program.ops[work.op])

    def _on_the_chip(self, moved: float) -> float:
        """Bytes of device memory that elementwise work reads as fast as these bytes of on-chip memory."""
        speed = self._on_chip.vector_speed
        return moved / speed if speed else 0.0

    def _bytes_touched(self, work: WorkItem, op_sharding: OpSharding) -> float:
        """Bytes that a kernel reads and writes, in any memory."""
        sizes, total = self._sizes, 0.0
        for side, sharding in zip(work.operands, op_sharding.operands, strict=True):
            total += side.read / shards(sharding, sizes)
        for side, sharding in zip(work.results, op_sharding.computed, strict=True):
            total += (side.read + side.through) / shards(sharding, sizes)
        return total

    def _walked(self, work: WorkItem, cuts: tuple[int, ...]) -> float:
        """Elements that the vector unit processes for a contraction, see `elements_walked`."""
        if not work.kind.contraction or len(work.operands) != 2:
            return 0.0
        return elements_walked(self._profile, self._grid(work), cuts)

    def _growth(self, work: WorkItem, op_sharding: OpSharding, cuts: tuple[int, ...]) -> float:
        """The factor by which padding to the matrix unit increases a product's flops."""
        chip, attained = self._chip, self._attained
        pixels = self._pixel_products(work)
        if pixels:
            image, kernel = (self._pieces(sharding) for sharding in op_sharding.operands)
            return bounded_growth(chip, attained, work.dtype, pixels.growth(image, kernel))
        op = self._program.ops[work.op]
        part = f32_part(self._program, op) if work.kind.convolution and self._libraries else 0.0
        if part:
            return matrix_rate(chip, work.dtype) * attained.matrix / (chip.vector_flops * part)
        factor = product_growth(chip, attained, work.dtype, self._grid(work), cuts)
        if work.kind.convolution and self._libraries:
            factor *= gradient_slowdown(op, DTYPE_BITS.get(work.dtype, 32))
        return factor

    def _pixel_transposes(self, work: WorkItem, op_sharding: OpSharding) -> float:
        """Flops that take as long as transposing pixels between images and features in the lanes, see
        `convolutions`."""
        pixels, chip = self._pixel_products(work), self._chip
        turned = pixels.turned(*(self._pieces(sharding) for sharding in op_sharding.operands)) if pixels else 0
        if not turned:
            return 0.0
        op, pieces = self._program.ops[work.op], self._pieces(op_sharding.computed[0])
        count = turned * prod(w.outputs / pieces[w.result_dim] for w in op.windows)
        seconds = count * self._profile.turning_cycles / chip.clock_hertz
        return seconds * matrix_rate(chip, work.dtype) * self._attained.matrix

    def _sliding(self, work: WorkItem, op_sharding: OpSharding, cuts: tuple[int, ...]) -> float:
        """Flops that take as long as sliding a whole image, see `gpu_libraries`."""
        op, values, chip = self._program.ops[work.op], self._program.values, self._chip
        terms = terms_of_whole_images(op) if work.kind.convolution and self._libraries else 0
        if not terms:
            return 0.0
        columns = local_size(self._grid(work).columns, cuts)
        kernel, result = values[op.operands[1]], values[op.results[0]]
        features = (
            kernel.elements / shards(op_sharding.operands[1], self._sizes) / columns / prod(w.size for w in op.windows)
        )
        rows = result.elements / shards(op_sharding.computed[0], self._sizes) / columns
        count, wide = self._attained.multiprocessors, DTYPE_BITS.get(work.dtype, 32) > 16
        high, broad = (min(RESULT_TILE, STREAMED_ROWS * ceil(n / STREAMED_ROWS)) for n in (rows, columns))
        rounds = ceil(ceil(rows / high) * ceil(columns / broad) / count)
        rate = chip.vector_flops / count * (1.0 if wide else 2.0)
        seconds = 2.0 * rounds * high * broad * terms * features / rate
        return seconds * matrix_rate(chip, work.dtype) * self._attained.matrix

    def _pixel_products(self, work: WorkItem) -> PixelProducts | None:
        if work.kind.convolution and work.op not in self._pixels:
            self._pixels[work.op] = pixel_products(self._program, self._program.ops[work.op], self._profile)
        return self._pixels.get(work.op)

    def _pieces(self, sharding: Sharding) -> tuple[int, ...]:
        return tuple([shards((axes,), self._sizes) for axes in sharding])

    def _copying(self, work: WorkItem, op_sharding: OpSharding) -> float:
        """Seconds of copying operands of a contraction, or the smallest array of a convolution, into the dimension
        order that a library requires, see `gpu_libraries`."""
        if not work.kind.matrix_unit or not self._libraries:
            return 0.0
        op, rate = self._program.ops[work.op], self._chip.memory_bytes_per_second * self._attained.memory
        arrays = [
            *zip(op.operands, op_sharding.operands, strict=True),
            *zip(op.results, op_sharding.computed, strict=True),
        ]
        sizes = [self._program.values[value].bytes / shards(sharding, self._sizes) for value, sharding in arrays]
        if work.kind.convolution:
            return 4.0 * min(sizes) / rate + self._attained.kernel_seconds
        if work.op not in self._copies:
            self._copies[work.op] = copied_operands(self._program, op)
        return sum(2.0 * sizes[position] / rate + self._attained.kernel_seconds for position in self._copies[work.op])

    def _lookup_steps(self, work: WorkItem, op_sharding: OpSharding) -> float:
        """Seconds that XLA:TPU takes to look up one index after another, beside the bytes: 10 cycles each, and 7 for
        each 128 elements that a scatter updates.

        Fitted to profiles of one layer of experts on four v5p (marin-community/marin, .agents/logbooks/
        grug-moe-ep-ring.md): 81,920 rows of 2,048 bf16 are added in 6.1 ms and gathered in 1.0, as many single elements
        are gathered in 0.5 to 0.8, and 262,144 are added in 1.1. The compiler's own estimates leave it out.
        """
        if "lookup-steps" not in self._profile.passes:
            return 0.0
        form, updates = self._problem.patterns[work.pattern].form, self._program.ops[work.op].name == SCATTER
        rows_of = form.operands[-1] if updates else form.results[0]
        moved, by_index = factors_of(rows_of, form.operands[len(form.operands) // 2])
        sizes = [ceil(n / k) for n, k in zip(form.sizes, self._pieces(op_sharding.factor_axes), strict=True)]
        rows, row = (prod(sizes[f] for f in factors) for factors in (moved & by_index, moved - by_index))
        cycles = 7.0 * ceil(row / 128) if updates else 10.0
        return rows * cycles / self._chip.clock_hertz

    def _reversed(self, work: WorkItem, op_sharding: OpSharding) -> float:
        """Bytes read and written to reverse the second operand of a convolution, see `is_reversed`."""
        op = self._program.ops[work.op]
        if not is_reversed(op, self._profile):
            return 0.0
        local = self._local(self._program.values[op.operands[1]].shape, op_sharding.operands[1])
        over = {w.kernel_dim for w in op.windows}
        wasted = tile_growth(local, tuple(d for d in range(len(local)) if d not in over), tile_of(self._profile))
        return prod(local) * wasted * self._profile.product_bits / 8 * (1 + self._attained.narrow_write)

    def _local(self, shape: tuple[int, ...], sharding: Sharding) -> tuple[int, ...]:
        return largest_shard(shape, sharding, self._sizes)

    def _space_to_batch(self, work: WorkItem, op_sharding: OpSharding) -> float:
        """Seconds of space-to-batch of a convolution's operand and result, see `convolutions`."""
        if work.op not in self._images:
            self._images[work.op] = tuple(convolved_images(self._program, work.op, self._profile))
        bytes_moved = 0.0
        sides = op_sharding.operands[0], op_sharding.computed[0]
        for image, sharding in zip(self._images[work.op], sides, strict=False):
            bytes_moved += image.moved(self._local(image.shape, sharding))
        return bytes_moved / (self._chip.memory_bytes_per_second * self._attained.memory)

    def _operand_traffic(
        self, work: WorkItem, op_sharding: OpSharding
    ) -> tuple[float, float, float, float, float, float]:
        """(bytes read, most bytes of one array that pass through the vector unit, elementwise flops, bytes from device
        memory, bytes read from on-chip memory, bytes fetched ahead) of a kernel's operands."""
        limit, is_product = self._kept_bytes, work.kind.matrix_unit
        reads = most = vector = transfers = kept = ahead = 0.0
        for side, count in self._on_device(work.operands, op_sharding.operands, is_product):
            read, staying = side.read, side.staying
            if read or side.flops:
                if side.widest <= limit * count:
                    read -= side.passing
                    kept += side.passing / count
                if is_product and side.fetched <= self._on_chip.bytes * count:
                    read -= side.fetched
                    ahead += side.fetched / count
                spared = self._spared(side.beside, count) if staying else 0.0
                transfers += read - staying if spared else read
                reads += (read - staying * spared) / count
                vector += side.flops / count
                most = max(most, side.through / count)
        return reads, most, vector, transfers, kept, ahead

    def _result_traffic(
        self, work: WorkItem, shardings: tuple[Sharding, ...], *, cramped: bool
    ) -> tuple[float, float, float, float, float]:
        """(bytes read, bytes written, elementwise flops, bytes from and to device memory, bytes that stay on the chip)
        of a kernel's results, which have these shardings. cramped: its windows are small."""
        reads = out = vector = transfers = kept = 0.0
        for side, count in self._on_device(work.results, shardings, work.kind.matrix_unit):
            read, through, resident_part = side.read, side.through, 0.0
            vector += side.flops / count
            if side.staying and (spared := self._spared(side.beside, count)):
                if cramped:
                    spared = 1.0 - 1.0 / self._on_chip.vector_speed
                resident_part = side.staying / max(side.staying, read + through)
                read, through = read * (1.0 - resident_part * spared), through * (1.0 - resident_part * spared)
            if not side.passing or side.widest > self._kept_bytes * count:
                transfers += (read + through) * (1.0 - resident_part)
                reads += read / count
                out += through / count
            else:
                out += side.packed / count
                kept += side.passing / count
        return reads, out, vector, transfers, kept

    def _on_device(
        self, sides: Sequence[WorkSide], shardings: Sequence[Sharding], is_product: bool
    ) -> Iterator[tuple[WorkSide, int]]:
        """(side, its number of shards) of each, with what tiles of rows add to its bytes and flops."""
        for side, sharding in zip(sides, shardings, strict=True):
            wasted = self._rows_growth(side.rows, sharding, not is_product) if side.rows else 1.0
            if wasted != 1.0:
                scaled = [wasted * size for size in (side.read, side.through, side.flops, side.passing, side.widest)]
                read, through, flops, passing, widest = scaled
                side = side._replace(read=read, through=through, flops=flops, passing=passing, widest=widest)
            yield side, shards(sharding, self._sizes)

    def _rows_growth(self, rows: tuple[tuple[Rows, float], ...], sharding: Sharding, elementwise: bool) -> float:
        """The factor by which tiles that hold a part of each row, or few rows, increase the bytes and flops of one
        side."""
        key = rows, sharding, elementwise
        factor = self._growths.get(key)
        if factor is None:
            factor, tile = 1.0, tile_of(self._profile)
            for (shape, tiling), part in rows:
                if len(shape) != len(sharding):
                    continue  # reshaped on the way
                if tiling.default_bits:
                    bits = tiling.default_bits
                    if elementwise:
                        factor += part * (slowdown(self._local(shape, sharding), tile, bits) - 1.0)
                    continue
                here = growth_in(self._local(shape, sharding), tiling, tile)
                factor += part * (here / growth_in(shape, tiling, tile) - 1.0)
            self._growths[key] = factor
        return factor

    def _spared(self, beside: float, count: int) -> float:
        """The fraction of device-memory time saved by arrays that a loop keeps on the chip; 0 if they do not all fit.
        beside: bytes of these arrays, whole, split into `count` shards each."""
        fits = self._on_chip.bytes * count >= beside
        return 1.0 - 1.0 / self._on_chip.speed if fits else 0.0

    def _is_cramped(self, work: WorkItem, cuts: tuple[int, ...]) -> bool:
        """Whether a product adds to an array that a loop keeps in small windows, see `has_small_windows`."""
        if not work.kind.contraction or not any(side.staying for side in work.results):
            return False
        grid = self._grid(work)
        batch, rows, columns = (local_size(factors, cuts) for factors in (grid.batch, grid.rows, grid.columns))
        bits = self._program.values[self._program.ops[work.op].results[0]].bits
        return has_small_windows(self._profile, batch * rows, columns, bits)

    def uses(self, work: WorkItem, op_sharding: OpSharding) -> Iterator[KernelUse]:
        """Work and time of the item's kernels."""
        if work.region >= 0:
            yield from self._regions.price[work.region](op_sharding.factor_axes).kernels_in(work.runs)
            return
        seconds = self.seconds(work, op_sharding)
        if seconds:
            yield KernelUse(work.ops, work.kind.name, work.runs, *self._size(work, op_sharding), seconds)

    def _size(self, work: WorkItem, op_sharding: OpSharding) -> tuple[float, float]:
        """(FLOPs, bytes read and written) of all ops of the item on one device."""
        sizes = self._sizes
        pieces = prod(shards((axes,), sizes) for axes in op_sharding.factor_axes)
        flops = work.flops / pieces
        if work.kernel is not None:
            return work.runs * flops, work.runs * work.kernel.bytes / pieces
        moved = 0.0
        for sides, shardings in ((work.operands, op_sharding.operands), (work.results, op_sharding.computed)):
            for (size, through, elementwise, *_), sharding in zip(sides, shardings, strict=True):
                count = shards(sharding, sizes)
                moved += (size if sides is work.operands else max(size, through)) / count
                flops += elementwise / count
        return work.runs * flops, work.runs * moved

    def _grid(self, work: WorkItem) -> Grid:
        if work.op not in self._grids:
            form = self._problem.patterns[work.pattern].form
            self._grids[work.op] = grid_of(form, work.flops, work.kind.convolution)
        return self._grids[work.op]


# ---------------------------------------------------------------- one run of a manual region
# Time and memory of one run of a manual region on one device; `manual_regions` computes them.


@dataclass(frozen=True)
class RegionPrice:
    """One run of a region on one device, as the program around it sees it.

    Attributes:
        kernels: equal ones merged. collectives: all that run inside. bytes: peak inside, without operands and results.
        inside: when the kernels and collectives run.
    """

    kernels: tuple[KernelUse, ...]
    collectives: tuple[CollectiveUse, ...]
    bytes: float
    inside: InRegion

    @property
    def seconds(self) -> float:
        """Seconds of the kernels."""
        return sum(kernel.seconds for kernel in self.kernels)

    def reported_for(self, op: int, value: int) -> RegionPrice:
        """The same price, with kernels and collectives reported for that op and that array at its boundary."""
        return replace(
            self,
            kernels=tuple([replace(use, ops=(op,), inside=True) for use in self.kernels]),
            collectives=tuple([replace(use, op=op, value=value) for use in self.collectives]),
        )

    def kernels_in(self, runs: float) -> Iterator[KernelUse]:
        """The kernels of `runs` runs."""
        for use in self.kernels:
            yield replace(
                use,
                runs=runs * use.runs,
                flops=runs * use.flops,
                bytes=runs * use.bytes,
                seconds=runs * use.seconds,
            )

    def collectives_in(self, runs: float) -> Iterator[CollectiveUse]:
        """The collectives of `runs` runs."""
        for use in self.collectives:
            yield replace(use, count=runs * use.count, seconds=runs * use.seconds)


@dataclass(frozen=True)
class RegionPrices:
    """The manual regions of a program. price: op -> the price of one run, given the axes that split its factors.
    moments: of a run of the longest region, see `timeline`."""

    price: Mapping[int, Callable[[FactorAxes], RegionPrice]]
    moments: int
