"""The row "as annotated" of a report and of a comparison."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.hardware import Mesh
from toast_cli.quantities import format_plural
from toast_cli.report.build import other_shape
from toast_cli.report.comparison import ANNOTATED, Comparison, Contender, ranked
from toast_cli.report.model import BaselineFacts, Report
from toast_cli.search.objective import Objective

if TYPE_CHECKING:
    from toast_cli.annotated.price import AsAnnotated

AS_ANNOTATED = "as annotated"


def with_row(report: Report, found: AsAnnotated | str | None, mesh: Mesh) -> Report:
    """The report with the program's own shardings as first baseline, or with a note why they could not be priced."""
    if found is None:
        return report
    if isinstance(found, str):
        return _noted(report, f"the program's own shardings are not priced: XLA's partitioner says: {found}")
    cost = found.cost
    facts = BaselineFacts(
        cost.step_seconds,
        round(cost.peak_bytes),
        cost.peak_bytes <= mesh.limit_bytes,
        cost.compute_seconds,
        cost.communication_seconds,
        mesh=other_shape(found.mesh, mesh),
    )
    if count := len(found.rematerialised):
        report = _noted(
            report,
            f"as annotated, XLA gathers {format_plural(count, 'array')} whole because it finds no other way "
            "(involuntary rematerialisation): see toast explain --as-annotated",
        )
    return replace(report, baselines={AS_ANNOTATED: facts, **report.baselines})


def _noted(report: Report, note: str) -> Report:
    return replace(report, analysis=replace(report.analysis, notes=[note, *report.analysis.notes]))


def with_contender(comparison: Comparison, found: AsAnnotated | str | None, evaluator: Evaluator) -> Comparison:
    """The comparison with the program's own shardings among the contenders; they are never marked as best, which is for
    plans."""
    if found is None or isinstance(found, str):
        return comparison
    cost, mesh = found.cost, evaluator.problem.mesh
    objective = Objective(evaluator.problem, evaluator.cost(evaluator.problem.fixed))
    row = Contender(
        AS_ANNOTATED, ANNOTATED, cost.step_seconds, cost.compute_seconds, cost.communication_seconds,
        round(cost.peak_bytes), round(cost.argument_bytes), cost.peak_bytes <= mesh.limit_bytes, objective.met(cost),
        "the program's own shardings", [], [], [], mesh=other_shape(found.mesh, mesh),
    )  # fmt: skip
    return replace(comparison, contenders=ranked([*comparison.contenders, row]))
