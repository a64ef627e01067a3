"""The whole tool, top to bottom.

    load ──► program ──► dimensions ──► search ◄──► plan ──► cost
                                           │
                                           ▼
                                emit ──► report

`partition` takes a `Request` and returns an `Outcome`. Frozen values travel along the arrows; the `Evaluator` beside
the search keeps memos. Two steps are not drawn: where no plan fits, `candidates.fitting` rewrites the program and
searches again, and `candidates.ask_compiler` lets a compiler choose between the best plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import TYPE_CHECKING

from toast_cli.ask_xla import begin
from toast_cli.base.children import in_fork, without_cycle_collection
from toast_cli.base.errors import ToastError, UsageError
from toast_cli.candidates.fitting import ATTEMPTS, Candidates
from toast_cli.candidates.largest_size import chosen_sizes, sizes_in, split_dims, tried_size, try_sizes
from toast_cli.candidates.stage_plans import StageOptions, best_stages
from toast_cli.candidates.variants import Progress as Progress
from toast_cli.candidates.variants import SearchSpace, Variant, variants_of
from toast_cli.dimensions import analyse
from toast_cli.frontend import Source, content_of, load, program_pins, symbols_in
from toast_cli.frontend.formats import read_bytes, source_name
from toast_cli.frontend.symbolic import no_symbols, parse_dims
from toast_cli.hardware import Mesh, Spec, export_platform, load_spec, parse_shape
from toast_cli.plan.decisions import Plan, parse_goal
from toast_cli.plan.problem import Problem, make_problem
from toast_cli.plan.saved import SavedPlan, read_plan, save_plan, saved_plan
from toast_cli.plan.sharding import parse_pin
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.pipelines import PricedPipeline, check_request, parse_stages
from toast_cli.program.names import with_dimension_names
from toast_cli.report.build import build_report
from toast_cli.report.comparison import (
    NEAR,
    with_confirmation,
    with_mesh_choice,
    with_pipeline,
    with_row,
)
from toast_cli.report.model import UNSURE, YES, Report, TriedSizeFacts
from toast_cli.request import AUTO, CompilerName, Fit
from toast_cli.request import Request as Request
from toast_cli.search.alternatives import best_plans
from toast_cli.search.incumbent import SearchResult
from toast_cli.search.run import PLANS
from toast_cli.tactics import PricedStrategy, TacticRequests, parse_tactics

if TYPE_CHECKING:
    from toast_cli.ask_xla.annotated import AsAnnotated
    from toast_cli.ask_xla.confirm import Compiler, Confirmation, Tell
    from toast_cli.emit import Written
    from toast_cli.emit.specs import Trees
    from toast_cli.plan.partitioned import PartitionedProgram
    from toast_cli.rewrite.stages import StagePlan


# A compiler is not asked (`--confirm auto`) about a plan that is predicted to need more than so many times the memory.
_HOPELESS = 2.0
# Part of the plans that a short search looks at.
_SHORTER = 0.1


@dataclass(frozen=True)
class Emitted:
    """A file's content, and the report updated after writing it: with its constraints, notes on them, and the time it
    took. files: name -> content, of a folder instead."""

    content: bytes
    report: Report
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A chosen plan: its report, and the program in any of the output formats."""

    report: Report
    source: Source
    evaluator: Evaluator
    result: SearchResult
    strategies: Mapping[str, PricedStrategy] = field(default_factory=dict)  # see `Variant.strategies`
    original: Source | None = None  # the user's program, if `source` is a rewritten one
    annotated: AsAnnotated | str | None = None  # costs of the program's own shardings, or why they are unknown
    stages: StagePlan | None = None  # the best pipeline, if the user asks for one or the mesh has a network

    @property
    def problem(self) -> Problem:
        return self.evaluator.problem

    @property
    def pipeline(self) -> PricedPipeline | None:
        return None if self.stages is None else self.stages.priced

    @property
    def notices(self) -> tuple[str, ...]:
        """Parts of a saved plan, pins and shardings of the program that cannot be applied, a sentence each."""
        return self.problem.notices

    def emit(self, format: str, annotate: str = "minimal", trees: Trees | None = None) -> Emitted:
        """The program as "stablehlo" (text), "bytecode", "jax_export", "hlo", "specs" (JSON) or "python".

        Args:
            annotate: what carries a sharding in StableHLO: "minimal", "full" or "arguments".
            trees: those of the user's function, for a jax.export file; None: those that the program's own file holds.
        """
        from toast_cli.emit import write  # heavy, and not every run writes something

        timings = dict(self.report.timings)
        with _timed("emit", timings, lambda *_: None):
            lowered = self.evaluator.lowered(self.result.plan)
            if format == "jax_export":
                written = in_fork(lambda: self._exported(lowered, annotate, trees))
            else:
                written = in_fork(lambda: write(self.source, lowered, format, annotate))
        analysis = replace(self.report.analysis, notes=[*written.notes, *self.report.analysis.notes])
        report = replace(self.report, constraints=list(written.constraints), analysis=analysis, timings=timings)
        return Emitted(written.content, report)

    def emit_stages(self) -> Emitted:
        """The pipeline's programs, which `Request.stages_written` asks for. Raises UsageError, at `--pipeline`, for a
        program that cannot be cut."""
        from toast_cli.rewrite.stage_files import stage_files
        from toast_cli.rewrite.stages import staged_program

        planned = self.stages
        assert planned is not None
        return Emitted(b"", self.report, in_fork(lambda: stage_files(staged_program(planned))))

    def _exported(self, lowered: PartitionedProgram, annotate: str, trees: Trees | None) -> Written:
        from toast_cli.emit import write
        from toast_cli.emit.specs import emit_export, trees_of

        exported = self.source.format == "jax.export" or self.source.sizes
        if trees is None and exported and self.source.path != "-":
            trees = trees_of(read_bytes(self.source.path))
        written = write(self.source, lowered, "bytecode", annotate)
        platform = export_platform(self.problem.mesh.chip)
        return replace(written, content=emit_export(self.source, lowered, written.content, platform, trees))

    def saved_plan(self) -> bytes:
        """The plan by itself, for `Request.plan` of a later run, also of another program."""
        return save_plan(self.problem, self.result.plan)


