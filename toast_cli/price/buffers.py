"""Buffers of an array item in device memory under a plan: their bytes and live intervals.

* the arrays themselves, where they are written to memory;
* copies in other shardings, live from the first to the last reader of each. A loop gathers in each iteration; on some
  chips it gathers loop-invariant arrays first, at its start (see `copy_made_at`). A copy that is no larger than the
  array, or that a loop slices, is made before the loops that read it (see `reshard.steps_ahead`) and lives until they
  end; so does a copy that the plan gathers before them;
* partial results: a kernel whose reduction is split over an axis writes its partial result, even if a consumer would be
  fused with it. The reduced array then lives, at its own size, until its readers in program order, because gradients'
  reductions are combined and scheduled late, or until copies are made of it for them. A reduce-scatter that XLA makes
  an all-reduce leaves the whole result until the last kernel slices it;
* initial arrays of scatters (see `scatter_starts`);
* buffers of results that are not made yet (see `waiting_results`), and arguments that are copied for convolutions (see
  `convolved_arguments`);
* copies into tiles of rows while look-ups read them (see `row_copies`), and what a softmax reads (see
  `masked_softmaxes`);
* the peak inside a manual region while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from toast_cli.plan.problem import Problem
from toast_cli.plan.reshard import GATHER, Copy
from toast_cli.plan.sharding import OpSharding
from toast_cli.price.arrays import ArrayItem, Layouts
from toast_cli.price.items import Items
from toast_cli.price.liveness import Interval, copy_made_at, typical_bytes, waiting_results
from toast_cli.price.on_chip import OnChipMemory
from toast_cli.price.pricing import Pricer
from toast_cli.price.timeline import Spans, Timeline
from toast_cli.program.ops import ARGUMENT, CARRY
from toast_cli.program.values import in_transit, moved, on_host, readings, replacing

OWN, PARTIAL, REDUCED, UNCUT, INSIDE = "own", "partial", "reduced", "uncut", "inside"
STARTED = "started"  # the initial array of a scatter
CONVOLVED = "convolved"  # an argument copied for convolutions
ROWS = "rows"  # a copy in tiles of its rows
SPREAD = "spread"  # what a softmax reads and writes beside its scores
WAITING = "waiting"  # the buffer of a result that is not made yet


@dataclass(frozen=True, slots=True)
class CopyFor:
    """A copy for some readers. ahead: it is made before the loops that read it."""

    readers: tuple[int, ...]
    ahead: bool


@dataclass(frozen=True, slots=True)
class HandedOn:
    """A reduced array that is then copied. copies: readers of each copy."""

    copies: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PutTogether:
    """The gathered pieces that a copy is assembled from."""

    copy: CopyFor


Kind = str | CopyFor | HandedOn | PutTogether  # the names above, or one of these


class Buffers:
    """The buffers of the array items of one problem."""

    def __init__(self, problem: Problem, items: Items, pricer: Pricer) -> None:
        compilation, program = items.compilation, problem.program
        self._problem, self._pricer = problem, pricer
        self._lives, self._deaths = items.lives, items.lives.deaths
        self._started, self._convolved = compilation.started, compilation.convolved
        self._on_host, self._moved = on_host(program), moved(program)
        self._no_host_memory = replacing(program, items.lives.into_arguments) | in_transit(program)
        self._copies: dict[tuple[int, CopyFor], list[Interval]] = {}
        self._spans: dict[tuple[tuple[int, ...], Kind, bool], Spans] = {}
        self._layouts = Layouts(problem, compilation.profile)
        self._waiting_results = waiting_results(program, items.lives, compilation.profile)
        self._typical_bytes = typical_bytes(program, items.lives) / problem.mesh.devices
        self._gathers_first = "loop-gathers-first" in compilation.profile.passes
        self.on_chip = OnChipMemory(program, problem.mesh, compilation.profile, compilation.elapsed)

    def held(self, item: ArrayItem, op_sharding: OpSharding, copies: list[Copy]) -> Iterator[tuple[Kind, float]]:
        """(kind, bytes of one array) of the buffers of an item; `intervals` gives their lifetimes.

        op_sharding: of the op that makes the item. copies: of it, see `Pricer.copies`.
        """
        sharding, computed = op_sharding.shardings[item.result], op_sharding.computed[item.result]
        if item.stored:
            own = self._layouts.kept(item, sharding)
            yield OWN, own
            if own < self._typical_bytes and not self._waiting_results.keys().isdisjoint(item.values):
                yield WAITING, own
        copied = next((self._convolved[value] for value in item.values if value in self._convolved), None)
        if copied is not None and item.tiling.dims:
            yield CONVOLVED, self._layouts.convolved(item, copied, sharding)
        partial = op_sharding.reduced or op_sharding.scattered[item.result]
        if any(partial or not self._started[value].added for value in item.values if value in self._started):
            yield STARTED, self._layouts.laid_out(item, item.written_bytes, computed, computed)
        rows = max([size for _, size, _ in self._layouts.row_copies(item, sharding)], default=0.0)
        if rows:
            yield ROWS, rows
        if spread := self._layouts.spread(item, sharding):
            yield SPREAD, spread + self._layouts.kept(item, sharding)  # with its exponentials
        if item.region >= 0:
            yield INSIDE, self._pricer.inside_bytes(item, op_sharding)
        if partial:
            reduced = HandedOn(tuple([copy.places for copy in copies])) if copies else REDUCED
            yield reduced, self._layouts.kept(item, sharding)
            if op_sharding.scattered[item.result]:
                yield PARTIAL, self._layouts.laid_out(item, item.written_bytes, computed, computed)
                if self._pricer.is_cut_late(item, op_sharding):
                    yield UNCUT, self._layouts.kept(item, computed) - self._layouts.kept(item, sharding)
        for copy in copies:
            size = self._pricer.moved_bytes(item, copy.places)
            kind = CopyFor(copy.places, copy.ahead == len(copy.steps))
            yield kind, self._layouts.laid_out(item, size, copy.sharding, sharding)
            if self._layouts.is_put_together(item, copy, sharding):
                yield PutTogether(kind), self._layouts.laid_out(item, size, copy.sharding, sharding)
            # It is gathered partly ahead of loops and further within them.
            if copy.ahead < len(copy.steps) and any(step.kind == GATHER for step, _ in copy.steps[: copy.ahead]):
                between = copy.steps[copy.ahead - 1][1]
                yield CopyFor(copy.places, True), self._layouts.laid_out(item, size, between, sharding)

    def intervals(self, item: ArrayItem, kind: Kind) -> list[Interval]:
        """Live intervals in ticks of the buffers of that kind, over all values of the item."""
        return [interval for value in item.values for interval in self.of_value(item, kind, value)]

    def of_value(self, item: ArrayItem, kind: Kind, value: int) -> list[Interval]:
        """The same for one value."""
        if kind in (OWN, SPREAD):
            return [] if value in self._on_host else self._lives.intervals[value]
        if isinstance(kind, PutTogether):
            return [(first, first) for first, _ in self.of_value(item, kind.copy, value)]
        if isinstance(kind, HandedOn):
            return self._waiting(item, self._lives.times[self._problem.program.producer[value]], value, kind.copies)
        if isinstance(kind, CopyFor):
            if (value, kind) not in self._copies:
                self._copies[value, kind] = self._copied(item, kind, value)
            return self._copies[value, kind]
        if kind == CONVOLVED:
            return [self._convolved[value].interval] if value in self._convolved else []
        if kind == WAITING:
            there = value in self._waiting_results and value not in self._on_host
            return [(0, self._waiting_results[value])] if there else []
        if kind == STARTED:
            return [self._started[value].interval] if value in self._started else []
        born = self._lives.times[self._problem.program.producer[value]]
        if kind == ROWS and not item.row_copies[0].gathered:
            ops = self._problem.program.ops
            read = [
                self._lives.times[op]
                for op, position in self._problem.program.users[value]
                if ops[op].kind.lookup and not position
            ]
            return [(min(read), max(read))] if read else []
        if kind == UNCUT:
            last = self._cut_by(value)
            return [(born + 1, last)] if born < last else []
        return [(born, born)] if kind in (PARTIAL, INSIDE, ROWS) else self._waiting(item, born, value)

    def on_host(self, item: ArrayItem, op_sharding: OpSharding) -> tuple[float, list[Interval]]:
        """(bytes of one array, live intervals of the item's arrays in host memory). A result that replaces an argument
        reuses its buffer; slices in transit need none."""
        mine = self._on_host.intersection(item.values) - self._no_host_memory
        intervals = [interval for value in mine for interval in self._lives.intervals[value]]
        return self._pricer.local(item.bytes, op_sharding.shardings[item.result]), intervals

    def resting(self, item: ArrayItem) -> int:
        """The number of an item's arrays that are arguments in device memory."""
        program = self._problem.program
        is_argument = program.ops[program.producer[item.values[0]]].name == ARGUMENT
        return sum(value not in self._on_host for value in item.values) if is_argument else 0

    def brief(self, item: ArrayItem, kind: Kind, size: float) -> list[Interval]:
        """Those of these intervals that arrays of `size` bytes may spend in on-chip memory."""
        if not 0 < size <= self.on_chip.largest:
            return []
        return [
            interval
            for value in item.values
            for interval in self.of_value(item, kind, value)
            if self.is_brief(kind, value, interval)
        ]

    def spans(self, timeline: Timeline, item: ArrayItem, kind: Kind, size: float) -> Spans:
        """Live intervals and bytes of the buffers of that kind. Memoises the intervals, of one timeline."""
        key = item.values, kind, size <= self.on_chip.largest
        if key not in self._spans:
            self._spans[key] = timeline.spans(self.intervals(item, kind), self.brief(item, kind, size))
        first, last, count = self._spans[key]
        return first, last, size * count

    def is_brief(self, kind: Kind, value: int, interval: Interval) -> bool:
        """Whether that array, if it is small enough, may be in on-chip memory for this interval; unreduced arrays,
        uncut ones, results, and those moved from or to host memory may not."""
        if kind in (PARTIAL, UNCUT, WAITING) or value in self._moved:
            return False
        return self.on_chip.brief(interval) and (
            (kind not in (OWN, REDUCED) and not isinstance(kind, HandedOn)) or self.on_chip.may_hold(value)
        )

    def role(self, item: ArrayItem, kind: Kind) -> str:
        """Its name in reports: "argument", "carry", "temporary", "gathered", "partial" or "inside"."""
        if kind == INSIDE:
            return INSIDE
        if kind in (STARTED, WAITING, CONVOLVED, ROWS, SPREAD):
            return "temporary"
        if kind != OWN:
            return "gathered" if isinstance(kind, CopyFor | PutTogether) else "partial"
        program = self._problem.program
        maker = program.ops[program.producer[item.values[0]]].name
        return {ARGUMENT: "argument", CARRY: "carry"}.get(maker, "temporary")

    def _waiting(
        self, item: ArrayItem, born: int, value: int, copies: tuple[tuple[int, ...], ...] = ()
    ) -> list[Interval]:
        """From its producer to its last reader in program order; only the part after the array's own interval, if that
        is counted. Empty if a written view of it is counted instead."""
        lives, program = self._lives, self._problem.program
        users = program.users[value]
        last = max([born, *self._last_reads(item, users, copies)])
        if not item.stored:
            return [] if self._is_written_view(value) else [(born, last)]
        own = max((end for _, end in lives.intervals[value]), default=last)
        return [(own + 1, last)] if own < last else []

    def _last_reads(
        self, item: ArrayItem, users: list[tuple[int, int]], copies: tuple[tuple[int, ...], ...]
    ) -> Iterator[int]:
        """When each user reads the array itself, and for each copy of it, when the first of its users reads it."""
        of = {
            (item.readers[place].pattern, item.readers[place].position): copy
            for copy, places in enumerate(copies)
            for place in places
        }
        copied: dict[int, int] = {}
        for op, position in users:
            copy = of.get((self._problem.op_pattern[op], position))
            if copy is None:
                yield self._deaths[op]
            else:
                copied[copy] = min(copied.get(copy, self._deaths[op]), self._deaths[op])
        yield from copied.values()

    def _is_written_view(self, value: int) -> bool:
        """Whether the only use of a value is a chain of views and conversions that ends in a written, counted array."""
        program = self._problem.program
        while len(users := program.users[value]) == 1 and program.ops[users[0][0]].kind.view_or_convert:
            value = program.ops[users[0][0]].results[0]
            if self._lives.intervals[value]:
                return True
        return False

    def _cut_by(self, value: int) -> int:
        """Tick of the last kernel that reads a value, directly or by fusion. Contractions, which get a slice of
        their own, and readers in other loops do not count."""
        program, lives = self._problem.program, self._lives
        loop, last = program.ops[program.producer[value]].loop, -1
        seen, waiting = {value}, [value]
        while waiting:
            for number, _ in program.users[waiting.pop()]:
                op = program.ops[number]
                if op.loop != loop or op.kind.matrix_unit:
                    continue
                result = op.results[0] if op.results else -1
                if result < 0 or not op.kind.fusible or lives.intervals[result]:
                    last = max(last, lives.times[number])
                elif result not in seen:
                    seen.add(result)
                    waiting.append(result)
        return last

    def _copied(self, item: ArrayItem, copy: CopyFor, value: int) -> list[Interval]:
        """Live intervals of a copy; none where only loop carries or donated arguments use it."""
        program, patterns, lives = self._problem.program, self._problem.op_pattern, self._lives
        wanted = {(item.readers[p].pattern, item.readers[p].position) for p in copy.readers}
        uses = [
            (op, position)
            for op, position in program.users[value]
            if (patterns[op], position) in wanted and not (program.ops[op].name == CARRY or op in lives.into_arguments)
        ]
        reads: dict[int, list[Interval]] = {}  # loop -> intervals of its reads there
        home = program.ops[program.producer[value]].loop
        for use, read in zip(uses, readings(program, value, uses), strict=True):
            op, loop = use[0], program.ops[use[0]].loop
            if copy.ahead and read.ahead != read.inside:
                outermost = loop
                while (parent := program.loops[outermost].parent) != read.ahead.region.loop:
                    outermost = parent
                interval = 2 * program.loops[outermost].first, lives.read_at[use]
                reads.setdefault(read.ahead.region.loop, []).append(interval)
            else:
                reads.setdefault(loop, []).append((lives.times[op], lives.deaths[op]))
        alive = []
        for loop, intervals in reads.items():
            first = min(born for born, _ in intervals)
            if self._gathers_first:
                first = copy_made_at(program, loop, home, first)
            alive.append((first, max([first, *(last for _, last in intervals)])))
        return alive
