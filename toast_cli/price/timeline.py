"""One step along its schedule: communication that stays exposed when collectives overlap with compute as far as the
program's order and the compiler allow, and memory over time.

Each loop's body is scheduled by itself and counted once per trip: nothing in a loop overlaps with work outside of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from toast_cli.plan.problem import Problem
from toast_cli.price.compilation import Compilation
from toast_cli.price.cost import BY_HAND, INSIDE, ITSELF, CollectiveUse, KernelUse
from toast_cli.price.liveness import Lives
from toast_cli.program.ops import ARGUMENT, CARRY, RESULT

# ---------------------------------------------------------------- the expected step

OUTSIDE = -1  # the number of no loop
# Share of a step, or of a loop's trip, below which communication that could overlap with compute is taken not to.
NEGLIGIBLE = 1e-4
_BEFORE: frozenset[str] = frozenset({"reshard", "neighbours"})  # their results are read by an op
_AFTER: frozenset[str] = frozenset({"partial", "pin"})  # they complete an op's result


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Kernels and collectives of a part of a plan, where they are in the program.

    Attributes:
        kernels: [3, kernels] the loop each is in or `OUTSIDE`, when it runs there, and seconds of one trip.
        sent: [7, collectives] the loop each is in, `Sent.ready` as the compiler has them, `Sent.due`, `Sent.seconds`,
            `Sent.axes`, `Sent.queued`, and `Sent.ready` if all kinds overlapped with compute.
    """

    kernels: NDArray[np.float64]
    sent: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class InRegion:
    """Kernels and collectives of one run of a manual region, where they are in its body.

    Attributes:
        placed: them. end: the last moment of the body. runs: loop in the body -> runs of its body.
        reads: [collectives] arguments that each waits for, if nothing else. gives: [collectives] results that wait for
            it, if nothing else does. Both empty in loops.
    """

    placed: Placed
    end: int
    runs: Mapping[int, float]
    reads: tuple[tuple[int, ...], ...]
    gives: tuple[tuple[int, ...], ...]


