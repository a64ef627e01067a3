"""The expected step: communication that stays exposed when collectives overlap with compute as far as the program's
order and the compiler allow.

In: a problem and the times of its ops; for each part of a plan its kernels and collectives. Out: seconds of
communication that stay exposed, see `cost.overlap`. Each loop's body is scheduled by itself and counted
once per trip: nothing in a loop overlaps with work outside of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toast_cli.compiler.liveness import Lives
from toast_cli.cost.model import ITSELF, CollectiveUse, KernelUse
from toast_cli.cost.overlap import Sent, exposed_seconds
from toast_cli.plan.problem import Problem
from toast_cli.program.ops import ARGUMENT, CARRY, RESULT

_LATER = 2  # moments in a tick: collectives before a kernel, then the kernel
_BEFORE: frozenset[str] = frozenset({"reshard", "neighbours"})  # their results are read by an op
_AFTER: frozenset[str] = frozenset({"partial", "pin"})  # they complete an op's result


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Kernels and collectives of a part of a plan, where they are in the program. Loop -1: outside of loops.

    Attributes:
        loops, moments, seconds: [kernels] the loop each is in, when it runs there, and seconds of one trip.
        sent_in: [collectives] the loop each is in. sent: them as the compiler has them. free: [collectives] moments at
            which each could start if all kinds overlapped with compute.
    """

    loops: NDArray[np.int64]
    moments: NDArray[np.int64]
    seconds: NDArray[np.float64]
    sent_in: NDArray[np.int64]
    sent: Sent
    free: NDArray[np.int64]