def partition(
    request: Request,
    progress: Progress | None = None,
    on_answer: Tell | None = None,
    *,
    annotated: bool = True,
) -> Outcome:
    """Reads, analyses, searches and reports. Raises `ToastError` for bad input; not fitting is a result, not an error.

    Args:
        on_answer: called for each plan that a compiler has answered about (`Request.confirm`).
        annotated: True to price the program's own shardings with XLA.
    """

    def planned(request: Request, neighbour: Outcome | None, trial: bool) -> Outcome:
        return plan_given(request, progress, on_answer, annotated and not trial, None, neighbour)

    with without_cycle_collection():
        return sized(request, planned)


def briefly(request: Request) -> Request:
    """The request with a short search, unless the user says how long it takes."""
    if request.budget_seconds is not None:
        return request
    return replace(request, iterations=max(1, int(_SHORTER * (request.iterations or PLANS[request.effort]))))


def sized(request: Request, planned: Callable[[Request, Outcome | None, bool], Outcome]) -> Outcome:
    """The outcome of a request; with the largest size that surely fits where it asks for that (`--dim b=max`), as a
    short search for each size tells, and then a full one for the size chosen. Programs are not rewritten to fit a size:
    a batch of any size does in enough microbatches.

    Args:
        planned: plans a request, from the plan of an outcome on; True to try a size only.
    """
    other_dims, size_range = split_dims(request.dims)
    if size_range is None:
        return planned(request, None, False)
    content = request.content or read_bytes(request.program)
    symbols, constraints = symbols_in(request.program, content)
    if not symbols:
        raise no_symbols(", ".join((size_range.text, *other_dims)), source_name(request.program))
    if symbols.keys() != {size_range.name, *parse_dims(other_dims)}:  # an error
        content_of(request.program, (f"{size_range.name}={size_range.first}", *other_dims), content)
    devices = load_spec(request.mesh).devices
    trial_request = briefly(replace(request, content=content, fit=Fit.as_written.value, confirm=0, budget_seconds=None))
    # Of the largest size that fits, or if none does, of the smallest: what orders the sizes so, and the outcome.
    best: tuple[tuple[bool, int], Outcome] | None = None

    def surely(request: Request, start: Outcome | None, trial: bool) -> Outcome:
        """The outcome; if its plan may not fit, because that is faster, the one with a plan that surely fits."""
        outcome = planned(request, start, trial)
        if outcome.report.fit != UNSURE:
            return outcome
        near = outcome if start is None or start.report.fit != YES else start
        room = int(outcome.report.predicted.limit_bytes / (1.0 + outcome.report.predicted.peak_error))
        return planned(replace(request, subject_to=(*request.subject_to, f"peak_memory<={room}")), near, trial)

    interrupted = False

    def attempt(size: int) -> TriedSizeFacts | None:
        nonlocal interrupted, best
        sized_request = replace(trial_request, dims=(f"{size_range.name}={size}", *other_dims))
        outcome = surely(sized_request, best and best[1], True)
        if outcome.result.stopped == "interrupted":
            interrupted = True
            return None
        facts = tried_size(size, outcome.report)
        order = not facts.why, -size if facts.why else size
        if best is None or order > best[0]:
            best = order, outcome
        return facts

    tried = try_sizes(sizes_in(size_range, other_dims, constraints, devices), attempt)
    assert best is not None
    facts, chosen = chosen_sizes(size_range, tried, interrupted=interrupted), best[1]
    if not interrupted:
        fit = Fit.as_written.value if best[0][0] else request.fit
        at_size = replace(request, content=content, fit=fit, dims=(f"{size_range.name}={facts.size}", *other_dims))
        chosen = surely(at_size, chosen, False)
    return replace(chosen, report=replace(chosen.report, sizes=facts))