class Windows:
    """The window of moments in which each collective of a program can run."""

    def __init__(self, problem: Problem, compilation: Compilation, longest_region: int) -> None:
        """longest_region: the last moment of any manual region."""
        program, lives, profile = problem.program, compilation.lives, compilation.profile
        self._problem, self._program = problem, program
        self._asynchronous = profile.asynchronous
        self._queued = {"all-gather"} if "queued-gathers" in profile.passes else set[str]()
        self._alike = ops_by_pattern(problem)
        # Moments in a tick: collectives before a kernel, then the kernel, or all of a manual region.
        self._later = 2 + longest_region
        self._moments = [self._later * time for time in lives.times]  # [ops] just before each kernel
        self.end = self._later * lives.end
        self.runs = {OUTSIDE: 1.0}  # loop -> runs of its body
        self._around: dict[int, tuple[int, ...]] = {OUTSIDE: ()}  # each loop's ancestors and itself
        self._start, self._end = {OUTSIDE: 0}, {OUTSIDE: self.end}
        for number, loop in enumerate(program.loops):
            self.runs[number] = loop.trips * self.runs[loop.parent]
            self._around[number] = (*self._around[loop.parent], number)
            self._start[number], self._end[number] = 2 * self._later * loop.first, 2 * self._later * loop.last
        self._in_regions: dict[tuple[int, int], int] = {}  # (op, loop in its region) -> number of the loop
        # [2, ops] the loop each is in, and when its kernel runs.
        self._times = np.array([[op.loop for op in program.ops], [moment + 1 for moment in self._moments]], float)
        self._of_kernels: dict[tuple[int, ...], list[float]] = {}
        self._of_uses: dict[tuple[object, ...], NDArray[np.float64]] = {}
        self._ready = self._earliest()
        self._due = self._latest()

    def placed(
        self,
        kernels: Iterable[KernelUse],
        uses: Iterable[CollectiveUse],
        regions: Sequence[tuple[int, InRegion]] = (),
    ) -> Placed:
        """Where kernels and collectives are in the program, and which of them the compiler overlaps.

        Args:
            regions: ops that are manual regions, with what is in them. Of these what the other arguments say is left
                out.
        """
        inlined = {number for number, _ in regions}
        own_kernels = [kernel for kernel in kernels if not (kernel.inside and kernel.op in inlined)]
        ops = [number for kernel in own_kernels for number in kernel.ops]
        each = np.repeat([kernel.seconds for kernel in own_kernels], [len(kernel.ops) for kernel in own_kernels])
        parts = [part for kernel in own_kernels for part in self._trips(kernel.ops)]
        listed = [use for use in uses if not _is_inside(use, inlined)]
        places = [self._places(use) for use in listed]
        facts = [
            (use.seconds, _bits(use.axes), use.kind in self._queued, use.kind in self._asynchronous) for use in listed
        ]
        counts = [of_use.shape[1] for of_use in places]
        seconds, axes, queued, overlaps = np.repeat(np.reshape(np.array(facts, float), (-1, 4)), counts, axis=0).T
        loops, ready, due, share = np.concatenate(places, axis=1) if places else np.empty((4, 0))
        own = Placed(
            np.vstack([self._times[:, ops], each * parts]),
            np.stack([loops, np.where(overlaps, ready, due), due, seconds * share, axes, queued, ready]),
        )
        return joined([own, *(self._inlined(number, inside) for number, inside in regions)])

    def in_region(
        self, kernels: Iterable[KernelUse], uses: Sequence[CollectiveUse], regions: Sequence[tuple[int, InRegion]]
    ) -> InRegion:
        """The same for the body of a manual region."""
        placed, program = self.placed(kernels, uses, regions), self._program
        reads, gives = (list[tuple[int, ...]]([()] * placed.sent.shape[1]) for _ in range(2))
        inlined = {number for number, _ in regions}
        own = ((use, place) for use in uses if not _is_inside(use, inlined) for place in self._places(use).T)
        for k, (use, (_, ready, due, _)) in enumerate(own):
            if use.reason == BY_HAND and ready == 0:
                made_of = _reached(
                    program.ops[use.op].operands, lambda value: program.ops[program.producer[value]].operands
                )
                reads[k] = tuple(n for n, argument in enumerate(program.arguments) if argument.value in made_of)
            if use.reason == BY_HAND and due == self.end:
                waiting = _reached(
                    [use.value],
                    lambda value: [v for reader, _ in program.users[value] for v in program.ops[reader].results],
                )
                gives[k] = tuple(n for n, result in enumerate(program.results) if result.value in waiting)
        return InRegion(placed, self.end, self.runs, tuple(reads), tuple(gives))

    def _inlined(self, number: int, inside: InRegion) -> Placed:
        """What is in a manual region, where it is in this program. A collective that only waits for arguments can start
        when these are available, and one that only results wait for is due when these are read."""
        op, start, placed = self._program.ops[number], self._moments[number], inside.placed
        loops = {OUTSIDE: op.loop}
        for loop in inside.runs.keys() - loops.keys():
            loops[loop] = self._in_regions.setdefault((number, loop), len(self.runs))
            self.runs[loops[loop]] = op.trips * inside.runs[loop]
        each = op.trips / self.runs[op.loop]  # runs in one trip of the loop around it
        kernels, sent = placed.kernels.copy(), placed.sent.copy()
        outside, sent_outside = kernels[0] == OUTSIDE, np.flatnonzero(sent[0] == OUTSIDE)
        overlaps = sent[1] < sent[2]
        for rows in (kernels, sent):
            rows[0] = [loops[loop] for loop in rows[0].tolist()]
        kernels[1:, outside] = kernels[1:, outside] * [[1.0], [each]] + [[start], [0.0]]
        sent[2:4, sent_outside] = sent[2:4, sent_outside] * [[1.0], [each]] + [[start], [0.0]]
        sent[6, sent_outside] += start
        for k in sent_outside:
            due = min([self._due[op.results[n]] for n in inside.gives[k]], default=sent[2, k])
            ready = max([self._seen(op.operands[n], op.loop) for n in inside.reads[k]], default=sent[6, k])
            sent[2, k], sent[6, k] = due, min(ready, due)
        sent[1] = np.where(overlaps, sent[6], sent[2])
        return Placed(kernels, sent)

    def _trips(self, ops: tuple[int, ...]) -> list[float]:
        """[ops] the part of all their kernels' seconds that one trip around each takes."""
        parts = self._of_kernels.get(ops)
        if parts is None:
            trips = [self._program.ops[number].trips for number in ops]
            loops = [self._program.ops[number].loop for number in ops]
            total = sum(trips)
            parts = [each / total / self.runs[loop] for each, loop in zip(trips, loops, strict=True)]
            self._of_kernels[ops] = parts
        return parts

    def _places(self, use: CollectiveUse) -> NDArray[np.float64]:
        """[4, places] loop, earliest start, latest end, and part of its seconds that one trip takes, of each place of a
        collective."""
        key = use.op, use.value, use.reason, use.count
        places = self._of_uses.get(key)
        if places is None:
            rows = []
            by_hand = [Place(use.op, use.value, 1.0)]
            for place in by_hand if use.reason == BY_HAND else places_of(self._problem, use, self._alike):
                loop = self._loop_of(place.op, use.count * place.share)
                ready, due = self._window(use, place, loop)
                rows.append((loop, min(ready, due), due, place.share / self.runs[loop]))
            places = self._of_uses[key] = np.reshape(np.array(rows, float), (-1, 4)).T
        return places

    def exposed(self, placed: Sequence[Placed], *, every: bool = False) -> float:
        """Exposed seconds of communication of a step, from the parts of a plan. every: as if all kinds of collectives
        overlapped with compute."""
        if not placed:  # the program has no ops but constants and results
            return 0.0
        step, waited = joined(placed), 0.0
        loops = np.flatnonzero(np.bincount(step.sent[0].astype(np.int64) - OUTSIDE)) + OUTSIDE
        for loop in loops.tolist():
            ready, due, seconds, axes, queued, free = step.sent[1:, np.flatnonzero(step.sent[0] == loop)]
            there = Sent(free if every else ready, due, seconds, axes.astype(np.int64), (queued > 0.0) & (not every))
            moments, computing = step.kernels[1:, np.flatnonzero(step.kernels[0] == loop)]
            waited += self.runs[loop] * exposed_seconds(moments, computing, there)
        return waited

    def _loop_of(self, number: int, runs: float) -> int:
        """The loop in whose body a collective of an op runs that often: the op's own loop, or one around it."""
        loop, trips = self._program.ops[number].loop, self._program.ops[number].trips
        while loop >= 0 and runs < 0.75 * trips:
            trips /= self._program.loops[loop].trips
            loop = self._program.loops[loop].parent
        return loop

    def _window(self, use: CollectiveUse, place: Place, loop: int) -> tuple[int, int]:
        """(earliest start, latest end) of a collective, as moments in a loop's body."""
        op = self._program.ops[place.op]
        if use.reason == ITSELF:
            return self._seen(place.value, loop), self._due[op.results[op.operands.index(place.value)]]
        if use.reason == BY_HAND and op.region is None:
            return max(self._seen(value, loop) for value in op.operands), self._due[place.value]
        if use.reason in _BEFORE:
            return self._seen(place.value, loop), self._needed(place.op, loop)
        if use.reason in _AFTER and op.loop == loop:
            return self._moments[place.op] + self._later, self._due[place.value]
        return self._moments[place.op], self._moments[place.op]

    def _earliest(self) -> list[int]:
        """[values] earliest moment at which each is available; a fused op's result as soon as its operands are."""
        program = self._program
        ready = self._ready = [0] * len(program.values)
        for number, op in enumerate(program.ops):
            if op.name == CARRY:
                moment = self._start[op.loop]
            elif op.kind.fusible or op.name == ARGUMENT:
                moment = max([self._seen(value, op.loop) for value in op.operands], default=self._start[op.loop])
            else:
                moment = self._moments[number] + self._later
            for value in op.results:
                ready[value] = moment
        return ready

    def _seen(self, value: int, loop: int) -> int:
        """Earliest moment at which a loop's body can read a value: after the body begins and the loops that make it
        end."""
        loops = self._around[self._program.ops[self._program.producer[value]].loop]
        ended = [other for other in loops if other not in self._around[loop]]
        return max(self._start[loop], self._end[ended[0]] if ended else self._ready[value])

    def _latest(self) -> list[int]:
        """[values] latest moment at which each must be available: when the first kernel reads it, directly or by
        fusion."""
        program = self._program
        self._due = [0] * len(program.values)
        for value in reversed(range(len(program.values))):
            maker = program.producer[value]
            loop = program.ops[maker].loop if maker >= 0 else -1
            needed = [self._needed(reader, loop) for reader, _ in program.users[value]]
            self._due[value] = min(needed, default=self._end[loop])
        return self._due

    def _needed(self, number: int, loop: int) -> int:
        """The moment at which an op needs its operands, seen from a loop's body."""
        op = self._program.ops[number]
        if op.loop == loop and op.name not in (CARRY, RESULT):
            read = [self._due[value] for value in op.results] if op.kind.fusible else []
            return min(read, default=self._moments[number])
        around = self._around[op.loop]
        if op.loop == loop or op.name == RESULT or loop not in (-1, *around):
            return self._end[loop]
        return self._start[around[around.index(loop) + 1] if loop >= 0 else around[0]]


