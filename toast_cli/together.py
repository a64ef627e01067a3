"""Several programs on the same chips, under one sharding of the arguments that they share: a server's prefill and
decode, a trainer and an actor (`--with`).

Each program is planned by itself first. Every sharding that these plans, and known strategies, give the shared
arguments is then tried in all programs with short searches; the one with the least time in all gets full searches. What
the other programs keep in memory meanwhile (caches, optimizer state) is taken off a program's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, prod

from toast_cli.base.children import without_cycle_collection
from toast_cli.base.errors import UsageError
from toast_cli.candidates.largest_size import split_dims
from toast_cli.candidates.variants import Progress
from toast_cli.hardware import written_shape
from toast_cli.pipeline import Outcome, briefly, plan_given
from toast_cli.plan.decisions import Plan
from toast_cli.price.memory_fit import NO
from toast_cli.report.model import MemberFacts, TogetherFacts
from toast_cli.request import WITH_OPTION, Request

# Full searches, at most, until all programs fit beside what the others keep.
ROUNDS = 3
# Of shardings whose times differ by no more than this fraction, the one with the least memory is taken.
TIE = 0.01
# A sharding is not tried if the plans known for it take so many times as long: a search gains less.
MUCH_LONGER = 1.25


@dataclass(frozen=True)
class SharedSharding:
    """A mesh shape (`data=4,model=2`), and the shared arguments' shardings on it as pins. limits: [programs] bytes per
    device that each may use beside the others."""

    mesh_shape: str
    pins: tuple[str, ...]
    limits: tuple[int, ...] = ()


@dataclass(frozen=True)
class Attempt:
    """One sharding of the shared arguments, and each program's outcome under it."""

    sharding: SharedSharding
    outcomes: tuple[Outcome, ...]

    def is_better(self, other: Attempt | None, runs: Sequence[int]) -> bool:
        """Whether all programs fit and keep their bounds, where with the other they do not; or all runs take less time,
        or as much with less memory."""
        if other is None or self.is_met != other.is_met:
            return other is None or self.is_met
        ours, theirs = _seconds(self.outcomes, runs), _seconds(other.outcomes, runs)
        if abs(ours - theirs) > TIE * theirs:
            return ours < theirs
        return self._peak_bytes < other._peak_bytes

    @property
    def is_met(self) -> bool:
        return all(outcome.report.met for outcome in self.outcomes)

    @property
    def _peak_bytes(self) -> float:
        return sum(outcome.result.cost.peak_bytes for outcome in self.outcomes)


# Plans the k-th program: alone, or under a sharding from an outcome on, briefly or in full.
Planner = Callable[[int, SharedSharding | None, Outcome | None, bool], Outcome]


def partition_together(
    requests: Sequence[Request], names: Sequence[str], runs: Sequence[int], progress: Progress | None = None
) -> tuple[Outcome, ...]:
    """The outcomes of all programs under the sharding of their shared arguments with which all runs take least time.

    Args:
        requests: one a program, of one machine and with the same options. names: of the programs, for reports. runs: of
            each, for one run of the first.

    Raises UsageError if the programs share no argument, and for options that plan one program.
    """
    first = requests[0]
    alone_only = {"--plan": first.plan, "--pipeline": first.pipeline, "--dim": split_dims(first.dims)[1]}
    for option, value in alone_only.items():
        if value is not None:
            raise UsageError("one program is planned so, not several", where=option, hint=f"leave out {WITH_OPTION}")

    def planned(k: int, sharding: SharedSharding | None, start: Outcome | None, brief: bool) -> Outcome:
        request = requests[k]
        if sharding is not None:
            pins, limit = (*request.pins, *sharding.pins), sharding.limits[k]
            request = replace(request, mesh_shape=sharding.mesh_shape, pins=pins, memory_limit=limit)
        if brief:
            request = replace(briefly(replace(request, budget_seconds=None)), confirm=0)
        elif request.budget_seconds is not None:  # of all full searches, with the usual number of rounds
            request = replace(request, budget_seconds=request.budget_seconds / (2 * len(requests)))
        source = None if start is None else start.original or start.source
        return plan_given(request, progress, None, sharding is None, source, start)

    with without_cycle_collection():
        return _planned_together(names, runs, planned)