def plan_given(
    request: Request,
    progress: Progress | None = None,
    on_answer: Tell | None = None,
    annotated: bool = False,
    source: Source | None = None,
    neighbour: Outcome | None = None,
) -> Outcome:
    """As `partition`, for a request that states the size of each symbolic dimension.

    Args:
        source: the program, if it is read already. neighbour: the outcome for another machine or other sizes, at whose
            plan the search begins.
    """
    if request.effort not in PLANS:
        raise UsageError(f"unknown effort {request.effort!r}", where="--effort", hint=f"choose from {', '.join(PLANS)}")
    timings: dict[str, float] = {}
    tell = progress or (lambda *_: None)
    with _timed("spec", timings, tell):
        spec = load_spec(request.mesh, request.prices)
        tactics = parse_tactics(request.tactics, request.strategy)
        stages = None if request.pipeline is None else parse_stages(request.pipeline)
        stages = None if stages is None else replace(stages, written=request.stages_written)
        saved = read_plan(request.plan) if request.plan is not None else None
        goal = parse_goal(request.minimise, request.subject_to)
        names_axes = bool(
            request.pins or request.keep_shardings or request.pipeline or saved or goal.axes or tactics.axes
        )
        meshes = choose_meshes(spec, request, saved, names_axes=names_axes)
        tactics.check_axes([mesh.names for mesh in meshes])
        meshes = [mesh for mesh in meshes if tactics.suit(mesh.names)]
        needed = _needed_in_stages(request, tactics, saved)
        if stages is not None:
            check_request(stages, meshes, needed)
        goal.check_axes(name for mesh in meshes for name in mesh.names)
        judge = _Judge(spec, request, on_answer)
    with _timed("load", timings, tell):
        content = content_of(request.program, request.dims, request.content) if source is None else b""
        original = source or load(
            request.program,
            keep_shardings=request.keep_shardings,
            content=content,
            kernels=request.kernels,
            runs=request.runs,
            dims=request.dims,
        )
        own_shardings = begin(original, spec, meshes if annotated else (), content)
        named = with_dimension_names(original.program, request.names)
        original = replace(original, program=named)
    with _timed("analyse", timings, tell):
        variants = variants_of(original, request, saved)
        for mesh in meshes:  # rewritten programs are analysed when the search comes to them
            analyse(variants[0](mesh).program)
    with _timed("search", timings, tell):
        start = None if neighbour is None else saved_plan(neighbour.problem, neighbour.result.plan)
        space = SearchSpace(request, meshes, tactics, saved, start=start)
        candidates = Candidates(variants, space, tell)
        best, others = candidates.best(judge.decides)
        free = request.strategy is None and (saved is None or request.complete)
        if free and not request.minimise:  # a known strategy is preferred to a plan that is hardly faster
            best = best.preferred()
        plans = best_plans(best.evaluator, best.result, request.confirm)
    confirmation = None
    if judge.is_asked(best):
        with _timed("confirm", timings, tell):
            best, confirmation = judge(best, plans, others)
            for _ in range(ATTEMPTS if candidates.rewrites else 0):
                # Another is tried if the compiler refuses this one, or gives no answer and it may not fit.
                refused = confirmation.chosen is None and (confirmation.rejected or not best.surely_fits)
                if not refused or best.result.stopped == "interrupted":
                    break
                lighter = candidates.lighter_than(best)
                if lighter.evaluator is best.evaluator:  # there is none
                    best = lighter
                    break
                best, confirmation = judge(lighter, [lighter.result.plan], [])
    source, evaluator, result = best.source, best.evaluator, best.result
    with _timed("report", timings, tell):
        algorithm = "mcts" if request.strategy is None else "strategy"
        algorithm = algorithm if saved is None or request.complete else "plan"
        report = build_report(source, evaluator, result, algorithm, request.seed, best.strategies)
        report = replace(report, plan=replace(report.plan, tactics=[tactic.text for tactic in tactics.requests]))
        if confirmation is not None:
            report = with_confirmation(report, evaluator.problem, confirmation)
        problem, _, cost = result.fastest or (evaluator.problem, (), result.cost)
        noted = problem if cost.step_seconds < result.cost.step_seconds else None  # by the note on what is passed over
        searched = [(variant.evaluator.problem, variant.result) for variant in best.elsewhere]
        report = with_mesh_choice(report, [(other.mesh, result) for other, result in searched if other is not noted])
        own = own_shardings()
        report = with_row(report, own, evaluator.problem.mesh)
        staged: StagePlan | None = None
        facts = report.predicted
        may_pay = not facts.fits or facts.step_seconds - facts.compute_seconds > (NEAR - 1) * facts.step_seconds
        if stages is not None or (annotated and free and not request.minimise and may_pay):
            stage_source = original if source.program.microbatches > 1 else source
            label = request.strategy or ("" if free else f"the plan of {request.plan}")
            inside = StageOptions(request.pins, space.stated, label, needed)
            staged = best_stages(stage_source, evaluator.problem.mesh, stages, inside)
        report = with_pipeline(report, None if staged is None else staged.priced, stages is not None)
    return Outcome(
        replace(report, timings=timings),
        source,
        evaluator,
        result,
        best.strategies,
        None if source is original else original,
        own,
        staged,
    )