def _is_inside(use: CollectiveUse, regions: Collection[int]) -> bool:
    """Whether a collective is in one of these manual regions."""
    return use.op in regions and use.reason in (BY_HAND, INSIDE)


def joined(parts: Sequence[Placed]) -> Placed:
    """All kernels and collectives of several parts of a plan."""
    return Placed(
        np.concatenate([part.kernels for part in parts], axis=1), np.concatenate([part.sent for part in parts], axis=1)
    )


def _reached(values: Iterable[int], following: Callable[[int], Iterable[int]]) -> set[int]:
    """These values, and all that follow them."""
    reached, waiting = set[int](), list(values)
    while waiting:
        value = waiting.pop()
        if value not in reached:
            reached.add(value)
            waiting += following(value)
    return reached


@dataclass(frozen=True, slots=True)
class Place:
    """A place of a collective: the op that reads or makes the array, and its fraction of all runs."""

    op: int
    value: int
    share: float


def _bits(axes: tuple[int, ...]) -> int:
    return sum(1 << axis for axis in axes)


def ops_by_pattern(problem: Problem) -> dict[int, list[int]]:
    """Pattern -> its ops."""
    alike: dict[int, list[int]] = defaultdict(list)
    for number, pattern in enumerate(problem.op_pattern):
        alike[pattern].append(number)
    return alike


