"""Compiles the best plans and the known strategies, and takes the best by the compiler's figures.

Candidates that are predicted to be clearly slower than the best are deferred. The others are compiled for the real
chips, several at once if memory allows. Deferred candidates are compiled as well if they could be faster, if the model
is as wrong about them as about the best one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from math import inf, prod
from typing import Literal

from toast_cli.ask_xla.child import Failure, free_bytes
from toast_cli.ask_xla.collectives import CompiledCollective, partitioned_collectives
from toast_cli.ask_xla.compile import CompilationTarget, compile_for
from toast_cli.ask_xla.schedule import scheduled_time
from toast_cli.ask_xla.verdict import out_of_memory
from toast_cli.base.files import DiskCache, key_of, users_folder
from toast_cli.hardware import Axis, Mesh
from toast_cli.plan.decisions import Plan
from toast_cli.price.collectives import KINDS, collective_seconds
from toast_cli.price.compiled_collectives import latency_part
from toast_cli.price.cost import Cost
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.profiles import find_profile
from toast_cli.search.incumbent import Objective

# ---------------------------------------------------------------- compilers
# XLA:TPU or XLA:GPU ahead of time for the real chips, or a partitioner alone. A crash or a timeout of the compiler is a
# verdict, not an error.

_COMPILER_PACKAGES = ("jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")


@dataclass(frozen=True)
class Compiler:
    """A compiler for StableHLO programs for a mesh.

    A target's compiler knows memory, collectives, and if it is XLA:TPU's cycles and the schedule. Its partitioner
    alone, and that of virtual CPU devices, lists the collectives within seconds: time and memory remain predictions.
    """

    mesh: Mesh
    target: CompilationTarget

    @property
    def knows_memory(self) -> bool:
        return not self.target.partitions_only

    @property
    def label(self) -> str:
        return (
            "XLA's partitioner"
            if self.target.partitions_only
            else f"XLA:{self.target.platform.upper()} {self.target.label}"
        )

    @property
    def identity(self) -> tuple[object, ...]:
        """Everything besides the program that its answers depend on."""
        links = tuple((axis.name, axis.size, axis.links) for axis in self.mesh.axes)
        installed = (found for package in _COMPILER_PACKAGES for found in metadata.distributions(name=package))
        versions, chip = tuple(f"{each.name} {each.version}" for each in installed), self.mesh.chip
        return (self.target, versions, links, chip.clock_hertz, chip.memory_bytes_per_second)

    def judge(self, content: bytes, timeout_seconds: float) -> Compiled:
        start = time.monotonic()
        answer = compile_for(content, "stablehlo", self.target, timeout_seconds=timeout_seconds)
        seconds = time.monotonic() - start
        if isinstance(answer, Failure):
            if out_of_memory(answer):
                return Compiled("out of memory", answer.reason, compile_seconds=seconds)
            timed_out = answer.aborted and seconds >= timeout_seconds
            return Compiled("timed out" if timed_out else "refused", answer.reason, compile_seconds=seconds)
        if self.target.partitions_only:
            sent = partitioned_collectives(answer.hlo_text, self.mesh.names, self.mesh.sizes)
            total = sum(collective_time(self.mesh, collective) for collective in sent)
            return Compiled("compiled", "", None, total, total, None, seconds)
        mesh = _split_at_networks(self.mesh) if self.target.slices > 1 else self.mesh
        clock = mesh.chip.clock_hertz if answer.cycles else 0.0
        rates = clock, mesh.chip.memory_bytes_per_second
        time_ = scheduled_time(answer.hlo_text, mesh.names, mesh.sizes, *rates, partial(seconds_on, mesh))
        return Compiled(
            "compiled",
            "",
            time_.compute_seconds if clock else None,
            time_.communication_seconds,
            # Without cycles, the overlap of communication and compute is unknown.
            time_.exposed_seconds if clock else time_.communication_seconds,
            answer.device_bytes,
            seconds,
        )


def _split_at_networks(mesh: Mesh) -> Mesh:
    """The mesh with each axis that a network divides as two: XLA:TPU takes collectives between slices apart."""
    axes = []
    for axis in mesh.axes:
        for links in (
            tuple(link for link in axis.links if link.kind == "network"),
            tuple(link for link in axis.links if link.kind != "network"),
        ):
            if links:
                name = axis.name if len(links) == len(axis.links) else f"{axis.name} over {links[0].kind}"
                axes.append(Axis(name, prod(link.size for link in links), links))
    return replace(mesh, axes=tuple(axes))


def seconds_on(mesh: Mesh, kind: str, size: float, axes: tuple[str, ...], *, combined: bool = False) -> float:
    """Seconds of one collective of a compiled program. Devices that form no mesh axes count as the whole mesh."""
    if kind not in KINDS:
        return 0.0
    numbers = tuple(mesh.names.index(axis) for axis in axes if axis in mesh.names)
    if len(numbers) < len(axes):
        numbers = tuple(range(len(mesh.names)))
    part = latency_part(kind, size, 0.0, find_profile(mesh.chip)) if combined else 1.0
    return collective_seconds(mesh, kind, size, numbers, latency_part=part)


def collective_time(mesh: Mesh, collective: CompiledCollective) -> float:
    """Seconds of all runs of a collective of a partitioned program. Compilers combine small collectives later, but not
    those of different iterations of a loop."""
    return collective.count * seconds_on(
        mesh, collective.kind, collective.bytes, collective.axes, combined=collective.count <= 1
    )


# ---------------------------------------------------------------- inputs and outputs
# Bytes and seconds are per device and run of the program.

CompileOutcome = Literal["compiled", "out of memory", "refused", "timed out"]


@dataclass(frozen=True)
class PlanToCompile:
    """A plan to compile. `name`: "search", "search 2" for runners-up, or a strategy's. `cost`:
    the model's prediction."""

    name: str
    plan: Plan
    cost: Cost


