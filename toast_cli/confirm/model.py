"""Inputs and outputs of a confirmation. Bytes and seconds are per device and run of the program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from toast_cli.cost.corrections import NO_CORRECTIONS, Corrections
from toast_cli.cost.model import Cost
from toast_cli.plan.decisions import Plan

CompileOutcome = Literal["compiled", "out of memory", "refused", "timed out"]


@dataclass(frozen=True)
class Candidate:
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
        communication_seconds: all collectives of the compiled program, priced by `cost.collectives`.
        exposed_seconds: the part of it that does not overlap with compute in the compiled schedule; all of it from
            compilers that estimate no cycles, see `ConfirmedRow.exposed_seconds`.
        peak_bytes: device memory needed; None if the compiler is not that of the real chip.
        by_kind: kind of collective -> seconds, all runs.
        compile_seconds: duration of the compilation; `cached`: the answer is from an earlier run.
    """

    outcome: CompileOutcome
    reason: str = ""
    compute_seconds: float | None = None
    communication_seconds: float = 0.0
    exposed_seconds: float = 0.0
    peak_bytes: int | None = None
    by_kind: dict[str, float] = field(default_factory=dict)
    compile_seconds: float = 0.0
    cached: bool = False


@dataclass(frozen=True)
class ConfirmedRow:
    """A candidate and its compiled figures. `compiled` is None if it was not compiled; `why` gives the reason. `also`:
    names of later candidates with identical programs."""

    candidate: Candidate
    compiled: Compiled | None = None
    why: str = ""
    also: tuple[str, ...] = ()

    @property
    def compute_seconds(self) -> float:
        """The compiler's figure if it gives one, else the prediction."""
        known = self.compiled.compute_seconds if self.compiled else None
        return self.candidate.cost.compute_seconds if known is None else known

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
        known = self.compiled.peak_bytes if self.compiled else None
        return self.candidate.cost.peak_bytes if known is None else known


@dataclass(frozen=True)
class Confirmation:
    """All candidates with their verdicts, in the order of compilation.

    Attributes:
        compiler: its name, e.g. "tpu v4:2x2x4". chosen: index of the best in `rows`, None if no compiled program fits.
        rounds: searches whose plans were compiled. corrections: factors that corrected the model in the last search.
    """

    compiler: str
    rows: tuple[ConfirmedRow, ...]
    chosen: int | None
    limit_bytes: int
    rounds: int = 1
    corrections: Corrections = NO_CORRECTIONS
    seconds: float = 0.0

    @property
    def row(self) -> ConfirmedRow | None:
        """The row of the best plan."""
        return None if self.chosen is None else self.rows[self.chosen]

    @property
    def taken(self) -> Candidate | None:
        """The best plan by compiled figures."""
        return None if self.row is None else self.row.candidate

    @property
    def rejected(self) -> bool:
        """True if the compiler answered and every program it compiled exceeds the device's memory."""
        answers = [row.compiled.outcome for row in self.rows if row.compiled]
        return self.chosen is None and any(outcome in ("compiled", "out of memory") for outcome in answers)
