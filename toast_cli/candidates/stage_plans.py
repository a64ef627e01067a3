"""Plans of pipeline stages: the program in a loop over microbatches, its plan on the mesh of one stage, and the price.

What is written (`rewrite.stages`) and what is priced (`price.pipelines`) are of the same program and plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from toast_cli.base.errors import UsageError
from toast_cli.dimensions import analyse
from toast_cli.frontend import Source, program_pins
from toast_cli.hardware import Mesh
from toast_cli.hardware.topology import divisors
from toast_cli.plan.decisions import Plan
from toast_cli.plan.problem import Problem, make_problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.pipelines import (
    ONE_F_ONE_B,
    StageRequest,
    check_needed,
    pipelines,
    stage_mesh,
    stage_places,
)
from toast_cli.program.stack import Stack, find_stack
from toast_cli.rewrite.microbatches import batch_parts, with_microbatches
from toast_cli.rewrite.stage_files import refusal
from toast_cli.rewrite.stages import StagePlan
from toast_cli.search.moves import suited
from toast_cli.tactics.strategies import BASELINES, STRATEGIES, priced_strategies

# Known strategies, the fastest without stages, that are priced in a stage.
_FEW = 4


@dataclass(frozen=True)
class StageOptions:
    """What the user says about the plan in a stage. state: fixes decisions of a problem. label: the plan's name where
    these are all of it. needed: mesh axes of which a stage needs a part -> the option that says so."""

    pins: tuple[str, ...] = ()
    state: Callable[[Problem], Problem] = lambda problem: problem
    label: str = ""
    needed: Mapping[str, str] = field(default_factory=dict)


def best_stages(
    source: Source, mesh: Mesh, request: StageRequest | None, inside: StageOptions = StageOptions()
) -> StagePlan | None:
    """The plan of stages with the shortest step of those that fit in memory: strategies in a stage x numbers of
    microbatches, doubled as long as that pays, x schedules.

    Args:
        request: the user's; None to try the networks of the mesh with few strategies, and to return None where no
            pipeline is possible.

    Raises UsageError, mostly at `--pipeline`, if the requested pipeline is impossible.
    """
    try:
        return _Search(source, mesh, request, inside).run()
    except UsageError:
        if request is None:
            return None
        raise


class _Search:
    """One search. Programs in microbatches are made once for all places."""

    def __init__(self, source: Source, mesh: Mesh, request: StageRequest | None, inside: StageOptions) -> None:
        self._source, self._mesh, self._inside = source, mesh, inside
        self._wanted = request or StageRequest()
        self._names: tuple[str, ...] = BASELINES if request is None else STRATEGIES
        self._cut: dict[int, Source] = {}

    def run(self) -> StagePlan | None:
        places = check_needed(stage_places(self._mesh, self._wanted), self._mesh, self._inside.needed)
        if not places:
            return None
        stack = find_stack(self._source.program)
        equal = [place for place in places if stack.layers % place[1] == 0]
        if not equal:
            hint = f"give {', '.join(map(str, divisors(stack.layers)[1:]))} stages"
            raise refusal(f"{stack.layers} layers have no {places[0][1]} equal parts", hint=hint)
        numbers = self._numbers(stack, equal[0][1])
        tried: list[StagePlan] = []
        for place in equal:
            names, best = self._names, (True, inf)
            for number in [n for n in numbers if n >= place[1]] or numbers[-1:]:
                plans, names = self._plans(place, number, names)
                tried += plans
                reached = min(map(_progress, plans), default=best)
                if reached > best:
                    break
                best = reached
        written = (ONE_F_ONE_B, 1)  # one part of the stack on each stage
        possible = [p for p in tried if not self._wanted.written or (p.priced.schedule, p.priced.repeats) == written]
        if not possible:
            raise refusal("no strategy gives a stage so many microbatches", hint="try fewer")
        spmd = [p.priced.cost.step_seconds for p in tried if p.priced.schedule != ONE_F_ONE_B and p.priced.fits]
        best_plan = min(possible, key=lambda p: p.priced.rank)
        return replace(best_plan, priced=replace(best_plan.priced, spmd_seconds=min(spmd, default=None)))

    def _numbers(self, stack: Stack, stages: int) -> list[int]:
        """Numbers of microbatches to try."""
        wanted, loops = self._wanted.microbatches, stack.program.loops
        if stack.loop >= 0:  # the program's own
            if loops[stack.loop].parent >= 0:
                raise refusal("the program has no loop over all microbatches, but loops in one another")
            if wanted not in (0, stack.microbatches):
                hint = f"give --pipeline {stages}:{stack.microbatches}"
                raise refusal(f"the program has {stack.microbatches} microbatches of its own", hint=hint)
            self._cut[stack.microbatches] = self._source
            return [stack.microbatches]
        numbers = [wanted] if wanted else batch_parts(self._source)
        if isinstance(numbers, str):
            raise refusal(f"the batch cannot be run in microbatches with the same numbers: {numbers}")
        return numbers

    def _plans(
        self, place: tuple[int, int], number: int, names: Collection[str]
    ) -> tuple[list[StagePlan], tuple[str, ...]]:
        """(plans with so many microbatches, the names of their strategies)."""
        if number not in self._cut:
            cut = with_microbatches(self._source, number)
            if isinstance(cut, str):
                raise refusal(f"the batch cannot be run in {number} microbatches with the same numbers: {cut}")
            self._cut[number] = cut
        source, (axis, stages), user_pins = self._cut[number], place, self._inside.pins
        mesh = stage_mesh(self._mesh, axis, stages)
        # A stage has 1/S of the layers, so that a plan of all of them may need S times the memory.
        large = replace(mesh, limit_bytes=stages * mesh.limit_bytes)
        pins = program_pins(source, mesh.names, mesh.sizes)
        problem = make_problem(source.program, analyse(source.program), large, user_pins, pins)
        problem = replace(problem, accumulations=())  # stages reduce gradients in each microbatch
        stated = self._inside.state(problem) if mesh.devices > 1 else problem
        evaluator, stack = Evaluator(stated), find_stack(source.program)
        plans: dict[str, Plan] = {"": ()}
        if mesh.devices > 1 and len(stated.closed) == len(mesh.names):
            plans = {self._inside.label: stated.fixed}
        elif mesh.devices > 1:
            priced = priced_strategies(evaluator, tuple(names))[0]
            fastest = sorted(priced.values(), key=lambda s: s.rank)[:_FEW]
            names = [s.name for s in fastest]
            plans = {s.label: suited(stated, s.plan) if stated.fixed else s.plan for s in fastest}
        stage_plans = [
            StagePlan(source, evaluator, plan, stack, replace(pipeline, strategy=label))
            for label, plan in plans.items()
            for pipeline in pipelines(evaluator, plan, stack, self._mesh, place)
        ]
        return stage_plans, tuple(names)


def _progress(planned: StagePlan) -> tuple[bool, float]:
    """Smaller is better, or nearer to what fits."""
    priced = planned.priced
    return not priced.fits, priced.cost.step_seconds if priced.fits else priced.cost.peak_bytes