@dataclass(frozen=True)
class Compiled:
    """A compiler's figures for one written program.

    Attributes:
        outcome: tells if there is a compiled program; `reason` says why not.
        compute_seconds: by the compiler's estimated cycles; None from compilers that estimate none.
        communication_seconds: all collectives of the compiled program, priced by `price.collectives`.
        exposed_seconds: the part of it that does not overlap with compute in the compiled schedule; all of it from
            compilers that estimate no cycles, see `ConfirmedRow.exposed_seconds`.
        peak_bytes: device memory needed; None if the compiler is not that of the real chip.
        compile_seconds: duration of the compilation; `cached`: the answer is from an earlier run.
    """

    outcome: CompileOutcome
    reason: str = ""
    compute_seconds: float | None = None
    communication_seconds: float = 0.0
    exposed_seconds: float = 0.0
    peak_bytes: int | None = None
    compile_seconds: float = 0.0
    cached: bool = False


@dataclass(frozen=True)
class ConfirmedRow:
    """A candidate and its compiled figures. `compiled` is None if it was not compiled; `why` gives the reason. `also`:
    names of later candidates with identical programs."""

    candidate: PlanToCompile
    compiled: Compiled | None = None
    why: str = ""
    also: tuple[str, ...] = ()

    @property
    def compute_seconds(self) -> float:
        """The compiler's figure if it gives one, else the prediction."""
        compiled_seconds = self.compiled.compute_seconds if self.compiled else None
        return self.candidate.cost.compute_seconds if compiled_seconds is None else compiled_seconds

    @property
    def exposed_seconds(self) -> float:
        """Exposed communication: by the compiler's schedule; from compilers that estimate no cycles, the fraction of
        the compiled communication that the prediction exposes."""
        cost, compiled = self.candidate.cost, self.compiled
        predicted = cost.step_seconds - cost.busy_seconds
        if compiled is None:
            return predicted
        if compiled.compute_seconds is not None or not cost.communication_seconds:
            return compiled.exposed_seconds
        return compiled.communication_seconds * predicted / cost.communication_seconds

    @property
    def step_seconds(self) -> float:
        """Compute plus exposed communication."""
        return self.compute_seconds + self.exposed_seconds

    @property
    def peak_bytes(self) -> float:
        """The compiler's figure if it is that of the real chip, else the prediction."""
        compiled_bytes = self.compiled.peak_bytes if self.compiled else None
        return self.candidate.cost.peak_bytes if compiled_bytes is None else compiled_bytes