def _needed_in_stages(request: Request, tactics: TacticRequests, saved: SavedPlan | None) -> dict[str, str]:
    """Mesh axis that stages cannot take -> the pin that names it, or the tactic or saved plan that has no other."""
    needed = {name: f"--pin {pin!r}" for pin in request.pins for axes in parse_pin(pin)[1] for name in axes or ()}
    needed |= {ask.axes[0]: f"{ask.option} {ask.text}" for ask in tactics.requests if ask.axes and len(ask.axes) == 1}
    axes = {decision.axis for decision in saved.decisions} if saved else set()
    return {**needed, **{name: f"--plan {request.plan}" for name in axes if len(axes) == 1}}


class _Judge:
    """The compiler that judges plans (`Request.confirm`). Raises `ToastError` if the user requires one that is not
    here."""

    def __init__(self, spec: Spec, request: Request, tell: Tell | None) -> None:
        self._spec, self._request, self._tell = spec, request, tell
        self._compiler = None if request.confirm <= 0 else self._chips_own()

    def __call__(self, variant: Variant, plans: list[Plan], others: list[Variant]) -> tuple[Variant, Confirmation]:
        """The variant with the plan that the compiler finds best. See `ask_compiler.judged`."""
        from toast_cli.candidates.ask_compiler import judged  # heavy, as below

        assert self._compiler is not None
        return judged(variant, plans, others, self._compiler, self._request, self._tell)

    def is_asked(self, variant: Variant) -> bool:
        """True if the compiler judges this variant: always, or with `--confirm auto` if the predicted peak is too close
        to the limit."""
        if self._request.confirm == AUTO:
            limit = variant.evaluator.problem.mesh.limit_bytes
            if variant.surely_fits or variant.result.cost.peak_bytes > _HOPELESS * limit:
                return False
            self._compiler = self._chips_own()
        return self._compiler is not None

    def decides(self, variant: Variant) -> bool:
        """True if the compiler says whether the plan fits, whose predicted peak is near the limit."""
        near = variant.result.cost.peak_bytes <= variant.allowed_bytes * (1.0 + variant.peak_error)
        return near and self._request.confirm_with != CompilerName.cpu and self.is_asked(variant)

    def _chips_own(self) -> Callable[[Mesh], Compiler] | None:
        from toast_cli.candidates.ask_compiler import compiler_for

        try:
            return compiler_for(self._spec, self._request.confirm_with)
        except ToastError:
            if self._request.confirm != AUTO:
                raise
            return None