class Windows:
    """The window of moments in which each collective of a program can run."""

    def __init__(self, problem: Problem, lives: Lives, slowdown: float = 1.0) -> None:
        """slowdown: factor on the seconds of all kernels."""
        self._problem, self._program, self._slowdown = problem, problem.program, slowdown
        self._alike = ops_by_pattern(problem)
        program = problem.program
        self._moments = [_LATER * time for time in lives.times]  # [ops] just before each kernel
        self._runs: list[float] = []  # [loops + 1] runs of each body; last: outside loops
        self._around: list[tuple[int, ...]] = []  # [loops + 1] each loop's ancestors and itself
        for number, loop in enumerate(program.loops):
            outside = loop.parent < 0
            self._runs.append(loop.trips * (1.0 if outside else self._runs[loop.parent]))
            self._around.append((*(() if outside else self._around[loop.parent]), number))
        self._runs.append(1.0)
        self._around.append(())
        self._start = [2 * _LATER * loop.first for loop in program.loops] + [0]
        self._end = [2 * _LATER * loop.last for loop in program.loops] + [_LATER * lives.end]
        self._loops = np.array([op.loop for op in program.ops], np.int64)
        self._times = np.array(self._moments, np.int64) + 1
        self._of_kernels: dict[tuple[int, ...], list[float]] = {}
        self._of_uses: dict[tuple[object, ...], list[tuple[int, int, int, float]]] = {}
        self._ready = self._earliest()
        self._due = self._latest()

    def placed(self, kernels: Iterable[KernelUse], uses: Iterable[CollectiveUse], kinds: Collection[str]) -> Placed:
        """Where kernels and collectives are in the program, if collectives of `kinds` overlap with compute."""
        members: list[int] = []
        each: list[float] = []  # of `members`: seconds of one trip
        for kernel in kernels:
            members += kernel.ops
            each += [self._slowdown * kernel.seconds * part for part in self._trips(kernel.ops)]
        rows = [
            (loop, ready if use.kind in kinds else due, due, ready, use.seconds * part, _bits(use.axes))
            for use in uses
            for loop, ready, due, part in self._places(use)
        ]
        loops, ready, due, free, seconds, axes = zip(*rows, strict=True) if rows else ((),) * 6
        ops, whole = np.array(members, np.int64), np.int64
        sent = Sent(np.array(ready, whole), np.array(due, whole), np.array(seconds, float), np.array(axes, whole))
        return Placed(
            self._loops[ops], self._times[ops], np.array(each), np.array(loops, whole), sent, np.array(free, whole)
        )

    def _trips(self, ops: tuple[int, ...]) -> list[float]:
        """[ops] the part of all their kernels' seconds that one trip around each takes."""
        found = self._of_kernels.get(ops)
        if found is None:
            trips = [self._program.ops[number].trips for number in ops]
            loops = [self._program.ops[number].loop for number in ops]
            total = sum(trips)
            found = [each / total / self._runs[loop] for each, loop in zip(trips, loops, strict=True)]
            self._of_kernels[ops] = found
        return found

    def _places(self, use: CollectiveUse) -> list[tuple[int, int, int, float]]:
        """(loop, earliest start, latest end, part of its seconds that one trip takes) of each place of a collective."""
        key = use.op, use.value, use.reason, use.count
        found = self._of_uses.get(key)
        if found is None:
            found = self._of_uses[key] = []
            for place in places_of(self._problem, use, self._alike):
                loop = self._loop_of(place.op, use.count * place.share)
                ready, due = self._window(use, place, loop)
                found.append((loop, min(ready, due), due, place.share / self._runs[loop]))
        return found

    def exposed(self, placed: Sequence[Placed], *, every: bool = False) -> float:
        """Exposed seconds of communication of a step, from the parts of a plan. every: as if all kinds of collectives
        overlapped with compute."""
        ready = np.concatenate([part.free if every else part.sent.ready for part in placed])
        due = np.concatenate([part.sent.due for part in placed])
        sent_in = np.concatenate([part.sent_in for part in placed])
        sent_for = np.concatenate([part.sent.seconds for part in placed])
        axes = np.concatenate([part.sent.axes for part in placed])
        loops = np.concatenate([part.loops for part in placed])
        moments = np.concatenate([part.moments for part in placed])
        seconds = np.concatenate([part.seconds for part in placed])
        waited = 0.0
        for loop in set(sent_in.tolist()):
            of_loop, inside = np.flatnonzero(sent_in == loop), np.flatnonzero(loops == loop)
            inside = inside[np.argsort(moments[inside], kind="stable")]
            sent = Sent(ready[of_loop], due[of_loop], sent_for[of_loop], axes[of_loop])
            waited += self._runs[loop] * exposed_seconds(moments[inside], seconds[inside], sent)
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
        if use.reason in _BEFORE:
            return self._seen(place.value, loop), self._needed(place.op, loop)
        if use.reason in _AFTER and op.loop == loop:
            return self._moments[place.op] + _LATER, self._due[place.value]
        return self._moments[place.op], self._moments[place.op]

    def _earliest(self) -> list[int]:
        """[values] earliest moment at which each is available; a fused op's result as soon as its operands are."""
        program = self._program
        ready = self._ready = [0] * len(program.values)
        for number, op in enumerate(program.ops):
            if op.name == CARRY:
                known = self._start[op.loop]
            elif op.kind.fusible or op.name == ARGUMENT:
                known = max([self._seen(value, op.loop) for value in op.operands], default=self._start[op.loop])
            else:
                known = self._moments[number] + _LATER
            for value in op.results:
                ready[value] = known
        return ready

    def _seen(self, value: int, loop: int) -> int:
        """Earliest moment at which a loop's body can read a value: after the body begins and the loops that make it
        end."""
        made = self._around[self._program.ops[self._program.producer[value]].loop]
        ended = [other for other in made if other not in self._around[loop]]
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
        around = self._around[op.loop]
        if op.name == RESULT or loop not in (-1, *around):
            return self._end[loop]
        if op.loop != loop:
            entered = around[around.index(loop) + 1] if loop >= 0 else around[0]
            return self._start[entered]
        if op.name == CARRY:
            return self._end[loop]
        if op.kind.fusible and op.results:
            return min(self._due[value] for value in op.results)
        return self._moments[number]


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
    found: dict[tuple[int, int], int] = {}  # array and loop -> op
    for number in alike[problem.op_pattern[use.op]]:
        op = program.ops[number]
        arrays = op.operands if reads else op.results
        if position < len(arrays) and str(program.values[arrays[position]]) == type_:
            found.setdefault((arrays[position], op.loop), number)
    total = sum(program.ops[number].trips for number in found.values())
    return [Place(number, value, program.ops[number].trips / total) for (value, _), number in found.items()]
