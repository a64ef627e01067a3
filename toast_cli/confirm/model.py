"""What goes in and out of a confirmation. Bytes and seconds are of one device and one run of the program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from toast_cli.cost.corrections import NO_CORRECTIONS, Corrections
from toast_cli.cost.model import Cost
from toast_cli.plan.decisions import Plan

CompileOutcome = Literal["compiled", "out of memory", "refused", "timed out"]


@dataclass(frozen=True)
class Candidate:
    """A plan worth a compilation. `name`: "search", "search 2" for runners-up, or a strategy's. `cost`: what the
    model predicts."""

    name: str
    plan: Plan
    cost: Cost


@dataclass(frozen=True)
class Compiled:
    """What a compiler says of one written program.

    Attributes:
        outcome: whether there is a compiled program; `reason` says why not.
        compute_seconds: by the compiler's estimated cycles; None from compilers that estimate none.
        communication_seconds: all collectives of the compiled program, priced by `cost.collectives`.
        exposed_seconds: the part of it that the compiled schedule hides behind nothing.
        peak_bytes: device memory needed; None where the compiler is not that of the real chip.
        by_kind: kind of collective -> seconds, all runs.
        compile_seconds: what the answer cost; `cached`: it was known from an earlier run.
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
    """A candidate and what became of it. `compiled` is None where it was not compiled; `why` says the reason. `also`:
    names of later candidates whose programs are written in the same way."""

    candidate: Candidate
    compiled: Compiled | None = None
    why: str = ""
    also: tuple[str, ...] = ()

    @property
    def compute_seconds(self) -> float:
        """Compiled where the compiler says it, else predicted."""
        known = self.compiled.compute_seconds if self.compiled else None
        return self.candidate.cost.compute_seconds if known is None else known

    @property
    def step_seconds(self) -> float:
        """Computing, and the communication that nothing hides."""
        return self.compute_seconds + (self.compiled.exposed_seconds if self.compiled else 0.0)

    @property
    def peak_bytes(self) -> float:
        """Compiled where the compiler is that of the real chip, else predicted."""
        known = self.compiled.peak_bytes if self.compiled else None
        return self.candidate.cost.peak_bytes if known is None else known


@dataclass(frozen=True)
class Confirmation:
    """All candidates with their verdicts, in the order in which they were asked.

    Attributes:
        compiler: what judged, e.g. "tpu v4:2x2x4". chosen: place of the best in `rows`, None where nothing was
            compiled that fits.
        rounds: searches whose plans were compiled. corrections: what the last round's search was corrected by.
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
        """Whether the compiler answered and every program it was asked about exceeds the device."""
        answers = [row.compiled.outcome for row in self.rows if row.compiled]
        return self.chosen is None and any(outcome in ("compiled", "out of memory") for outcome in answers)
