"""One step of a plan in program order: one device's kernels and collectives, one after another.

Nothing overlaps here, as in the predicted step time. A loop appears once, with the time of all its trips. Equal
collectives that the cost model counts together are distributed over the ops that they belong to.

Enters: evaluator and search result. Leaves: a `Step`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.evaluate.expected_step import ops_by_pattern, places_of
from toast_cli.search.incumbent import SearchResult

COMPUTE = 0
# Order within an op: collectives that it waits for, its kernel, collectives that complete its results.
_BEFORE, _KERNEL, _AFTER = 0, 1, 2


@dataclass(frozen=True)
class Slice:
    """An interval from `start` for `seconds` on `lane`.

    Attributes:
        op: number of the program op. name: `dot_general`, `all-reduce over data`. runs: how often, loops counted.
        hides: a collective that no op waits for, so that a scheduler may overlap it with compute.
    """

    start: float
    seconds: float
    lane: int
    op: int
    name: str
    runs: float
    hides: bool = False


@dataclass(frozen=True)
class Step:
    """lanes: "compute", then one for each set of mesh axes that collectives run over. slices: in order. elapsed: [half
    steps] seconds before each half step (see `liveness`)."""

    lanes: tuple[str, ...]
    slices: tuple[Slice, ...]
    elapsed: NDArray[np.float64]

    @property
    def seconds(self) -> float:
        return self.slices[-1].start + self.slices[-1].seconds if self.slices else 0.0


def step_of(evaluator: Evaluator, result: SearchResult) -> Step:
    """One step of the plan found."""
    problem, lives = evaluator.problem, evaluator.items.lives
    names = problem.mesh.names
    uses = evaluator.collectives(result.plan)
    alike = ops_by_pattern(problem)
    over = sorted({use.axes for use in uses}, key=lambda axes: (len(axes), axes))
    lane_of = {axes: number for number, axes in enumerate(over, start=1)}
    # (half step, before or after, op, seconds, lane, name, runs, hides)
    found: list[tuple[int, int, int, float, int, str, float, bool]] = []
    for kernel in evaluator.kernels(result.plan):
        trips = [problem.program.ops[op].trips for op in kernel.ops]
        name = kernel.name.removeprefix("stablehlo.")
        for op, count in zip(kernel.ops, trips, strict=True):
            share = count / sum(trips)
            found.append((lives.times[op], _KERNEL, op, kernel.seconds * share, COMPUTE, name, count, False))
    for use in uses:
        name = f"{use.kind} over {', '.join(use.over(names))}"
        when = _BEFORE if use.reason in ("reshard", "neighbours") else _AFTER
        for at in places_of(problem, use, alike):
            runs, seconds = use.count * at.share, use.seconds * at.share
            lane = lane_of[use.axes]
            found.append((lives.times[at.op], when, at.op, seconds, lane, name, runs, not use.waited_for))
    found.sort(key=lambda one: one[:3])
    slices: list[Slice] = []
    now = 0.0
    begins = np.zeros(lives.end + 2)
    for half_step, _, op, seconds, lane, name, runs, hides in found:
        slices.append(Slice(now, seconds, lane, op, name, runs, hides))
        now += seconds
        begins[half_step + 1] = now
    lanes = ("compute", *(", ".join(names[axis] for axis in axes) for axes in over))
    return Step(lanes, tuple(slices), np.maximum.accumulate(begins))