def places_of(problem: Problem, use: CollectiveUse, alike: dict[int, list[int]]) -> list[Place]:
    """Places of merged collectives: one for each loop and array of that type that ops of the pattern read or make in
    that position. Only the first reader of an array counts."""
    program = problem.program
    own = program.ops[use.op]
    reads = use.value in own.operands
    if not reads and use.value not in own.results:
        return [Place(use.op, use.value, 1.0)]
    position = own.operands.index(use.value) if reads else own.results.index(use.value)
    type_ = str(program.values[use.value])
    first_ops: dict[tuple[int, int], int] = {}  # array and loop -> op
    for number in alike[problem.op_pattern[use.op]]:
        op = program.ops[number]
        arrays = op.operands if reads else op.results
        if position < len(arrays) and str(program.values[arrays[position]]) == type_:
            first_ops.setdefault((arrays[position], op.loop), number)
    total = sum(program.ops[number].trips for number in first_ops.values())
    return [
        Place(number, value, program.ops[number].trips / total if total else 0.0)
        for (value, _), number in first_ops.items()
    ]


# ---------------------------------------------------------------- overlap
# Exposed communication of a step in which collectives overlap with compute.
#
# A latency-hiding scheduler starts a collective as soon as its operands are available and waits for it where its
# result is first read. Links carry one collective at a time, the one that is needed first. While the cores compute,
# each link carries the collectives that have started; the rest of a collective when its result is read is exposed: the
# cores wait, and the links of other axes go on. A synchronous collective starts where it is read.


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """Collectives.

    Attributes:
        ready, due: [collectives] moments at which each can start and by which it must be done.
        seconds: [collectives]
        axes: [collectives] mesh axes whose links each uses, one bit for each axis.
        queued: [collectives] whether only one such collective is on its way at a time. Each starts when the one before
            it is due: the scheduler of XLA:TPU waits for a gather as late as it can, and its `all_gather_overlap_limit`
            is 1. So gathers of weights have only the work since the last gather to hide behind.
    """

    ready: NDArray[np.float64]
    due: NDArray[np.float64]
    seconds: NDArray[np.float64]
    axes: NDArray[np.int64]
    queued: NDArray[np.bool_]