def choose_meshes(
    spec: Spec, request: Request, saved: SavedPlan | None = None, *, names_axes: bool = True
) -> list[Mesh]:
    """The mesh that the user asks for with `--mesh-shape` or in a file. Without a request, that of a saved plan, the
    named machine's, or every sensible shape.

    Args:
        names_axes: whether the user names mesh axes; if not, a named machine is also taken as one axis.
    """
    if request.mesh_shape not in (None, "auto"):
        return [spec.mesh(parse_shape(request.mesh_shape or ""), request.memory_limit)]
    free = request.mesh_shape is None and (spec.named or not spec.axes)
    if free and saved is not None and prod(saved.axes.values()) == spec.devices:
        return [spec.mesh(saved.axes, request.memory_limit)]
    shapes: list[dict[str, int] | None] = list(spec.mesh_shapes())
    if request.mesh_shape is None and spec.axes:
        shapes = [None] if names_axes or not spec.named or len(spec.axes) == 1 else [None, *shapes[:1]]
    return [spec.mesh(shape, request.memory_limit) for shape in shapes]


def problem_of(
    program: str,
    mesh: str,
    mesh_shape: str | None = None,
    pins: tuple[str, ...] = (),
    dims: Sequence[str] = (),
) -> Problem:
    """A program on one mesh, analysed but not searched. The mesh is the requested shape, or the specification's (first)
    shape. dims: sizes of symbolic dimensions."""
    with without_cycle_collection():
        chosen = choose_meshes(load_spec(mesh), Request(program, mesh, mesh_shape))[0]
        source = load(program, content=content_of(program, dims), dims=dims)
        stated = program_pins(source, chosen.names, chosen.sizes)
        return make_problem(source.program, analyse(source.program), chosen, pins, stated)


@contextmanager
def _timed(stage: str, timings: dict[str, float], tell: Progress) -> Iterator[None]:
    start = time.monotonic()
    tell(stage, 0.0, inf, 0, 0.0)
    yield
    timings[stage] = time.monotonic() - start
