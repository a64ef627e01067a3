"""Prices what single items communicate and hold once the shardings around them are known: collectives, copies, bytes.

Enters: work and array items with the iterations of the patterns they touch. Leaves: numbers. No memory of earlier plans; the
evaluator adds that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod

from toast_cli.compiler.reduction_combining import combined_bytes
from toast_cli.compiler.scatter_fates import ScatterFates, in_order, split_further
from toast_cli.compiler.small_gathers import stays_gather
from toast_cli.compiler.tiling import growth as growth_of_tiles
from toast_cli.compiler.tiling import tile_of
from toast_cli.cost.collectives import collective_seconds
from toast_cli.cost.corrections import NO_CORRECTIONS, Corrections
from toast_cli.cost.model import CollectiveUse
from toast_cli.dimensions.model import SlotKind
from toast_cli.evaluate.items import ArrayItem, Items, Reader, WorkItem
from toast_cli.evaluate.sum_items import SumItem, cut_by_readers, together
from toast_cli.plan.halo import exchanged
from toast_cli.plan.iteration import Iteration
from toast_cli.plan.problem import Problem
from toast_cli.plan.reshard import GATHER, PERMUTE, Step, reshard_steps
from toast_cli.plan.sharding import Sharding, shards
from toast_cli.program.ops import ARGUMENT, REDUCE

Lowered = dict[int, Iteration]  # pattern -> what it iterates over under the plan at hand


@dataclass(frozen=True, slots=True)
class Copy:
    """A resharded copy of the arrays of one item: in `sharding`, for the readers at `places`, by `steps` that communicate."""

    sharding: Sharding
    places: tuple[int, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class _Reduced:
    """Whose partial results are reduced: those of `op`, and of all it stands for, `runs` times in one run of the program. needed: [results]
    part of the bits that readers need."""

    op: int
    runs: float
    needed: tuple[float, ...]
    late: bool
    in_loop: bool


class Pricer:
    """Prices items of one problem."""

    def __init__(self, problem: Problem, items: Items, corrections: Corrections = NO_CORRECTIONS) -> None:
        self._problem = problem
        self._corrections = corrections.collectives
        self._items = items
        self._sizes = problem.mesh.sizes
        self._seconds: dict[tuple[str, float, tuple[int, ...], bool], float] = {}
        self._profile = items.compilation.profile
        self._tile, self._combined_bytes = tile_of(self._profile), combined_bytes(self._profile)
        self._scatters = ScatterFates(problem, self._profile)
        self._growths: dict[tuple[tuple[int, ...], tuple[int, ...], Sharding, Sharding], float] = {}

    # -- what work communicates -------------------------------------------------------------------------------

    def work_collectives(self, work: WorkItem, iteration: Iteration) -> Iterator[CollectiveUse]:
        """All-reduces and reduce-scatters of partial results that are in no sum, reshards to where results are pinned, halo exchanges of split
        neighbourhoods."""
        results = self._problem.program.ops[work.op].results
        if not work.summed and (iteration.reduced or any(iteration.scattered)):
            how = _Reduced(work.op, work.runs, work.needed, work.late, work.in_loop)
            for k, whole in enumerate(work.whole_bytes):
                yield from self._reductions(iteration, k, whole, how, apart=work.kind.matrix_unit)
        for k, (source, target) in enumerate(zip(iteration.reduced_to, iteration.shardings, strict=True)):
            for step in reshard_steps(source, target, self._sizes, self._shape(results[k])):
                written = (step.kind, work.whole_bytes[k] * step.fraction)
                size, waited_for = written[1] * work.needed[k], not work.late
                seconds = self._seconds_of(step.kind, size, step.axes)
                yield _use(
                    step.kind,
                    step.axes,
                    size,
                    work.runs,
                    seconds,
                    work.op,
                    results[k],
                    waited_for=waited_for,
                    written=written,
                )
        yield from self._exchanges(work, iteration)

    def _exchanges(self, work: WorkItem, iteration: Iteration) -> Iterator[CollectiveUse]:
        """What devices send each other of the first operand, where its windows reach beyond their shards."""
        op = self._problem.program.ops[work.op]
        form = self._problem.patterns[work.pattern].form
        if not work.windows:
            for slot, axes in enumerate(iteration.slot_axes):
                if axes and form.kinds[slot] is SlotKind.PERMUTATION:
                    yield self._exchange(
                        work, "collective-permute", axes, self.local(work.whole_bytes[0], iteration.computed[0])
                    )
            return
        size = self.local(self._problem.program.values[op.operands[0]].bytes, iteration.operands[0])
        for window in work.windows:
            axes = iteration.operands[0][window.operand_dim]
            if not axes:
                continue
            pieces = shards((axes,), self._sizes)
            summed = iteration.computed[0][window.result_dim] != axes
            sent = exchanged(window, pieces, summed=summed)
            if sent is None:
                size *= pieces
                yield self._exchange(work, "all-gather", axes, size)
                continue
            element = size * pieces / window.inputs
            for elements in sent:
                yield self._exchange(work, "collective-permute", axes, element * elements)
            size += element * sum(sent)

    def _exchange(self, work: WorkItem, kind: str, axes: tuple[int, ...], size: float) -> CollectiveUse:
        op = self._problem.program.ops[work.op]
        seconds = self._seconds_of(kind, size, axes)
        return _use(kind, axes, size, work.runs, seconds, work.op, op.operands[0] if work.windows else op.results[0])

    def sum_collectives(self, item: SumItem, lowered: Lowered) -> Iterator[CollectiveUse]:
        """All-reduces and reduce-scatters of the partial results that are added up in sums."""
        for found in together(self._problem, item, lowered):
            term = item.terms[found.first]
            iteration = lowered[term.pattern]
            cut = cut_by_readers(item, iteration.reduced, lowered) if found.whole and iteration.reduced else ()
            needed = item.needed if found.whole else 1.0
            how = _Reduced(item.ops[found.first], item.runs, (needed,), item.late, item.in_loop)
            apart = term.product and found.count == 1
            yield from self._reductions(iteration, 0, term.bytes, how, apart=apart, cut=cut)

    def _reductions(
        self,
        iteration: Iteration,
        k: int,
        whole: int,
        how: _Reduced,
        *,
        apart: bool,
        cut: tuple[int, ...] = (),
    ) -> Iterator[CollectiveUse]:
        """What makes partial result k, of `whole` bytes on all devices, complete.

        Args:
            apart: scattered one axis after the other, as a product's is (see `PartitionedProgram.path`), not over all at once. cut: axes it is
                all-reduced over, and each device then keeps a piece, which makes a reduce-scatter of that.
        """
        size = self.local(whole, iteration.computed[k])
        scattered = in_order(iteration, k)
        op = self._problem.program.ops[how.op]
        if op.name == REDUCE and len(op.results) > 1:  # an argmax: XLA gathers what each device found
            over = tuple(sorted({*scattered, *iteration.reduced}))
            yield self._reduction("all-gather", over, size * shards((over,), self._sizes), k, how)
            return
        sharding = iteration.computed[k]
        steps = [*((axis,) for axis in scattered), cut] if apart else [tuple(sorted((*scattered, *cut)))]
        for axes in filter(None, steps):
            size /= shards((axes,), self._sizes)
            yield self._scatter(axes, size, sharding, iteration, k, how)
            sharding = split_further(sharding, iteration.reduced_to[k], axes)
        if rest := tuple(axis for axis in iteration.reduced if axis not in cut):
            yield self._reduction("all-reduce", rest, size, k, how)

    def _scatter(
        self, axes: tuple[int, ...], size: float, sharding: Sharding, iteration: Iteration, k: int, how: _Reduced
    ) -> CollectiveUse:
        """A reduce-scatter to `size` bytes of partial result k, which lies in `sharding`; or the all-reduce that stays in its place."""
        fate = self._scatters.fate(how.op, k, axes, sharding, iteration, updates=how.late and not how.in_loop)
        if fate == "all-reduced":
            whole = size * shards((axes,), self._sizes)
            return self._reduction("all-reduce", axes, whole, k, how, ("reduce-scatter", size))
        return self._reduction("reduce-scatter", axes, size, k, how, hidden=fate == "around")

    def _reduction(
        self,
        kind: str,
        axes: tuple[int, ...],
        size: float,
        k: int,
        how: _Reduced,
        written: tuple[str, float] | None = None,
        *,
        hidden: bool = False,
    ) -> CollectiveUse:
        """Gradients are reduced together: XLA combines reductions that nothing waits for, but not across a loop's iterations."""
        moved = size * how.needed[k] if kind == "all-reduce" else size
        seconds = self._seconds_of(kind, moved, axes, combined=how.late and not how.in_loop)
        value = self._problem.program.ops[how.op].results[k]
        written = written or (kind, size)
        return _use(
            kind, axes, moved, how.runs, seconds, how.op, value, waited_for=not (how.late or hidden), written=written
        )

    # -- arrays --------------------------------------------------------------------------------------------------

    def copies(self, item: ArrayItem, lowered: Lowered) -> list[Copy]:
        """Shardings other than its own in which readers need the array, where getting there communicates."""
        made = lowered[item.pattern].shardings[item.result]
        wanted: dict[Sharding, list[int]] = {}
        for place, reader in enumerate(item.readers):
            sharding = lowered[reader.pattern].operands[reader.position]
            if sharding != made:
                wanted.setdefault(sharding, []).append(place)
        if not wanted or item.free:
            return []
        found = [
            Copy(at, tuple(places), reshard_steps(made, at, self._sizes, item.shape)) for at, places in wanted.items()
        ]
        return [copy for copy in found if copy.steps]

    def copied_bytes(self, item: ArrayItem, copy: Copy) -> float:
        """Of one whole array as it moves and then lies there: in the narrowest type that the copy's readers take, see `narrowing`."""
        return min(item.moved_bytes, item.bytes * max(item.readers[place].needed for place in copy.places))

    def array_collectives(self, item: ArrayItem, made: Sharding, copies: list[Copy]) -> Iterator[CollectiveUse]:
        """Reshards between where an array is made and where it is read; equal ones are shared, but not across the bounds of a loop:
        XLA moves no collective out of one. Only what is to be put in another order before it is gathered goes into the loop in that order,
        since propagation takes the sharding on the way to be the array's."""
        made_runs = self._problem.program.ops[self._problem.program.producer[item.values[0]]].trips
        for copy in copies:
            least = self.copied_bytes(item, copy)
            steps = copy.steps
            for k, step in enumerate(steps):
                each = _runs(item, copy)
                if k == 0 and len(steps) > 1 and step.kind == PERMUTE:
                    each = min(each, made_runs)
                runs = each * len(item.values)
                op = self._reader_op(item, item.readers[copy.places[0]])
                written = (step.kind, item.moved_bytes * step.fraction)
                size, value, waited_for = least * step.fraction, item.values[0], item.waited_for
                kind = self._as_emitted(step.kind, value, shards(made, self._sizes))
                seconds = self._seconds_of(kind, size, step.axes)
                yield _use(kind, step.axes, size, runs, seconds, op, value, waited_for=waited_for, written=written)

    def _as_emitted(self, kind: str, value: int, pieces: int) -> str:
        """What becomes of a step of a reshard of a value that lies in so many pieces."""
        return "all-reduce" if kind == GATHER and not stays_gather(self._profile, self._shape(value), pieces) else kind

    def _shape(self, value: int) -> tuple[int, ...]:
        return self._problem.program.values[value].shape

    def is_argument(self, item: ArrayItem) -> bool:
        program = self._problem.program
        return program.ops[program.producer[item.values[0]]].name == ARGUMENT

    def local(self, size: float, sharding: Sharding) -> float:
        """Bytes on one device of an array of `size` bytes."""
        return size / shards(sharding, self._sizes)

    def kept(self, item: ArrayItem, made: Sharding) -> float:
        """Bytes on one device of the item's array where it is made, with what its tiles waste and in all the forms that are kept of it."""
        shape = self._local_shape(item.shape, made) if item.images else ()
        if not item.images or not item.images.applies(shape):
            return self.laid_out(item, item.bytes, made, made)
        return item.images.kept(shape, item.tiling.dims, self._tile) * item.bytes / prod(item.shape)

    def _local_shape(self, shape: tuple[int, ...], sharding: Sharding) -> tuple[int, ...]:
        return tuple([ceil(n / shards((axes,), self._sizes)) for n, axes in zip(shape, sharding, strict=True)])

    def laid_out(self, item: ArrayItem, size: float, sharding: Sharding, made: Sharding) -> float:
        """The same of the item's array, or of `size` bytes of it in another type, with what its tiles waste. made: the sharding it has where it
        is made, whose tiles copies keep."""
        tiling = item.tiling
        dims = tuple(range(len(item.shape))) if tiling.copies and sharding == made else tiling.dims
        if not dims:
            return self.local(size, sharding) * tiling.fixed
        key = (item.shape, dims, sharding, made)
        found = self._growths.get(key)
        if found is None:
            cut, source = (self._local_shape(item.shape, at) for at in (sharding, made))
            found = self._growths[key] = growth_of_tiles(cut, dims, self._tile, like=source)
        return self.local(size, sharding) * found

    # -- helpers -------------------------------------------------------------------------------------------------

    def _reader_op(self, item: ArrayItem, reader: Reader) -> int:
        for op, position in self._problem.program.users[item.values[0]]:
            if position == reader.position and self._problem.op_pattern[op] == reader.pattern:
                return op
        return self._problem.program.producer[item.values[0]]

    def _seconds_of(self, kind: str, size: float, axes: tuple[int, ...], *, combined: bool = False) -> float:
        key = (kind, size, axes, combined)
        seconds = self._seconds.get(key)
        if seconds is None:
            together = self._combined_bytes if combined else 0.0
            seconds = collective_seconds(self._problem.mesh, kind, size, axes, combined_bytes=together)
            seconds = self._seconds[key] = seconds * self._corrections.get(kind, 1.0)
        return seconds


def _use(
    kind: str,
    axes: tuple[int, ...],
    size: float,
    count: float,
    seconds: float,
    op: int,
    value: int,
    *,
    waited_for: bool = True,
    written: tuple[str, float] | None = None,
) -> CollectiveUse:
    return CollectiveUse(kind, axes, size, count, count * seconds, op, value, waited_for, written or (kind, size))


def _runs(item: ArrayItem, copy: Copy) -> float:
    """How often the copy of one array is made: in each loop anew."""
    runs: dict[int, float] = {}
    for place in copy.places:
        reader = item.readers[place]
        runs[reader.loop] = max(runs.get(reader.loop, 0.0), reader.runs)
    return sum(runs.values())
