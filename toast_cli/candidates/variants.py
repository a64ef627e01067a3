"""Chooses the variants of a program to search, and searches them on every candidate mesh. The variants are the program
as written and a rewritten one, if it has fused products.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, reduce
from math import inf

from toast_cli.base.errors import UsageError
from toast_cli.dimensions import analyse
from toast_cli.dimensions.merged import set_apart
from toast_cli.frontend import Source, program_pins
from toast_cli.hardware import Mesh
from toast_cli.plan.decisions import FASTEST, PEAK_MEMORY, Plan, parse_goal
from toast_cli.plan.problem import Problem, make_problem, on_mesh
from toast_cli.plan.saved import SavedPlan, apply_plan, carried_over
from toast_cli.price.cost import Cost
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.memory_fit import peak_error
from toast_cli.request import Offload, Recompute, Request
from toast_cli.rewrite import with_microbatches, with_offload, with_recompute
from toast_cli.rewrite.fused_products import fused_parts, with_parts
from toast_cli.search.alternatives import KEPT
from toast_cli.search.incumbent import Objective, SearchResult
from toast_cli.search.run import Candidate, Searched, Settings, search_candidates
from toast_cli.tactics import PricedStrategy, TacticRequests, priced_strategies, starting_plans, strategies
from toast_cli.tactics.strategies import EVERY, better, preferred, with_batch_over_data

# stage, fraction of it done, best step seconds found (inf: none), evaluations, elapsed seconds
Progress = Callable[[str, float, float, int, float], None]
# A variant of the program as it is analysed for a mesh, made when it is needed.
Reading = Callable[[Mesh], Source]
# The relative gain that a plan for a rewritten program must have. Predictions for two programs differ by about as much
# from what compilers make of them.
PARTED = 0.03


@dataclass(frozen=True)
class SearchSpace:
    """The candidates of a search.

    Attributes:
        meshes: the candidate mesh shapes. tactics: the tactics that the user asked for. saved: a saved plan. gives_up:
            whether a search may end early where hardly any plan fits. start: a plan to try first. known: the evaluator
            of the only variant on one of these meshes, if it was searched before.
    """

    request: Request
    meshes: list[Mesh]
    tactics: TacticRequests
    saved: SavedPlan | None = None
    gives_up: bool = False
    start: SavedPlan | None = None
    known: Evaluator | None = None

    def stated(self, problem: Problem) -> Problem:
        """A problem with the decisions fixed that the saved plan, or the tactics, state."""
        if self.saved is not None:
            return apply_plan(problem, self.saved, complete=self.request.complete)
        return self.tactics.state(problem)


@dataclass(frozen=True)
class Variant:
    """One variant of the program, with the result of its search.

    Attributes:
        elsewhere: the same program searched on the other mesh shapes.
    """

    source: Source
    evaluator: Evaluator
    result: SearchResult
    elsewhere: tuple[Variant, ...] = ()

    @cached_property
    def strategies(self) -> Mapping[str, PricedStrategy]:
        """Known strategies by name, on the best of all mesh shapes tried; empty if there was only one shape."""
        strategies_by_mesh = [
            priced_strategies(variant.evaluator, EVERY)[0] for variant in (self, *self.elsewhere) if self.elsewhere
        ]
        return reduce(better, strategies_by_mesh, {})

    def preferred(self) -> Variant:
        """With the known strategy, on any mesh, or the shorter plan that is nearly as fast, and the batch over data."""
        meshes = (self, *self.elsewhere)
        searched = [(variant.evaluator, variant.result) for variant in meshes]
        evaluator, result = preferred(searched[0], searched[1:])
        result = with_batch_over_data(evaluator, result)
        elsewhere = tuple(variant for variant in meshes if variant.evaluator is not evaluator)
        (chosen,) = (variant for variant in meshes if variant.evaluator is evaluator)
        return replace(chosen, result=result, elsewhere=elsewhere)

    @property
    def allowed_bytes(self) -> float:
        """What a plan's predicted peak may be, by the memory limit and the user's bounds."""
        problem = self.evaluator.problem
        bounds = [bound.limit for bound in problem.goal.bounds if bound.figure == PEAK_MEMORY]
        return min(problem.mesh.limit_bytes, *bounds, inf)

    @property
    def surely_fitting_bytes(self) -> float:
        """A predicted peak that keeps the user's bounds, and fits in memory even if the prediction is off by its
        error."""
        return min(self.allowed_bytes, self.evaluator.problem.mesh.limit_bytes / (1.0 + self.peak_error))

    @property
    def peak_error(self) -> float:
        problem = self.evaluator.problem
        return peak_error(problem.program, problem.mesh)

    @property
    def surely_fits(self) -> bool:
        return self.result.cost.peak_bytes <= self.surely_fitting_bytes

    def reward(self, plan: Plan, cost: Cost, reference: Cost) -> float:
        """Reward of a plan; comparable between variants of one program. reference: the cost of the empty plan of the
        first variant."""
        unsharded = replace(reference, axis_seconds=self.evaluator.cost(()).axis_seconds)
        return Objective(self.evaluator.problem, unsharded).reward(plan, cost)


def variants_of(source: Source, request: Request, saved: SavedPlan | None = None) -> list[Reading]:
    """The variants to search: the program as written, and rewritten if it has fused products. A saved plan selects
    one of the two. Both are rematerialised and microbatched as the user or the plan says; the rewritten one only when
    it is needed.

    Raises `UsageError` if the program cannot be run so.
    """
    wanted = False if request.as_written or source.annotations else request.parted if saved is None else saved.parted
    policy = request.recompute or (saved.recompute if saved else None)
    offload = request.offload or (saved.offload if saved else None)
    parts = request.microbatches or (saved.microbatches if saved else 1)

    def fitted(source: Source) -> Source:
        if policy is not None:
            rewritten = with_recompute(source, Recompute(policy))
            source = _applied(source, rewritten, "--recompute", None if request.recompute else saved)
        source = source if parts == 1 else _in_parts(source, parts, None if request.microbatches else saved)
        if offload is not None:
            rewritten = with_offload(source, Offload(offload))
            source = _applied(source, rewritten, "--offload", None if request.offload else saved)
        return source

    rewritten = analysed(lambda: fitted(with_parts(source)))
    fused = wanted is not False and not source.annotations and fused_parts(source.program) is not None
    if wanted and fused:
        return [rewritten]
    own = fitted(source)
    return [analysed(lambda: own), rewritten] if fused else [analysed(lambda: own)]


def analysed(make: Callable[[], Source]) -> Reading:
    """A program as it is analysed for each mesh: merged dimension classes of which the mesh splits no part become
    separate classes. make: the program, when it is first needed."""
    program_source = cache(make)

    @cache
    def on_sizes(sizes: tuple[int, ...]) -> Source:
        source = program_source()
        program = set_apart(source.program, analyse(source.program), sizes)
        return source if program is source.program else replace(source, program=program)

    return lambda mesh: on_sizes(mesh.sizes)


def parting_may_pay(searched: Searched) -> bool:
    """Whether the rewritten program may have a better plan than the best one for the program as written: that plan, or
    a known strategy, would be faster by `PARTED` if slices and concatenations of fused products moved nothing."""
    evaluator, result = searched.evaluator, searched.result
    parts = fused_parts(evaluator.problem.program)
    if parts is None or not result.fits or evaluator.problem.goal != FASTEST:
        return True

    def is_faster(plan: Plan) -> bool:
        cost, limit = evaluator.cost(plan), (1.0 - PARTED) * result.cost.step_seconds
        if cost.step_seconds - cost.communication_seconds >= limit:  # if nothing at all moved
            return False
        uses = evaluator.collectives(plan)
        moved = sum(use.seconds for use in uses if use.op in parts.ops or use.value in parts.values)
        return cost.step_seconds - moved < limit

    return any(map(is_faster, (result.plan, *searched.starts)))


def _applied(source: Source, rewritten: Source | str, flag: str, saved: SavedPlan | None) -> Source:
    """The rewritten program, which is a text where there is none: the reason. saved: the plan that asks for it, taken
    as far as it applies; None: the user asks for it."""
    what = f"nothing to {flag.removeprefix('--')}: {rewritten}"
    if isinstance(rewritten, str) and saved is not None:
        return replace(source, notices=(*source.notices, f"{saved.path}: {what}"))
    if isinstance(rewritten, str):
        raise UsageError(what, where=flag, hint="leave it out")
    return rewritten


def _in_parts(source: Source, parts: int, saved: SavedPlan | None) -> Source:
    """saved: the plan that asks for it; None: the user asks for it."""
    rewritten = with_microbatches(source, parts)
    if isinstance(rewritten, str):
        raise UsageError(
            f"the batch cannot be run in {parts} microbatches with the same numbers: {rewritten}",
            where=saved.path if saved else "--microbatches",
            hint="run the batch as a whole with --microbatches 1" if saved else "try another number, or leave it out",
        )
    return rewritten


def search_variants(variants: Sequence[Reading], space: SearchSpace, tell: Progress) -> list[Variant]:
    """Searches the variants of a program on all candidate meshes, with one budget; the rewritten one only if it may
    have the best plan. Returns each on its best mesh, the one with the best plan first; a plan that fits beats one that
    does not. Evaluation counts are totals."""
    request, meshes = space.request, space.meshes
    if not meshes:
        raise UsageError("the specification has no mesh shape to try", where=request.mesh)
    goal = parse_goal(request.minimise, request.subject_to)
    settings = Settings(
        request.seed,
        request.iterations,
        request.budget_seconds,
        request.effort,
        KEPT if max(request.best, request.confirm) > 1 else 0,
        space.gives_up,
    )
    reference: Cost | None = None
    prepared: dict[int, tuple[Problem, Evaluator]] = {}  # reading -> its problem, before anything is stated about it

    def evaluator_of(candidate: Candidate) -> Evaluator:
        mesh, evaluator = candidate.mesh, space.known
        source = variants[candidate.reading](mesh)
        if evaluator is None or evaluator.problem.mesh != mesh:
            earlier = prepared.get(candidate.reading)
            before, like = earlier if earlier and earlier[0].program is source.program else (None, None)
            problem = None if before is None else on_mesh(before, mesh)
            if problem is None:
                pins = program_pins(source, mesh.names, mesh.sizes)
                problem = make_problem(source.program, analyse(source.program), mesh, request.pins, pins)
            stated = space.stated(replace(problem, goal=goal))
            evaluator = Evaluator(stated, strategies(stated).values(), like=like)
            prepared[candidate.reading] = problem, evaluator
        return evaluator

    def variant_of(searched: Searched) -> Variant:
        source = variants[searched.candidate.reading](searched.candidate.mesh)
        return Variant(source, searched.evaluator, searched.result)

    def worth(searched: Searched) -> tuple[float, ...]:
        nonlocal reference
        variant = variant_of(searched)
        reference = reference or searched.evaluator.cost(())
        reward = variant.reward(variant.result.plan, variant.result.cost, reference)
        return searched.result.fits, reward - PARTED if variant.source.program.parted else reward

    def starts(problem: Problem) -> list[Plan]:
        first = [] if space.start is None else [carried_over(problem, space.start)[0]]
        return [*first, *starting_plans(problem)]

    def report(best_seconds: float, evaluations: int, elapsed: float, used: float) -> None:
        tell("search", used, best_seconds, evaluations, elapsed)

    candidates = [Candidate(number, mesh, parting_may_pay) for number in range(len(variants)) for mesh in meshes]
    by_reading: dict[int, list[Variant]] = defaultdict(list)
    for searched in search_candidates(evaluator_of, candidates, settings, worth, starts, report):
        by_reading[searched.candidate.reading].append(variant_of(searched))
    return [replace(best, elsewhere=tuple(others)) for best, *others in by_reading.values()]