def exposed_seconds(moments: NDArray[np.float64], kernel_seconds: NDArray[np.float64], sent: Sent) -> float:
    """Seconds that the cores wait for collectives.

    Only collectives that overlap with something and may be late are followed one by one. The cores wait for those that
    cannot overlap in any case, so these only count by how long they occupy which links between two events.

    Args:
        moments: [kernels] when each kernel runs. kernel_seconds: [kernels]. A collective that is due at the moment of a
            kernel is done before it, one that is ready at that moment starts before it.
    """
    overlaps = _overlapping(sent, kernel_seconds.sum())
    exposed = float(sent.seconds[~overlaps].sum())
    queue = np.flatnonzero(overlaps & sent.queued)
    queue = queue[np.argsort(sent.due[queue], kind="stable")]
    sent = replace(sent, ready=sent.ready.copy())
    sent.ready[queue[1:]] = np.maximum(sent.ready[queue[1:]], sent.due[queue[:-1]])
    order = np.flatnonzero(overlaps)
    by_time = np.argsort(moments, kind="stable")
    computed = np.append(0.0, np.cumsum(kernel_seconds[by_time]))
    start, end = (computed[np.searchsorted(moments[by_time], each[order])] for each in (sent.ready, sent.due))
    order = order[_perhaps_late(start, end, sent.seconds[order])]
    if not len(order):
        return exposed
    order = order[np.lexsort((sent.ready[order], sent.due[order]))]
    ready, due = sent.ready[order], sent.due[order]
    axes, left = sent.axes[order].tolist(), sent.seconds[order].tolist()
    events = np.sort(np.concatenate([ready, due]))
    events = events[np.append(True, events[1:] > events[:-1])]

    def following(moments: NDArray[np.float64], seconds: NDArray[np.float64]) -> list[float]:
        """[events] seconds of what happens from each event to the next."""
        place = np.searchsorted(events, moments, "right")
        sums: list[float] = np.bincount(place, seconds, len(events) + 1)[1:].tolist()
        return sums

    computing = following(moments, kernel_seconds)
    others = [(some, ~overlaps & (sent.axes == some)) for some in sorted(set(sent.axes[~overlaps].tolist()))]
    waiting_for = [(some, following(sent.due[which], sent.seconds[which])) for some, which in others]
    starts = np.argsort(-ready, kind="stable").tolist()
    ready_at, due_at = ready.tolist(), due.tolist()
    links = _Links(axes, left)
    ending, count = 0, len(left)
    for number, event in enumerate(events.tolist()):
        while starts and ready_at[starts[-1]] <= event:
            links.start(starts.pop())
        while ending < count and due_at[ending] <= event:
            rest, left[ending] = left[ending], 0.0
            if rest > 0.0:
                exposed += rest
                links.carry(rest, axes[ending])
            ending += 1
        if ending + len(starts) == count:  # nothing is on its way
            continue
        if computing[number]:
            links.carry(computing[number])
        for some, seconds in waiting_for:
            if seconds[number]:
                links.carry(seconds[number], some)
    return exposed


def _overlapping(sent: Sent, computing: float) -> NDArray[np.bool_]:
    """[collectives] whether each can overlap with anything, but for the shortest: together `NEGLIGIBLE`."""
    overlaps, negligible = sent.ready < sent.due, NEGLIGIBLE * (computing + sent.seconds.sum())
    order = np.flatnonzero(sent.seconds <= negligible)
    order = order[np.argsort(sent.seconds[order], kind="stable")]
    overlaps[order[np.cumsum(sent.seconds[order]) <= negligible]] = False
    return overlaps


