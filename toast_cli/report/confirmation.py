"""Compares predicted and compiled figures: a `Confirmation` goes in; facts for the JSON report, and a table for the
terminal, come out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from toast_cli.plan.problem import Problem
from toast_cli.quantities import format_bytes, format_seconds
from toast_cli.report import style
from toast_cli.report.build import goal_facts
from toast_cli.report.model import ConfirmationFacts, ConfirmedPlanFacts, Report

if TYPE_CHECKING:
    from toast_cli.confirm.model import Confirmation, ConfirmedRow


def with_confirmation(report: Report, problem: Problem, confirmation: Confirmation) -> Report:
    """The report with the compiler's figures."""
    from toast_cli.confirm.run import compiled_cost  # heavy, and rarely needed

    report = replace(report, confirmation=confirmation_facts(confirmation))
    if confirmation.row is None:
        return report
    # A goal's bounds are checked against the compiler's figures.
    return replace(report, goal=goal_facts(problem, compiled_cost(confirmation.row)))


def confirmation_facts(confirmation: Confirmation) -> ConfirmationFacts:
    """The facts of a confirmation, without the plans themselves."""
    corrections = confirmation.corrections
    chosen = None if confirmation.chosen is None else confirmation.rows[confirmation.chosen].candidate.name
    return ConfirmationFacts(
        confirmation.compiler,
        chosen,
        [_row(row, confirmation.limit_bytes) for row in confirmation.rows],
        confirmation.rounds,
        confirmation.seconds,
        {"compute": corrections.compute, "memory": corrections.memory, **corrections.collectives},
        confirmation.rejected,
    )


def one_line(row: ConfirmedRow) -> str:
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
    known = compiled is not None and compiled.outcome == "compiled"
    return ConfirmedPlanFacts(
        row.candidate.name,
        cost.step_seconds,
        round(cost.peak_bytes),
        compiled.outcome if compiled else "not compiled",
        (compiled.reason if compiled else row.why).strip(),
        row.step_seconds if known else None,
        row.compute_seconds if known else None,
        row.exposed_seconds if known else None,
        round(row.peak_bytes) if known else None,
        row.peak_bytes <= limit_bytes if known else None,
        compiled.compile_seconds if compiled else 0.0,
        compiled.cached if compiled else False,
    )


def confirmation(report: Report) -> RenderableType | None:
    """The table of compiled plans, the chosen one first and marked; None if none were compiled."""
    facts = report.confirmation
    if facts is None:
        return None
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for heading in ("", "predicted", "compiled", "predicted peak", "compiled peak", ""):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=heading != "")
    for row in facts.plans:
        taken = row.name == facts.chosen
        words = _outcome_words(row)
        table.add_row(
            Text(row.name, style="bold" if taken else ""),
            format_seconds(row.predicted_step_seconds),
            "" if row.step_seconds is None else format_seconds(row.step_seconds),
            format_bytes(row.predicted_peak_bytes),
            "" if row.peak_bytes is None else format_bytes(row.peak_bytes),
            Text("taken" if taken else words, style="bold green" if taken else "dim"),
        )
    return style.section(f"confirmed with {facts.compiler}", table)


def _outcome_words(row: ConfirmedPlanFacts) -> str:
    if row.outcome == "not compiled":
        return row.reason
    if row.outcome != "compiled":
        return row.outcome
    return "" if row.fits else "does not fit"
