"""`Comparison`: every known strategy that applies, and the search's result; as facts (JSON schema "toast.compare/1",
field names are stable) and tables. Also what the compiler says of plans, and the row of the
program's own shardings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from toast_cli.hardware import Mesh, written_shape
from toast_cli.plan.axis_assignment import AxisAssigners
from toast_cli.plan.decisions import Plan
from toast_cli.plan.problem import Problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.memory_fit import NO, YES, fit_of
from toast_cli.price.pipelines import PricedPipeline
from toast_cli.program.quantities import (
    format_bytes,
    format_percent,
    format_plural,
    format_price,
    format_ratio,
    format_seconds,
)
from toast_cli.report import style
from toast_cli.report.build import SECONDS_PER_HOUR, baseline_facts, goal_facts, other_shape
from toast_cli.report.model import (
    ConfirmationFacts,
    ConfirmedPlanFacts,
    MeshFacts,
    ProgramFacts,
    Report,
    strategy_label,
)
from toast_cli.report.words import joined_decisions, short_text, summary
from toast_cli.search.alternatives import name_of
from toast_cli.search.incumbent import Objective, SearchResult
from toast_cli.tactics import PricedStrategy, priced_strategies, priced_strategy
from toast_cli.tactics.strategies import MARGIN, STRATEGIES, better

if TYPE_CHECKING:
    from toast_cli.ask_xla.annotated import AsAnnotated
    from toast_cli.ask_xla.confirm import Confirmation, ConfirmedRow


SCHEMA = "toast.compare/1"
SEARCH, UNSHARDED, STRATEGY = "search", "unsharded", "strategy"  # kinds of contenders, and names of the first two
ANNOTATED, PIPELINE = "annotated", "pipeline"  # likewise: the program's own shardings, and stages; no plan states them

# Times the plan's step up to which the report mentions a pipeline that the user does not ask for.
NEAR = 1.1


@dataclass(frozen=True)
class Contender:
    """One plan. Bytes per device, seconds a step.

    Attributes:
        kind: "search", "strategy", "unsharded", "annotated" (the program's own shardings) or "pipeline". met: fits, and
            keeps the requested bounds.
        adds, lacks: decisions ("batch over data") that the search's plan does not have, or has beyond this one.
        axes: a strategy with its mesh axes, as `--strategy` takes it, if others than the mesh's order suit it better.
            mesh: the shape of the mesh if it is not the search's.
        front: no other plan is better in both step time and memory. best: the best that is met, by the minimised
            figure; by the compiler's figures if it was used.
        compiled: the compiler's figures; None without a compiler. plan: the plan itself, not part of any output.
    """

    name: str
    kind: str
    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    peak_bytes: int
    argument_bytes: int
    fits: bool
    met: bool
    summary: str
    decisions: list[str]
    adds: list[str]
    lacks: list[str]
    axes: str = ""
    mesh: dict[str, int] = field(default_factory=dict)
    front: bool = False
    best: bool = False
    compiled: ConfirmedPlanFacts | None = None
    plan: Plan = field(default=(), repr=False)

    @property
    def label(self) -> str:
        """The name in tables."""
        return strategy_label(self.name, self.axes, self.mesh)


@dataclass(frozen=True)
class Comparison:
    """The search's plan beside the known strategies. contenders: the search's plan first, then those that fit, the
    fastest first, then the others. not_applicable: strategy -> the reason."""

    program: ProgramFacts
    mesh: MeshFacts
    limit_bytes: int
    minimised: list[str]
    contenders: list[Contender]
    not_applicable: dict[str, str] = field(default_factory=dict)
    compiler: str = ""  # the one that was asked
    peak_error: float = 0.0  # see `PredictedFacts`
    schema: str = SCHEMA

    def step_price(self, contender: Contender) -> float:
        """Price of a step of a contender; 0 if the price of a chip is unknown."""
        return self.mesh.hour_price * contender.step_seconds / SECONDS_PER_HOUR

    @property
    def best(self) -> Contender | None:
        return next((contender for contender in self.contenders if contender.best), None)

    def to_json(self) -> dict[str, Any]:
        facts = asdict(self)
        for row, contender in zip(facts["contenders"], self.contenders, strict=True):
            del row["plan"]
            row["step_price"] = self.step_price(contender)
        return {"schema": facts.pop("schema"), **facts}


def compare(
    evaluator: Evaluator,
    report: Report,
    plans: Sequence[Plan],
    more: Iterable[str] = (),
    elsewhere: Mapping[str, PricedStrategy] | None = None,
) -> Comparison:
    """Tabulates the search's plans (the best first), all strategies that apply, and `more` named ones, which must
    apply. elsewhere: strategies by name on the mesh shapes tried."""
    problem = evaluator.problem
    named, reasons = priced_strategies(evaluator)
    named = better(named, {name: priced for name, priced in (elsewhere or {}).items() if name in STRATEGIES})
    for name in more:
        named[name] = priced_strategy(evaluator, name)
    reasons = {name: why for name, why in reasons.items() if name not in named}

    def here(name: str, plan: Plan) -> PricedStrategy:
        return PricedStrategy(name, "", plan, evaluator.exact_cost(plan), problem.mesh)

    searched = [(SEARCH, here(name_of(place), plan)) for place, plan in enumerate(plans)]
    listed = [*searched, (UNSHARDED, here(UNSHARDED, ())), *((STRATEGY, priced) for priced in named.values())]
    objective = Objective(problem, evaluator.cost(problem.fixed))
    own = [short_text(problem, d) for d in plans[0]]
    rows = [_contender(evaluator, kind, priced, own, objective.met(priced.cost)) for kind, priced in listed]
    costs = {priced.name: priced.cost for _, priced in listed}
    best = min(
        (row for row in rows if row.met), key=lambda row: objective.rank(row.plan, costs[row.name]), default=None
    )
    rows = ranked([replace(row, best=row is best) for row in rows])
    goal = [str(figure) for figure in problem.goal.minimise]
    error = report.predicted.peak_error
    return Comparison(report.program, report.mesh, problem.mesh.limit_bytes, goal, rows, reasons, peak_error=error)


def ranked(rows: list[Contender]) -> list[Contender]:
    """The search's plan first, then those that fit, the fastest first; with the Pareto front marked."""
    pairs = [(row.step_seconds, row.peak_bytes) for row in rows]
    rows = [replace(row, front=on_front(pair, pairs)) for row, pair in zip(rows, pairs, strict=True)]
    return [rows[0], *sorted(rows[1:], key=lambda row: (not row.met, not row.fits, row.step_seconds))]


def with_compiled(evaluator: Evaluator, comparison: Comparison, confirmation: Confirmation) -> Comparison:
    """The comparison with the compiler's figures of the contenders, and the best by these."""
    from toast_cli.ask_xla.confirm import compiled_cost

    facts = {
        name: replace(of, name=name)
        for row, of in zip(confirmation.rows, confirmation_facts(confirmation).plans, strict=True)
        for name in (row.candidate.name, *row.also)
    }
    rows = [replace(contender, compiled=facts.get(contender.name)) for contender in comparison.contenders]
    if confirmation.row is not None:
        objective = Objective(evaluator.problem, evaluator.cost(evaluator.problem.fixed))
        met = objective.met(compiled_cost(confirmation.row))
        names = (confirmation.row.candidate.name, *confirmation.row.also)
        best = next((contender.name for contender in rows if contender.name in names), "")
        rows = [replace(row, best=row.name == best, met=met if row.name == best else row.met) for row in rows]
    elif confirmation.rejected:
        rows = [replace(contender, best=False) for contender in rows]
    return replace(comparison, contenders=rows, compiler=confirmation.compiler)


def _contender(evaluator: Evaluator, kind: str, priced: PricedStrategy, own: list[str], met: bool) -> Contender:
    problem, cost = evaluator.problem, priced.cost
    shape = other_shape(priced.mesh, problem.mesh)
    if shape:
        problem = replace(problem, mesh=priced.mesh, axis_assigners=AxisAssigners())
    decisions = [short_text(problem, d) for d in priced.plan]
    return Contender(
        priced.name, kind, cost.step_seconds, cost.compute_seconds, cost.communication_seconds, round(cost.peak_bytes),
        round(cost.argument_bytes), priced.fits, met, summary(problem, priced.plan), decisions,
        [d for d in decisions if d not in own], [d for d in own if d not in decisions], priced.axes, shape,
        plan=priced.plan,
    )  # fmt: skip


def on_front(figures: tuple[float, float], others: Iterable[tuple[float, float]]) -> bool:
    """True if none of the others is as good in both figures and better in one; less is better."""
    return not any(a <= figures[0] and b <= figures[1] and (a, b) != figures for a, b in others)


def comparison_blocks(comparison: Comparison, width: int, verbose: bool) -> list[RenderableType]:
    """Figures, then the decisions that differ, then with --verbose the strategies that do not apply."""
    blocks = [figures(comparison, width), Text(), decisions(comparison)]
    if verbose and comparison.not_applicable:
        rows = style.table([("", "left"), ("", "fold")])
        for name, why in comparison.not_applicable.items():
            rows.add_row(name, Text(why, style.LABEL))
        blocks += [Text(), style.section("strategies that do not apply", rows)]
    return blocks


def comparison_line(comparison: Comparison) -> str:
    """The best, on one line."""
    best, search = comparison.best, comparison.contenders[0]
    head = f"{comparison.program.title} on {comparison.mesh.name}: "
    if best is None:
        return (
            f"{head}NOTHING FITS, the search's plan needs {format_bytes(search.peak_bytes)} of "
            f"{format_bytes(comparison.limit_bytes)}"
        )
    experts = [contender for contender in comparison.contenders if contender.kind == "strategy" and contender.met]
    beside = f"; best strategy {experts[0].label} {format_seconds(experts[0].step_seconds)}" if experts else ""
    return f"{head}{best.label} {format_seconds(best.step_seconds)} a step, {format_bytes(best.peak_bytes)}{beside}"


def figures(comparison: Comparison, width: int) -> RenderableType:
    """The table of all plans: a row each."""
    compiled = [("compiled step", "right"), ("and peak", "right")] if comparison.compiler else []
    priced = [("price a step", "right")] if comparison.mesh.hour_price else []
    columns = [
        ("", "left"), ("plan", "name"), ("step time", "right"), ("", "right"), *priced,
        ("compute", "right"), ("communication", "right"), ("peak memory", "right"), *compiled, ("", "left"),
    ]  # fmt: skip
    reference = comparison.contenders[0].step_seconds or 1.0
    cells = [
        [
            Text("★" if contender.best else "", style.GOOD),
            Text(contender.label, style.TITLE if contender.name == SEARCH else ""),
            format_seconds(contender.step_seconds),
            format_ratio(contender.step_seconds / reference),
            *([format_price(comparison.step_price(contender))] if priced else []),
            format_seconds(contender.compute_seconds),
            format_seconds(contender.communication_seconds),
            format_bytes(contender.peak_bytes),
            *(_compiled_texts(contender) if compiled else ()),
            _verdict(contender, comparison),
        ]
        for contender in comparison.contenders
    ]
    rows = style.fitted(columns, cells, width, spare=((4 + len(priced), 5 + len(priced)), (3,)))
    by = f" compiled with {comparison.compiler}" if comparison.compiler else ""
    shown = f"{format_bytes(comparison.limit_bytes)} usable per device"
    title = f"{comparison.program.title} on {comparison.mesh.name}, {style.shape(comparison.mesh.axes)}, {shown}"
    best = f"★ best by {', then '.join(comparison.minimised)}{by}"
    words = f"{best}; on the front: no other plan is better in both time and memory"
    return style.section(title, rows, Text(words, style.LABEL))


def _compiled_texts(contender: Contender) -> tuple[str, str]:
    """Compiled step time and peak memory, or the reason why there are none."""
    facts = contender.compiled
    if facts is None or facts.step_seconds is None or facts.peak_bytes is None:
        return (facts.outcome if facts is not None else "", "")
    return format_seconds(facts.step_seconds), format_bytes(facts.peak_bytes)


def _verdict(contender: Contender, comparison: Comparison) -> Text:
    fit = fit_of(contender.peak_bytes, comparison.limit_bytes, comparison.peak_error)
    if contender.compiled is not None and contender.compiled.fits is not None:
        fit = YES if contender.compiled.fits else NO
    if fit == NO:
        return style.fit_text(fit)
    verdict = style.fit_text(fit) if contender.met else Text("breaks a bound", style.WARNING)
    return verdict.append(", on the front", "") if contender.front else verdict


def decisions(comparison: Comparison) -> RenderableType:
    """The decisions in which strategies differ from the search's plan."""

    def text(decisions: list[str]) -> Text:
        return style.with_axes(joined_decisions(decisions) or "nothing", list(comparison.mesh.axes))

    search, *others = comparison.contenders
    rows: list[tuple[str | Text, str, Text]] = [(Text(SEARCH, style.TITLE), "decides", text(search.decisions))]
    for contender in others:
        if contender.kind in (UNSHARDED, ANNOTATED, PIPELINE):
            continue
        changes = [("adds", contender.adds), ("lacks", contender.lacks)]
        differ = [(word, text(decisions)) for word, decisions in changes if decisions]
        label = contender.label
        for word, decided in differ or [("", Text("decides the same"))]:
            rows.append((label, word, decided))
            label = ""
    return style.section(
        "decisions that a strategy has and the search's plan has not (adds), and the other way round (lacks)",
        style.table([("", "fold"), ("", "left"), ("", "fold")], rows),
    )


# ---------------------------------------------------------------- the compiler's figures
# Compares predicted and compiled figures: a `Confirmation` goes in; facts for the JSON report, and a table for the
# terminal, come out.


def with_confirmation(report: Report, problem: Problem, confirmation: Confirmation) -> Report:
    """The report with the compiler's figures."""
    from toast_cli.ask_xla.confirm import compiled_cost  # heavy, and rarely needed

    report = replace(report, confirmation=confirmation_facts(confirmation))
    if confirmation.row is None:
        return report
    # A goal's bounds are checked against the compiler's figures.
    return replace(report, goal=goal_facts(problem, compiled_cost(confirmation.row)))


def confirmation_facts(confirmation: Confirmation) -> ConfirmationFacts:
    """The facts of a confirmation, without the plans themselves."""
    chosen = None if confirmation.chosen is None else confirmation.rows[confirmation.chosen].candidate.name
    return ConfirmationFacts(
        confirmation.compiler,
        chosen,
        [_row(row, confirmation.limit_bytes) for row in confirmation.rows],
        confirmation.seconds,
        confirmation.rejected,
    )


def confirmation_line(row: ConfirmedRow) -> str:
    """`fsdp: 8.3 ms a step, 1.2 GiB (predicted 9.1 ms, 1.3 GiB), compiled in 14 s`."""
    cost, compiled = row.candidate.cost, row.compiled
    predicted = f"predicted {format_seconds(cost.step_seconds)}, {format_bytes(cost.peak_bytes)}"
    if compiled is None:
        return f"{row.candidate.name}: {row.why} ({predicted})"
    how = "known from before" if compiled.cached else f"{format_seconds(compiled.compile_seconds)} to compile"
    if compiled.outcome != "compiled":
        return f"{row.candidate.name}: {compiled.outcome} ({predicted}), {how}"
    peak = format_bytes(row.peak_bytes)
    return f"{row.candidate.name}: {format_seconds(row.step_seconds)} a step, {peak} ({predicted}), {how}"


def _row(row: ConfirmedRow, limit_bytes: int) -> ConfirmedPlanFacts:
    cost, compiled = row.candidate.cost, row.compiled
    is_compiled = compiled is not None and compiled.outcome == "compiled"
    peak_bytes = compiled.peak_bytes if compiled is not None and is_compiled else None
    return ConfirmedPlanFacts(
        row.candidate.name,
        cost.step_seconds,
        round(cost.peak_bytes),
        compiled.outcome if compiled else "not compiled",
        (compiled.reason if compiled else row.why).strip(),
        row.step_seconds if is_compiled else None,
        row.compute_seconds if is_compiled else None,
        row.exposed_seconds if is_compiled else None,
        peak_bytes,
        None if peak_bytes is None else peak_bytes <= limit_bytes,
        compiled.compile_seconds if compiled else 0.0,
        compiled.cached if compiled else False,
    )


def confirmation(report: Report) -> RenderableType | None:
    """The table of compiled plans, the chosen one first and marked; None if none were compiled."""
    facts = report.confirmation
    if facts is None:
        return None
    figures = [(head, "right") for head in ("predicted", "compiled", "predicted peak", "compiled peak")]
    table = style.table([("", "fold"), *figures, ("", "fold")])
    for row in facts.plans:
        is_chosen = row.name == facts.chosen
        words = row.reason if row.outcome == "not compiled" else row.outcome
        if row.outcome == "compiled":
            words = "does not fit" if row.fits is False else ""
        table.add_row(
            Text(row.name, style.TITLE if is_chosen else ""),
            format_seconds(row.predicted_step_seconds),
            "" if row.step_seconds is None else format_seconds(row.step_seconds),
            format_bytes(row.predicted_peak_bytes),
            "" if row.peak_bytes is None else format_bytes(row.peak_bytes),
            Text("taken" if is_chosen else words, style="bold green" if is_chosen else "dim"),
        )
    return style.section(f"confirmed with {facts.compiler}", table)


# ---------------------------------------------------------------- the program's own shardings
# The row "as annotated" of a report and of a comparison.

AS_ANNOTATED = "as annotated"


def with_row(report: Report, annotated: AsAnnotated | str | None, mesh: Mesh) -> Report:
    """The report with the program's own shardings as first baseline, or with a note why they could not be priced."""
    if annotated is None:
        return report
    if isinstance(annotated, str):
        return _noted(report, f"the program's own shardings are not priced: XLA's partitioner says: {annotated}")
    facts = baseline_facts(annotated.cost, mesh.limit_bytes, shape=other_shape(annotated.mesh, mesh))
    if count := len(annotated.rematerialised):
        report = _noted(
            report,
            f"as annotated, XLA gathers {format_plural(count, 'array')} whole because it finds no other way "
            "(involuntary rematerialisation): see toast explain --as-annotated",
        )
    return replace(report, baselines={AS_ANNOTATED: facts, **report.baselines})


def with_mesh_choice(report: Report, elsewhere: Iterable[tuple[Mesh, SearchResult]]) -> Report:
    """The report with a note that toast chose the mesh shape, and the fastest plan found for another one.

    Args:
        elsewhere: the other mesh shapes searched, with the search's result on each.
    """
    fitting = [(result.cost.step_seconds, mesh) for mesh, result in elsewhere if result.fits]
    if not fitting:
        return report
    step_seconds, mesh = min(fitting, key=lambda entry: entry[0])
    simpler = f"; this one is simpler, and within {MARGIN:.0%}" if step_seconds < report.predicted.step_seconds else ""
    best = f"with --mesh-shape {written_shape(mesh.shape)} the best plan found takes {format_seconds(step_seconds)}"
    return _noted(report, f"toast chose the mesh shape: {best}{simpler}")


def _noted(report: Report, note: str) -> Report:
    return replace(report, analysis=replace(report.analysis, notes=[note, *report.analysis.notes]))


def with_contender(
    comparison: Comparison, annotated: AsAnnotated | str | None, pipeline: PricedPipeline | None, evaluator: Evaluator
) -> Comparison:
    """The comparison with the program's own shardings and a pipeline among the contenders; they are never marked as
    best, which is for plans."""
    mesh = evaluator.problem.mesh
    objective = Objective(evaluator.problem, evaluator.cost(evaluator.problem.fixed))
    rows = []
    if annotated is not None and not isinstance(annotated, str):
        own = PricedStrategy(AS_ANNOTATED, "", (), annotated.cost, annotated.mesh)
        rows.append((ANNOTATED, own, "the program's own shardings"))
    if pipeline is not None:
        rows.append((PIPELINE, PricedStrategy(PIPELINE, pipeline.row_label, (), pipeline.cost, mesh), pipeline.label))
    contenders = [
        replace(_contender(evaluator, kind, priced, [], objective.met(priced.cost)), summary=words)
        for kind, priced, words in rows
    ]
    return replace(comparison, contenders=ranked([*comparison.contenders, *contenders]))


def with_pipeline(report: Report, priced: PricedPipeline | None, asked: bool) -> Report:
    """The report with a pipeline as baseline, and a line about it: if the user asks for it, if it is at most `NEAR`
    times as slow as the plan, or if it fits where the plan does not."""
    if priced is None:
        return report
    plan, cost = report.predicted, priced.cost
    if cost.peak_bytes > plan.limit_bytes:
        verdict = "does not fit"
    elif not plan.fits:
        verdict = "fits, without one the program does not"
    else:
        near = cost.step_seconds <= NEAR * plan.step_seconds
        verdict = "is faster" if cost.step_seconds < plan.step_seconds else "comes near" if near else "is slower"
    if not asked and verdict in ("does not fit", "is slower"):
        return report
    facts = baseline_facts(cost, plan.limit_bytes, priced.row_label)
    spmd = "" if priced.spmd_seconds is None else f"; as one SPMD program {format_seconds(priced.spmd_seconds)}"
    idle = format_percent(priced.idle_seconds / cost.step_seconds)
    note = (
        f"a pipeline {verdict}: {priced.label}: {format_seconds(cost.step_seconds)} against "
        f"{format_seconds(plan.step_seconds)}, {idle} of it idle{spmd}"
    )
    return _noted(replace(report, baselines={**report.baselines, PIPELINE: facts}), note)
