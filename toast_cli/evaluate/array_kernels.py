"""Compute time around arrays: kernels that slice and insert halos, compute arrays unsliced, and transpose rows.

In: array items with the shardings around them, and the collectives that move them. Out: kernels with their
seconds; for those of ops see `kernel_pricing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import ceil

from toast_cli.compiler.layouts import growth, tile_of
from toast_cli.compiler.on_chip import kept_bytes, kernel_starts
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.cost.model import CollectiveUse, KernelUse
from toast_cli.cost.roofline import kernel_seconds
from toast_cli.evaluate.array_items import ArrayItem
from toast_cli.evaluate.layouts import Layouts
from toast_cli.plan.problem import Problem
from toast_cli.plan.reshard import EXCHANGE, Copy, moves_of
from toast_cli.plan.sharding import Sharding, refines, shards

COPY = "copy"  # the name of a kernel that lays an array out anew


class ArrayKernels:
    """Prices the kernels around the arrays of one problem."""

    def __init__(self, problem: Problem, profile: CompilerProfile) -> None:
        self._problem, self._sizes, self._tile = problem, problem.mesh.sizes, tile_of(profile)
        self._kept_bytes, self._starts, self._on_chip = kept_bytes(profile), kernel_starts(profile), profile.on_chip
        self._attained = profile.attained
        self._elementwise = replace(self._attained, memory=self._attained.elementwise or self._attained.memory)
        self._counts_residents = "resident-kernels" in profile.passes
        self._layouts, self._turning_cycles = Layouts(problem, profile), profile.turning_cycles

    def uses(
        self, item: ArrayItem, made: Sharding, read: Sequence[Sharding], copies: Sequence[Copy]
    ) -> Iterator[KernelUse]:
        """The kernels of an array that is made in sharding `made`.

        Args:
            read: [readers] sharding that each takes. copies: see `Pricer.copies`.
        """
        yield from self._unsliced(item, made, read)
        yield from self._laid_out(item, made, copies)
        yield from self._into_rows(item, made)

    def exchange_uses(self, sent: Iterable[CollectiveUse]) -> Iterator[KernelUse]:
        """The kernels in loops that slice halos out and insert received ones, see `Starts`."""
        if not self._counts_residents:
            return
        ops = self._problem.program.ops
        rate = self._problem.mesh.chip.memory_bytes_per_second * self._attained.memory
        for use in sent:
            if ops[use.op].loop >= 0:
                moved = 2.0 * use.bytes
                seconds = use.count * (self._starts.vector + moved / rate)
                yield KernelUse((use.op,), ops[use.op].name, use.count, 0.0, use.count * moved, seconds)

    def _unsliced(self, item: ArrayItem, made: Sharding, read: Sequence[Sharding]) -> Iterator[KernelUse]:
        """The kernel that computes a whole array, if readers take different shards of it; the shards themselves count
        with the readers."""
        if item.making is None:
            return
        taken, sizes = {*read, made} if item.as_made else {*read}, self._sizes
        finest = max([shards(at, sizes) for at in taken if at != made and refines(at, made)], default=0)
        if not finest or len(taken) == 1:
            return
        ops, pieces = self._problem.program.ops, shards(made, sizes)
        makers = [self._problem.program.producer[value] for value in item.values]
        part, size = 1.0 / pieces - 1.0 / finest, float(item.bytes)
        flops, moved = (0.0, size) if made in taken else (item.making.flops, size + item.making.read)
        if size <= self._kept_bytes * pieces:
            moved = moved / self._on_chip.vector_speed if self._on_chip.vector_speed else 0.0
        seconds = self._seconds(flops * part, moved * part)
        runs = len(makers) * ops[makers[0]].trips
        if seconds:
            yield KernelUse(
                tuple(makers), ops[makers[0]].name, runs, runs * flops * part, runs * size * part, runs * seconds
            )

    def _laid_out(self, item: ArrayItem, made: Sharding, copies: Sequence[Copy]) -> Iterator[KernelUse]:
        """The kernels that lay rows out for a collective that joins or cuts them, and anew after it.

        A collective concatenates along the rows of tiles, not within a row. So rows whose parts are gathered or
        exchanged (see `dims_of_rows`) are transposed for it, unless they have whole tiles, and again after it
        (libtpu 0.0.42.1 for v4 and v5e: 16 of 256 features of 327,680 rows take 219 and 814 us on v4). Exchanged parts
        of whole tiles are put side by side by one copy (16,384 rows of 2 parts of 128 features: 23 to 139 us on v4);
        gathered ones need none.
        """
        if len(item.tiling.lanes) != 1 or not copies:
            return
        (lane,), producer = item.tiling.lanes, self._problem.program.producer
        makers = tuple([producer[value] for value in item.values])
        for step, before, after, places, ahead in moves_of(made, copies):
            if before[lane] == after[lane]:
                continue
            (sent, padded), (received, kept) = (self._bytes(item, at, lane) for at in (before, after))
            if padded > sent:
                moved = padded + sent + received + kept
            elif step.kind == EXCHANGE:
                moved = received + kept
            else:
                continue
            runs = len(makers) * item.runs_of(places, ahead=ahead)
            seconds = self._seconds(0.0, moved)
            yield KernelUse(makers, COPY, runs, 0.0, runs * moved, runs * seconds)

    def _into_rows(self, item: ArrayItem, made: Sharding) -> Iterator[KernelUse]:
        """The kernels that copy an array into tiles of its rows, see `row_copies`: each tile is transposed."""
        chip, producer = self._problem.mesh.chip, self._problem.program.producer
        makers = tuple([producer[value] for value in item.values])
        for copy, size, tiles in self._layouts.row_copies(item, made):
            moved, runs = size + self._layouts.kept(item, made), len(makers) * copy.runs
            turning = tiles * self._turning_cycles / chip.clock_hertz
            yield KernelUse(makers, COPY, runs, 0.0, runs * moved, runs * max(turning, self._seconds(0.0, moved)))

    def _bytes(self, item: ArrayItem, sharding: Sharding, lane: int) -> tuple[float, float]:
        """Bytes of one device's part of the array, and of the same in tiles that have its rows in the lanes."""
        local = tuple([ceil(n / shards((axes,), self._sizes)) for n, axes in zip(item.shape, sharding, strict=True)])
        size = item.written_bytes / shards(sharding, self._sizes)
        return size, size * growth(local, tuple(range(len(local))), self._tile, lanes=(lane,))

    def _seconds(self, flops: float, moved: float) -> float:
        return kernel_seconds(self._problem.mesh.chip, self._elementwise, "", 0.0, flops, moved, 0.0)