@dataclass(frozen=True)
class Confirmation:
    """All candidates with their verdicts, in the order of compilation.

    Attributes:
        compiler: its name, e.g. "tpu v4:2x2x4". chosen: index of the best in `rows`, None if no compiled program fits.
    """

    compiler: str
    rows: tuple[ConfirmedRow, ...]
    chosen: int | None
    limit_bytes: int
    seconds: float = 0.0

    @property
    def row(self) -> ConfirmedRow | None:
        """The row of the best plan."""
        return None if self.chosen is None else self.rows[self.chosen]

    @property
    def taken(self) -> PlanToCompile | None:
        """The best plan by compiled figures."""
        return None if self.row is None else self.row.candidate

    @property
    def rejected(self) -> bool:
        """True if the compiler answered and every program it compiled exceeds the device's memory."""
        answers = [row.compiled.outcome for row in self.rows if row.compiled]
        return self.chosen is None and any(outcome in ("compiled", "out of memory") for outcome in answers)


# A candidate is deferred if it is predicted to be slower than the best one that fits by this factor.
_CLEARLY = 1.25
_BYTES_OF_A_COMPILATION = 6 * 2**30
_LEAST_SECONDS = 1.0
_FORMAT = "2"  # of stored answers
_EQUAL = 1.001  # steps within this ratio count as equal

Emit = Callable[[Plan], bytes]
# number among those compiled (from 1), how many there are, the row
Tell = Callable[[int, int, ConfirmedRow], None]