def _planned_together(names: Sequence[str], runs: Sequence[int], planned: Planner) -> tuple[Outcome, ...]:
    alone: list[Outcome] = []
    for k in range(len(names)):
        alone.append(planned(k, None, None, _interrupted(alone)))
    # Paths of the arguments that all programs have, in the same shape and type.
    programs = [outcome.source.program for outcome in alone]
    types = [{a.path: str(program.values[a.value]) for a in program.arguments if a.path} for program in programs]
    shared = frozenset(path for path, kind in types[0].items() if all(of.get(path) == kind for of in types))
    if not shared:
        hint = "arguments are shared that have the same name and type; the programs' arguments: "
        hint += " and ".join(", ".join(sorted(paths)[:3]) or "none has a name" for paths in types)
        raise UsageError("the programs share no argument", where=WITH_OPTION, hint=hint)
    best = _best_attempt(alone, shared, runs, planned)
    for _ in range(ROUNDS):
        if _interrupted((*alone, *best.outcomes)):
            break
        sharding = replace(best.sharding, limits=_limits(best.outcomes, alone, shared))
        full = tuple(planned(k, sharding, outcome, False) for k, outcome in enumerate(best.outcomes))
        best = Attempt(sharding, full)
        limits = _limits(full, alone, shared)
        if all(outcome.result.cost.peak_bytes <= limit for outcome, limit in zip(full, limits, strict=True)):
            break
    kept = [_kept_bytes(outcome, shared) for outcome in best.outcomes]
    members = [
        MemberFacts(name, number, after.report.predicted.step_seconds, before.report.predicted.step_seconds, round(own))
        for name, number, after, before, own in zip(names, runs, best.outcomes, alone, kept, strict=True)
    ]
    facts = TogetherFacts(len(shared), _seconds(best.outcomes, runs), _seconds(alone, runs), members)
    limits = _limits(best.outcomes, alone, shared)
    return tuple(_with_facts(outcome, facts, limit) for outcome, limit in zip(best.outcomes, limits, strict=True))


def _with_facts(outcome: Outcome, facts: TogetherFacts, limit: int) -> Outcome:
    """The outcome with the facts of all programs; it does not fit if it needs more than what the others leave it."""
    report = replace(outcome.report, together=facts)
    if outcome.result.cost.peak_bytes > limit:
        report = replace(report, predicted=replace(report.predicted, limit_bytes=limit, fits=False, fit=NO))
    return replace(outcome, report=report)


def _best_attempt(alone: Sequence[Outcome], shared: frozenset[str], runs: Sequence[int], planned: Planner) -> Attempt:
    """The sharding with the least time in short searches. One is not tried whose known plans, with every other program
    as fast as alone, take much longer than the best."""
    least = [outcome.report.predicted.step_seconds for outcome in alone]
    step_seconds: dict[SharedSharding, dict[int, float]] = {}  # of the fastest plan of each program that has it
    for k, outcome in enumerate(alone):
        priced = [(outcome.result.plan, outcome.result.cost.step_seconds)]
        priced += [(known.plan, known.cost.step_seconds) for known in outcome.strategies.values() if known.fits]
        for plan, seconds in priced:
            steps = step_seconds.setdefault(_sharding_of(outcome, plan, shared), {})
            steps[k] = min(seconds, steps.get(k, inf))
    estimates = {
        sharding: sum(number * max(steps.get(k, 0.0), least[k]) for k, number in enumerate(runs))
        for sharding, steps in step_seconds.items()
    }
    best: Attempt | None = None
    for sharding in sorted(estimates, key=estimates.__getitem__):
        if best is not None and best.is_met and MUCH_LONGER * _seconds(best.outcomes, runs) < estimates[sharding]:
            break
        limited = replace(sharding, limits=_limits(alone, alone, shared))
        attempt = Attempt(limited, tuple(planned(k, limited, start, True) for k, start in enumerate(alone)))
        if attempt.is_better(best, runs):
            best = attempt
        if _interrupted((*alone, *attempt.outcomes)):
            break
    assert best is not None
    return best


def _sharding_of(outcome: Outcome, plan: Plan, shared: frozenset[str]) -> SharedSharding:
    mesh, program = outcome.problem.mesh, outcome.source.program
    shardings = outcome.evaluator.lowered(plan).shardings
    pins = []
    for argument in program.arguments:
        if argument.path in shared and program.values[argument.value].shape:
            entries = ("+".join(mesh.names[axis] for axis in axes) or "None" for axes in shardings[argument.value])
            pins.append(f"{argument.path}={','.join(entries)}")
    return SharedSharding(written_shape(mesh.shape), tuple(sorted(pins)))


def _kept_bytes(outcome: Outcome, shared: frozenset[str]) -> float:
    """Bytes per device that a program's own arguments take, which stay while the others run."""
    mesh, program = outcome.problem.mesh, outcome.source.program
    shardings = outcome.evaluator.lowered(outcome.result.plan).shardings
    common = sum(
        program.values[a.value].bytes / prod(mesh.sizes[axis] for axes in shardings[a.value] for axis in axes)
        for a in program.arguments
        if a.path in shared
    )
    return max(0.0, outcome.result.cost.argument_bytes - common)


def _limits(outcomes: Sequence[Outcome], alone: Sequence[Outcome], shared: frozenset[str]) -> tuple[int, ...]:
    """[programs] bytes per device that each may use: what it may use alone, without what the others keep."""
    kept = [_kept_bytes(outcome, shared) for outcome in outcomes]
    usable = (outcome.problem.mesh.limit_bytes for outcome in alone)
    return tuple(max(1, round(limit - sum(kept) + own)) for limit, own in zip(usable, kept, strict=True))


def _seconds(outcomes: Sequence[Outcome], runs: Sequence[int]) -> float:
    return sum(number * outcome.report.predicted.step_seconds for number, outcome in zip(runs, outcomes, strict=True))


def _interrupted(outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.result.stopped == "interrupted" for outcome in outcomes)
