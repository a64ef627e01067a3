"""What is searched: a program as it is written and, where it has fused products, merges dimensions in an order that
splits badly, or has sizes that do not divide, rewritten, each on every mesh there is a choice of.

Enters: a `Source`, the meshes, and what a `Request` asks for. Leaves: a `Reading` for each program searched, the best
first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from toast_cli.alternatives import KEPT
from toast_cli.compiler.partitioner import installed_workarounds
from toast_cli.cost.model import Cost
from toast_cli.dimensions import Dimensions, analyse
from toast_cli.dimensions.merged import reorderable, row_positions, set_apart
from toast_cli.dimensions.padded import with_uneven
from toast_cli.errors import InputError, ToastError, UsageError
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.frontend import NewOrder, Source, batch_parts, stated_pins, with_microbatches, with_order, with_parts
from toast_cli.hardware import Mesh
from toast_cli.plan.decisions import Plan
from toast_cli.plan.goal import parse_goal
from toast_cli.plan.patterns import make_problem
from toast_cli.plan.problem import Problem
from toast_cli.plan.saved import SavedPlan, apply_plan
from toast_cli.quantities import format_bytes
from toast_cli.request import Request, SearchName
from toast_cli.search.incumbent import SearchResult
from toast_cli.search.objective import Objective
from toast_cli.search.run import Settings, search_shapes
from toast_cli.tactics import Expert, Wishes, experts, starting_plans, strategies
from toast_cli.tactics.strategies import EVERY, better

# stage, fraction of it done, best step seconds so far (inf: none), evaluations, elapsed seconds
Progress = Callable[[str, float, float, int, float], None]
# What a plan for another program than the user's must gain, as a fraction; predictions of two programs differ so much
# from what compilers make of them.
PARTED = 0.03
# Plans looked at of another program than the user's. It is searched further only if the best of them gains as much
# against the best of as many plans for the user's program.
GLANCE = 500
# More parts of a batch are tried while twice as many need no more than this share of the memory.
_WORTH_MORE = 0.98


@dataclass(frozen=True)
class SearchSpace:
    """What the search may choose from.

    Attributes:
        meshes: the candidate mesh shapes. wishes: the tactics asked for. saved: a plan made before.
    """

    request: Request
    meshes: list[Mesh]
    wishes: Wishes
    saved: SavedPlan | None = None


@dataclass(frozen=True)
class Reading:
    """A program as it was searched, with what was found for it.

    Attributes:
        experts: known strategies by name, on the best of all mesh shapes tried; none where there was one shape.
    """

    source: Source
    evaluator: Evaluator
    result: SearchResult
    experts: Mapping[str, Expert] = field(default_factory=dict)

    def reward(self, plan: Plan, cost: Cost, reference: Cost) -> float:
        """How good a plan is; comparable between readings of one program. reference: the cost of the plan that decides
        nothing, of the first reading."""
        unsharded = replace(reference, axis_seconds=self.evaluator.cost(()).axis_seconds)
        return Objective(self.evaluator.problem, unsharded).reward(plan, cost)


def readings_of(
    source: Source, request: Request, meshes: list[Mesh], saved: SavedPlan | None = None
) -> list[tuple[Source, Dimensions]]:
    """The program as it is written, and rewritten where it has fused products, merges dimensions in an order that
    splits badly, or has sizes that do not divide; a plan made before is of one of the two. Each with its batch in
    parts, where the user or the plan says so, and analysed for these meshes.

    Raises `UsageError` where the program cannot be run so."""
    parts = (request.microbatches or 1) if saved is None else saved.microbatches
    wanted = False if request.as_written or source.stated else request.parted if saved is None else saved.parted
    written = analysed(_in_parts(source, parts), meshes)
    if wanted is False:
        return [written]
    reordered = _reordered(source, meshes)
    rewritten = with_parts(reordered or source) or reordered
    other = written if rewritten is None else analysed(_in_parts(rewritten, parts), meshes)
    other = with_uneven_shards(other, meshes)
    if not other[0].program.parted:
        return [written]
    return [other] if wanted else [written, other]


def analysed(source: Source, meshes: list[Mesh]) -> tuple[Source, Dimensions]:
    """A program with its dimensions; those merged of parts that no mesh splits are dimensions of their own."""
    program = set_apart(source.program, analyse(source.program), [mesh.sizes for mesh in meshes])
    return source if program is source.program else replace(source, program=program), analyse(program)


def with_uneven_shards(reading: tuple[Source, Dimensions], meshes: list[Mesh]) -> tuple[Source, Dimensions]:
    """The same with sizes that no mesh divides padded, where there are any."""
    source, dimensions = reading
    program, padded = with_uneven(source.program, dimensions, [mesh.sizes for mesh in meshes])
    if not padded:
        return reading
    notices = [
        f"{before} does not divide: shards are uneven inside the program, as of {after}, and arguments and results "
        "are whole along it (--as-written: no such shards)"
        for before, after in sorted(padded.items())
    ]
    program = replace(program, parted=True)
    return replace(source, program=program, notices=(*source.notices, *notices)), analyse(program)


def _in_parts(source: Source, parts: int) -> Source:
    if parts == 1:
        return source
    found = with_microbatches(source, parts)
    if isinstance(found, str):
        raise UsageError(
            f"the batch cannot be run in {parts} parts with the same numbers: {found}",
            where="--microbatches",
            hint="try another number, or leave it away",
        )
    return found


def _reordered(source: Source, meshes: list[Mesh]) -> Source | None:
    """The program with dimensions merged in the order that these meshes split best; None where that is its own."""
    program = source.program
    merges = reorderable(program, analyse(program), [mesh.sizes for mesh in meshes])
    orders = {place: NewOrder(merge.sizes, merge.first) for merge in merges for place in merge.places}
    return with_order(source, orders, lambda op: row_positions(op, program).keys()) if orders else None


def search_readings(readings: list[tuple[Source, Dimensions]], space: SearchSpace, tell: Progress) -> list[Reading]:
    """All readings of a program, the one with the best plan first; the second is searched to the end only if it looks
    better after `GLANCE` plans. They share the plans and seconds that the user sets; of an effort each has its own. The
    evaluations of each are those of all."""
    request = space.request
    count = len(readings[: request.iterations])
    settings = Settings(
        request.search,
        request.seed,
        request.iterations,
        request.budget_seconds,
        request.effort,
        KEPT if request.wanted > 1 else 0,
    )
    if count > 1 and not (request.iterations is None and request.budget_seconds is None):
        settings = settings.part(1.0 / count)

    def searched(number: int, settings: Settings) -> Reading:
        def said(stage: str, used: float, *figures: Any) -> None:
            tell(stage, (number + used) / count, *figures)

        return search_meshes(*readings[number], space, settings, said)

    try:
        first = searched(0, settings)
    except UsageError:  # a strategy that does not apply to the program as it is written
        if count == 1:
            raise
        return [searched(1, settings)]
    reference, found = first.evaluator.cost(()), [first]

    def worth(reading: Reading, cost: Cost | None = None) -> float:
        reward = reading.reward(reading.result.plan, cost or reading.result.cost, reference)
        return reward - PARTED if reading.source.program.parted else reward

    if count > 1 and first.result.stopped != "interrupted":
        plans = settings.budget().evaluations or inf
        glance = settings.name == SearchName.mcts and plans > GLANCE
        second = searched(1, replace(settings, evaluations=GLANCE) if glance else settings)
        as_early = [cost for number, cost in first.result.trail if number <= GLANCE][-1]
        if glance and second.result.stopped == "iterations" and worth(second) > worth(first, as_early):
            second = searched(1, settings)
        found = sorted([first, second], key=worth, reverse=True)
    evaluations, taken = sum(it.result.evaluations for it in found), sum(it.result.seconds for it in found)
    return [replace(it, result=replace(it.result, evaluations=evaluations, seconds=taken)) for it in found]


def made_to_fit(best: Reading, search: Callable[[Source], Reading]) -> Reading:
    """The program with its batch in as few parts as fit in memory; `best`, which does not fit, where none does, with a
    notice that says why."""
    source, before = best.source, best.result.cost
    least, why = before.peak_bytes, "no input has a batch"
    for parts in batch_parts(source):
        rewritten = with_microbatches(source, parts)
        if isinstance(rewritten, str):
            why = rewritten
            break
        found = search(rewritten)
        cost = found.result.cost
        if found.result.fits:
            slower = cost.step_seconds / before.step_seconds - 1.0
            saved = before.peak_bytes - cost.peak_bytes
            notice = (
                f"made to fit: --microbatches {parts}: {slower:+.0%} step time, -{format_bytes(saved)} per device, "
                "against the best plan as written"
            )
            return replace(found, source=replace(found.source, notices=(notice, *found.source.notices)))
        why = f"it needs {format_bytes(cost.peak_bytes)} with its batch in {parts} parts"
        if cost.peak_bytes > _WORTH_MORE * least or found.result.stopped == "interrupted":
            break
        least = cost.peak_bytes
    notice = f"not made to fit with microbatches: {why}"
    return replace(best, source=replace(source, notices=(notice, *source.notices)))


def search_meshes(
    source: Source, dimensions: Dimensions, space: SearchSpace, settings: Settings, tell: Progress
) -> Reading:
    """The best plan over all candidate meshes; a plan that fits beats one that does not."""
    request, meshes, wishes, saved = space.request, space.meshes, space.wishes, space.saved
    if not meshes:
        raise UsageError("the specification has no mesh shape to try", where=request.mesh)
    goal, workarounds = parse_goal(request.minimise, request.subject_to), installed_workarounds()

    previous: Evaluator | None = None
    found: Mapping[str, Expert] = {}

    def problem_on(mesh: Mesh) -> Problem:
        nonlocal previous
        stated = stated_pins(source, mesh.names, mesh.sizes)
        problem = make_problem(source.program, dimensions, mesh, request.pins, stated, workarounds)
        problem = replace(problem, goal=goal)
        if saved is not None:
            return apply_plan(problem, saved, complete=request.complete)
        if wishes.whole and previous is None:
            previous = Evaluator(problem)
        return wishes.state(problem, previous)

    def evaluator_of(mesh: Mesh) -> Evaluator:
        nonlocal previous, found
        problem = problem_on(mesh)
        previous = Evaluator(problem, strategies(problem).values(), previous)
        if len(meshes) > 1:
            found = better(found, experts(previous, EVERY)[0])
        return previous

    def report(best_seconds: float, evaluations: int, elapsed: float, used: float) -> None:
        tell("search", used, best_seconds, evaluations, elapsed)

    suited = suiting(meshes, problem_on) if (wishes.wishes or source.stated) and len(meshes) > 1 else meshes
    evaluator, result = search_shapes(evaluator_of, suited, settings, starting_plans, report)
    return Reading(source, evaluator, result, found)


def suiting(meshes: list[Mesh], problem_on: Callable[[Mesh], Problem]) -> list[Mesh]:
    """The meshes on which what was asked for, and what the program states (manual regions, kept shardings), can be had.
    Raises the error of the first where there is none."""
    found: list[Mesh] = []
    why: ToastError | None = None
    for mesh in meshes:
        try:
            problem_on(mesh)
        except (UsageError, InputError) as error:
            why = why or error
        else:
            found.append(mesh)
    if not found and why is not None:
        raise why
    return found