@dataclass
class Confirmer:
    """Compiles candidates and chooses by the compiler's figures and the problem's goal.

    Attributes:
        emit: writes a plan as StableHLO bytecode. defers: whether candidates that are clearly slower wait.
        seconds: wall time for all compilations together. tell: is called with each answer.
    """

    evaluator: Evaluator
    emit: Emit
    compiler: Compiler
    defers: bool = False
    seconds: float = inf
    tell: Tell | None = None
    cache: DiskCache[Compiled] = field(default_factory=lambda: DiskCache(users_folder("compiled"), Compiled))

    def confirm(self, candidates: Sequence[PlanToCompile]) -> Confirmation:
        """Compiles candidates, the search's plan first; plans with identical programs are compiled once."""
        self._start = time.monotonic()
        self._rows: dict[str, ConfirmedRow] = {}  # by written program, in order of arrival
        problem = self.evaluator.problem
        self._objective = Objective(problem, self.evaluator.cost(problem.fixed), compiled=self.compiler.knows_memory)
        if self._seconds_left() > _LEAST_SECONDS:
            with suppress(KeyboardInterrupt):  # answers so far count
                self._compile_all(candidates)
        chosen = self._best()
        return Confirmation(
            self.compiler.label,
            tuple(self._rows.values()),
            None if chosen is None else list(self._rows).index(chosen),
            problem.mesh.limit_bytes,
            time.monotonic() - self._start,
        )

    def _seconds_left(self) -> float:
        return self.seconds - (time.monotonic() - self._start)

    def _compile_all(self, candidates: Sequence[PlanToCompile]) -> None:
        """Compiles the candidates, except those that are clearly slower than the best."""
        contents: dict[str, bytes] = {}
        for candidate in candidates:
            content = self.emit(candidate.plan)
            key = key_of(content)
            if key in self._rows:
                row = self._rows[key]
                self._rows[key] = replace(row, also=(*row.also, candidate.name))
            else:
                self._rows[key] = ConfirmedRow(candidate)
                contents[key] = content
        keys, aside = self._deferred(list(contents))
        while keys:
            self._compile(keys, contents)
            bound = self._bound()
            keys = sorted((key for key, seconds in aside.items() if seconds < bound), key=aside.__getitem__)
            for key in keys:
                del aside[key]
                self._rows[key] = replace(self._rows[key], why="")

    def _bound(self) -> float:
        """Upper bound on the predicted step seconds of a deferred candidate that could be as fast as the best compiled
        one, if the model's error about it were as large in the other direction."""
        best = self._best()
        if best is None:
            return inf
        row = self._rows[best]
        step, thought = compiled_cost(row).step_seconds, row.candidate.cost.step_seconds
        return step * max(step, thought) / min(step, thought) if min(step, thought) > 0.0 else inf

    def _deferred(self, keys: list[str]) -> tuple[list[str], dict[str, float]]:
        """Keys of the candidates to compile, the most promising first but after the first candidate; and the deferred
        keys with their predicted step seconds."""
        if not self.defers:
            return keys, {}
        costs = {key: self._rows[key].candidate.cost for key in keys}
        limit = self.evaluator.problem.mesh.limit_bytes
        best = min((cost.step_seconds for cost in costs.values() if cost.peak_bytes <= limit), default=inf)
        seconds = {key: costs[key].step_seconds for key in keys[1:]}
        aside = {key: step for key, step in seconds.items() if step > _CLEARLY * best}
        for key, step in aside.items():
            why = f"predicted to be {step / best:.2f} times as slow as the best"
            self._rows[key] = replace(self._rows[key], why=why)
        promising = sorted((key for key in seconds if key not in aside), key=seconds.__getitem__)
        return [*keys[:1], *promising], aside

    def _compile(self, keys: Sequence[str], contents: dict[str, bytes]) -> None:
        """Compiles each of `keys`, several at once, and reports each answer; marks those that there is no time for."""
        names = {key: key_of(contents[key], _FORMAT, *self.compiler.identity) for key in keys}
        told = 0

        def settle(key: str, answer: Compiled) -> None:
            nonlocal told
            told += 1
            self._rows[key] = replace(self._rows[key], compiled=answer)
            if self.tell is not None:
                self.tell(told, len(keys), self._rows[key])

        waiting = []
        for key in keys:
            stored = self.cache.find(names[key])
            if stored is None:
                waiting.append(key)
            else:
                settle(key, replace(stored, cached=True))

        def judged(key: str) -> Compiled | None:
            left = self._seconds_left()
            return self.compiler.judge(contents[key], left) if left > _LEAST_SECONDS else None

        # As many at one time as memory and cores allow.
        at_once = max(1, min(len(waiting), os.cpu_count() or 1, free_bytes() // _BYTES_OF_A_COMPILATION))
        pool = ThreadPoolExecutor(at_once)
        try:
            running = {pool.submit(judged, key): key for key in waiting}
            for future in as_completed(running):
                key, answer = running[future], future.result()
                if answer is None:
                    self._rows[key] = replace(self._rows[key], why="there was no time left")
                    continue
                if answer.outcome != "timed out":  # a later run may allow more time
                    self.cache.store(names[key], answer)
                settle(key, answer)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _best(self) -> str | None:
        """Key of the best compiled row that keeps all bounds; among equals the first."""
        met = {
            key: compiled_cost(row)
            for key, row in self._rows.items()
            if row.compiled is not None
            and row.compiled.outcome == "compiled"
            and self._objective.met(compiled_cost(row))
        }
        if not met:
            return None
        best = min(met, key=lambda key: self._objective.rank(self._rows[key].candidate.plan, met[key]))
        if not self._objective.fastest:
            return best
        return next(key for key, cost in met.items() if cost.step_seconds <= _EQUAL * met[best].step_seconds)


def compiled_cost(row: ConfirmedRow) -> Cost:
    """The row's figures as a `Cost`, with the compiler's figures if it gives them."""
    return replace(
        row.candidate.cost,
        compute_seconds=row.compute_seconds,
        communication_seconds=row.exposed_seconds,
        exposed_seconds=row.exposed_seconds,
        peak_bytes=float(row.peak_bytes),
    )


def joined(answers: Sequence[Confirmation], names: Sequence[str], winner: int) -> Confirmation:
    """Joins the confirmations of several variants of one program; plans of all but the first get the variant's name
    appended. winner: index of the variant whose best plan is taken."""
    first, *others = answers
    if not others:
        return first
    rows = list(first.rows)
    chosen = first.chosen if winner == 0 else None
    for place, (answer, name) in enumerate(zip(others, names[1:], strict=True), 1):
        if winner == place and answer.chosen is not None:
            chosen = len(rows) + answer.chosen
        rows += [
            replace(row, candidate=replace(row.candidate, name=f"{row.candidate.name}, {name}")) for row in answer.rows
        ]
    seconds = sum(answer.seconds for answer in answers)
    return replace(first, rows=tuple(rows), chosen=chosen, seconds=seconds)