def _perhaps_late(
    start: NDArray[np.float64], end: NDArray[np.float64], seconds: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Numbers of the collectives that may not be done when they are due.

    If one link carried all of them, one after the other, it would be busy for some periods. A collective that is due
    after the period in which it is ready is done in time. It never delays one that is due earlier: what is due first is
    carried first. So the rest is late as it would be without it, and what it leaves may have shorter periods.

    Args:
        start, end: [collectives] seconds of compute before each can start, and before it must be done.
        seconds: [collectives] of each.
    """
    numbers = np.argsort(start, kind="stable")
    count = -1
    while count != len(numbers):
        count = len(numbers)
        sent = np.cumsum(seconds[numbers])
        done = sent + np.maximum.accumulate(start[numbers] - sent + seconds[numbers])
        last = np.append(start[numbers[1:]] >= done[:-1], True)[:count]  # of its busy period
        idle = done[last][np.cumsum(last) - last]  # [numbers] when the period ends
        numbers = numbers[end[numbers] < idle]
    return numbers


class _Links:
    """The links of all axes, and the started collectives that wait for them, in the order in which they are needed.

    axes: [collectives] as in `Sent`. left: [collectives] seconds that each still takes; `carry` reduces them.
    """

    def __init__(self, axes: list[int], left: list[float]) -> None:
        self._axes, self._left, self._all = axes, left, 0
        self._started: dict[int, list[int]] = {}  # axes -> heap of collectives
        for some in axes:
            self._all |= some
            self._started[some] = []

    def start(self, number: int) -> None:
        heappush(self._started[self._axes[number]], number)

    def carry(self, seconds: float, busy: int = 0) -> None:
        """Lets the links that are not busy carry collectives for `seconds`."""
        left, spans = self._left, [(seconds, self._all & ~busy)]  # time that is left, and the axes that have it
        while spans:
            seconds, idle = spans.pop()
            first = len(left)
            for axes, started in self._started.items():
                while started and left[started[0]] <= 0.0:
                    heappop(started)
                if started and started[0] < first and not axes & ~idle:
                    first = started[0]
            if first == len(left):
                continue
            carried = min(left[first], seconds)
            left[first] -= carried
            others = idle & ~self._axes[first]
            if carried < seconds:
                spans.append((seconds - carried, idle))
            if others and others != idle:
                spans.append((carried, others))


# ---------------------------------------------------------------- memory over time
# Memory over time: at all moments at which it can peak for exact answers, at a selection of them for quick ones.
#
# Memory can only peak where an array has been allocated since the last one was freed. A search evaluates a few hundred
# of those moments: the highest under a handful of reference plans, and an even spread. If the exact profile of a plan
# peaks at another moment, that moment is added and the search continues (a cutting-plane scheme).
#
# Some bytes of arrays that live briefly take no device memory at all (see `on_chip`). With `alive` bytes, `brief` of
# them in such arrays, the bytes in device memory are max(alive - capacity, alive - brief). So each moment has two
# sums, of all bytes less the capacity and of the bytes not brief; the peak is the largest of all.

SELECTED = 256
_SPREAD = 64

Intervals = list[tuple[int, int]]  # first and last tick, both included
# [intervals] first entry of a profile covered, first entry after it, bytes
Spans = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]


class Timeline:
    """candidates: [candidates] ticks at which memory can peak. moments: [moments] those a search evaluates;
    ascending."""

    def __init__(self, lives: Lives, on_chip_bytes: float = 0.0) -> None:
        self.candidates: NDArray[np.int64] = np.array(_peak_candidates(lives), np.int64)
        self.moments: NDArray[np.int64] = self.candidates
        self._selected = self.moments
        self._on_chip_bytes = on_chip_bytes

    def start(self) -> NDArray[np.float64]:
        """[entries] bytes in device memory at the selected moments, before any array is alive."""
        count = len(self.moments)
        if not self._on_chip_bytes:
            return np.zeros(count)
        return np.repeat([-self._on_chip_bytes, 0.0], count)

    def nothing(self) -> NDArray[np.float64]:
        """[entries] zeros."""
        return np.zeros(2 * len(self.moments) if self._on_chip_bytes else len(self.moments))

    def select(self, profiles: list[NDArray[np.float64]]) -> None:
        """Keeps the highest moments of each profile [candidates], and an even spread."""
        count = len(self.candidates)
        if count <= SELECTED:
            return
        keep = set(np.linspace(0, count - 1, _SPREAD).astype(int).tolist())
        each = (SELECTED - _SPREAD) // max(1, len(profiles))
        for profile in profiles:
            keep.update(np.argsort(-profile, kind="stable")[:each].tolist())
        self.moments = self._selected = self.candidates[sorted(keep)]

    def add(self, candidate: int) -> bool:
        """Adds a candidate, by number, to the selected moments; False if it is among them already."""
        moment = self.candidates[candidate]
        if moment in self.moments:
            return False
        self.moments = np.sort(np.append(self.moments, moment))
        return True

    def reset(self) -> bool:
        """Resets the moments to the initial selection; False if none were added."""
        grown = len(self.moments) > len(self._selected)
        self.moments = self._selected
        return grown

    def presence(self, intervals: Intervals, brief: Intervals) -> NDArray[np.float64]:
        """[entries] how many of the intervals cover each moment; brief: the intervals that can be spent in on-chip
        memory."""
        covered = self._covered(intervals)
        if not self._on_chip_bytes:
            return covered
        return np.concatenate([covered, covered - self._covered(brief) if brief else covered])

    def _covered(self, intervals: Intervals) -> NDArray[np.float64]:
        pairs = np.array(intervals, np.int64).reshape(-1, 2)
        born = np.searchsorted(np.sort(pairs[:, 0]), self.moments, "right")
        dead = np.searchsorted(np.sort(pairs[:, 1]), self.moments, "left")
        return (born - dead).astype(np.float64)

    def spans(self, intervals: Intervals, brief: Intervals) -> Spans:
        """Intervals of arrays of one byte in numbers of candidates; `brief`: those of them that can be spent in on-chip
        memory."""
        first, last = self._numbers(intervals)
        held = np.ones(len(intervals))
        if not self._on_chip_bytes:
            return first, last, held
        row = len(self.candidates) + 1
        start, end = self._numbers(brief)
        return (
            np.concatenate([first, first + row, start + row]), np.concatenate([last, last + row, end + row]),
            np.concatenate([held, held, -np.ones(len(brief))]),
        )  # fmt: skip

    def _numbers(self, intervals: Intervals) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        pairs = np.array(intervals, np.int64).reshape(-1, 2)
        first = np.searchsorted(self.candidates, pairs[:, 0], "left")
        return first, np.searchsorted(self.candidates, pairs[:, 1], "right")

    def profile(self, parts: list[Spans]) -> NDArray[np.float64]:
        """[candidates] bytes in device memory: each interval counts with its size."""
        alive, lasting = self.profiles(parts)
        return np.maximum(alive - self._on_chip_bytes, lasting)

    def shared(self, parts: Mapping[str, list[Spans]]) -> dict[str, NDArray[np.float64]]:
        """The profile of all parts together, split by part: each gets its share of the on-chip memory."""
        profiles = {name: self.profiles(spans) for name, spans in parts.items()}
        brief = sum((alive - lasting for alive, lasting in profiles.values()), np.zeros(len(self.candidates)))
        out = np.maximum(brief - self._on_chip_bytes, 0.0) / np.maximum(brief, 1.0)  # fraction that does not fit
        return {name: lasting + out * (alive - lasting) for name, (alive, lasting) in profiles.items()}

    def profiles(self, parts: list[Spans]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[candidates] bytes of all arrays, and of those that are not brief."""
        count, rows = len(self.candidates), 2 if self._on_chip_bytes else 1
        if not parts:
            return np.zeros(count), np.zeros(count)
        first, last, sizes = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        length = rows * (count + 1)
        change = np.bincount(first, sizes, length) - np.bincount(last, sizes, length)
        alive, *lasting = np.cumsum(change.reshape(rows, count + 1), axis=1)[:, :count]
        return alive, lasting[0] if lasting else alive


def _peak_candidates(lives: Lives) -> list[int]:
    # Copies, and partial results before and while they are reduced, come and go between the arrays themselves.
    lasts = {last for intervals in lives.intervals for _, last in intervals}
    births = {first for intervals in lives.intervals for first, _ in intervals} | {last + 1 for last in lasts}
    births.update(lives.times)
    deaths = lasts | {lives.end}
    deaths.update(lives.times, lives.read_at.values(), lives.deaths)
    candidates: list[int] = []
    born = False
    for moment in sorted(births | deaths):
        born = born or moment in births
        if born and moment in deaths:
            candidates.append(moment)
            born = False
    return candidates
