"""What the ops of a work item take to compute on one device, once it is known what they iterate over.

Enters: work items with the iteration of their pattern. Leaves: seconds, FLOPs and bytes; those of manual regions are
known (see `manual_regions`). What they communicate is in
`pricing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod

from toast_cli.compiler import on_chip_reuse, space_to_batch
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.compiler.space_to_batch import ConvolvedImage
from toast_cli.cost.matrix_unit import Grid, grid_of, growth
from toast_cli.cost.model import KernelUse
from toast_cli.cost.roofline import kernel_seconds
from toast_cli.evaluate.items import WorkItem
from toast_cli.evaluate.region_price import RegionPrices
from toast_cli.plan.iteration import Iteration
from toast_cli.plan.problem import Problem
from toast_cli.plan.sharding import Sharding, shards


class WorkPricer:
    """Prices the work of one problem."""

    def __init__(self, problem: Problem, profile: CompilerProfile, regions: RegionPrices) -> None:
        self._problem = problem
        self._regions = regions
        self._attained = profile.attained
        self._kept_bytes = on_chip_reuse.kept_bytes(profile)
        self._on_chip = profile.on_chip
        self._sizes = problem.mesh.sizes
        self._grids: dict[int, Grid] = {}
        self._profile = profile
        self._images: dict[int, tuple[ConvolvedImage, ...]] = {}

    def seconds(self, work: WorkItem, iteration: Iteration) -> float:
        """Compute time of all ops of the item: of each one's kernel on its local shape."""
        if work.region >= 0:
            return work.runs * self._regions[work.region].price(iteration.slot_axes).seconds
        if not work.kernels and not work.flops:
            return 0.0
        sizes, chip, attained = self._sizes, self._problem.mesh.chip, self._attained
        cuts = (
            tuple([shards((axes,), sizes) for axes in iteration.slot_axes])
            if work.flops or work.kind.matrix_unit
            else ()
        )
        apart = bool(work.unfinished) and not work.carried and (bool(iteration.reduced) or any(iteration.scattered))
        reads, into, vector = self._coming_in(work, iteration)
        read, out, finishing = self._going_out(work, iteration.reduced_to if apart else iteration.computed)
        flops = work.flops / prod(cuts)
        if work.kind.matrix_unit:
            flops *= growth(chip, attained, work.dtype, self._grid(work), cuts)
            extra = self._cutting(work, iteration) if work.kind.convolution else 0.0
            if apart:  # written, reduced, read to be finished
                made, left = (
                    work.unfinished / shards(at[0], sizes) for at in (iteration.computed, iteration.reduced_to)
                )
                first = kernel_seconds(chip, attained, work.dtype, flops, vector, reads + max(into, made), work.kernels)
                return work.runs * (
                    extra + first + kernel_seconds(chip, attained, "", 0.0, finishing, read + out + left)
                )
        else:
            vector, flops, extra = vector + flops, 0.0, 0.0
        # The larger of what comes in and what goes out passes through the vector unit.
        moved = reads + read + max(into, out)
        return work.runs * (
            extra + kernel_seconds(chip, attained, work.dtype, flops, vector + finishing, moved, work.kernels)
        )

    def _cutting(self, work: WorkItem, iteration: Iteration) -> float:
        """Seconds of cutting what a convolution reads into pieces, and of what it makes, see `space_to_batch`."""
        images = self._images.get(work.op)
        if images is None:
            found = space_to_batch.convolved_images(self._problem.program, work.op, self._profile)
            images = self._images[work.op] = tuple(found)
        bytes_moved = 0.0
        for image, sharding in zip(images, (iteration.operands[0], iteration.computed[0]), strict=False):
            count = [shards((axes,), self._sizes) for axes in sharding]
            bytes_moved += image.moved(tuple([ceil(n / k) for n, k in zip(image.shape, count, strict=True)]))
        return bytes_moved / (self._problem.mesh.chip.memory_bytes_per_second * self._attained.memory)

    def _coming_in(self, work: WorkItem, iteration: Iteration) -> tuple[float, float, float]:
        """(bytes read, bytes of the array that most of goes through the vector unit, elementwise flops) of a kernel on
        the operands' sides. What is small enough stays on the chip between kernels."""
        kept, sizes = self._kept_bytes, self._sizes
        reads = most = vector = 0.0
        for (read, through, flops, passing, staying, beside, widest), sharding in zip(
            work.operands, iteration.operands, strict=True
        ):
            if read or flops:
                count = shards(sharding, sizes)
                if staying:
                    read -= staying * self._spared(beside, count)
                reads += (read - passing if widest <= kept * count else read) / count
                vector += flops / count
                most = max(most, through / count)
        return reads, most, vector

    def _going_out(self, work: WorkItem, shardings: tuple[Sharding, ...]) -> tuple[float, float, float]:
        """(bytes read, bytes written, elementwise flops) of a kernel on the results' sides, which lie in these
        shardings."""
        kept, sizes = self._kept_bytes, self._sizes
        reads = out = vector = 0.0
        for (read, through, flops, passing, staying, beside, widest), sharding in zip(
            work.results, shardings, strict=True
        ):
            count = shards(sharding, sizes)
            vector += flops / count
            if staying:
                left = 1.0 - staying * self._spared(beside, count) / max(staying, read + through)
                read, through = read * left, through * left
            if not passing or widest > kept * count:
                reads += read / count
                out += through / count
        return reads, out, vector

    def _spared(self, beside: float, count: int) -> float:
        """The part of what a loop would keep on the chip that is no traffic: none if not all of it fits there, else
        what device memory would take longer. beside: bytes of whole arrays, `count` shards of each."""
        fits = self._on_chip.bytes * count >= beside
        return 1.0 - 1.0 / self._on_chip.speed if fits else 0.0

    def uses(self, work: WorkItem, iteration: Iteration) -> Iterator[KernelUse]:
        """What the item's kernels do and take."""
        if work.region >= 0:
            yield from self._regions[work.region].price(iteration.slot_axes).kernels_in(work.runs)
            return
        seconds = self.seconds(work, iteration)
        if seconds:
            yield KernelUse(work.ops, work.kind.name, work.runs, *self._size(work, iteration), seconds)

    def _size(self, work: WorkItem, iteration: Iteration) -> tuple[float, float]:
        """(FLOPs, bytes read and written) of all ops of the item on one device."""
        sizes = self._sizes
        flops = work.flops / prod(shards((axes,), sizes) for axes in iteration.slot_axes)
        moved = 0.0
        for sides, shardings in ((work.operands, iteration.operands), (work.results, iteration.computed)):
            for (size, through, elementwise, *_), sharding in zip(sides, shardings, strict=True):
                count = shards(sharding, sizes)
                moved += (size if sides is work.operands else max(size, through)) / count
                flops += elementwise / count
        return work.runs * flops, work.runs * moved

    def _grid(self, work: WorkItem) -> Grid:
        grid = self._grids.get(work.op)
        if grid is None:
            form = self._problem.patterns[work.pattern].form
            grid = self._grids[work.op] = grid_of(form, work.flops, work.kind.convolution)
        return grid
