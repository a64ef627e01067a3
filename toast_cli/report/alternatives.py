"""The best plans that differ from the chosen one: `Alternative` values go in; facts for the JSON report, and a table
for the terminal, come out.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from toast_cli.alternatives import Alternative, compared, name_of
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.explain.words import summary
from toast_cli.plan.decisions import Plan
from toast_cli.plan.problem import Problem
from toast_cli.quantities import format_bytes, format_percent, format_ratio, format_seconds
from toast_cli.report import style
from toast_cli.report.comparison import listed, short
from toast_cli.report.model import AlternativeFacts, Report


def alternative_facts(evaluator: Evaluator, taken: Plan, plans: Sequence[Plan]) -> list[AlternativeFacts]:
    """The facts of all plans but the chosen one; `plans`: the search's result, the best first."""
    problem = evaluator.problem
    own = [short(problem, decision) for decision in taken]
    return [
        _facts(problem, own, name_of(place), compared(evaluator, taken, plan))
        for place, plan in enumerate(plans)
        if plan != taken
    ]


def _facts(problem: Problem, own: Sequence[str], name: str, one: Alternative) -> AlternativeFacts:
    cost, decisions = one.cost, [short(problem, decision) for decision in one.plan]
    return AlternativeFacts(
        name,
        cost.step_seconds,
        cost.compute_seconds,
        cost.communication_seconds,
        round(cost.peak_bytes),
        cost.peak_bytes <= problem.mesh.limit_bytes,
        one.differs,
        summary(problem, one.plan),
        decisions,
        [text for text in decisions if text not in own],
        [text for text in own if text not in decisions],
    )


def alternatives(report: Report) -> RenderableType | None:
    """The table of other plans, with the decisions that differ; None if none were requested or found."""
    if not report.alternatives:
        return None
    axes = list(report.mesh.axes)
    heads = [("", "left"), ("step time", "right"), ("", "right"), ("peak memory", "right"), ("differs", "right")]
    rows = style.table([*heads, ("decisions that differ", "fold")])
    for one in report.alternatives:
        ratio = one.step_seconds / report.predicted.step_seconds if report.predicted.step_seconds else 1.0
        peak = Text(format_bytes(one.peak_bytes), "" if one.fits else style.BAD)
        words = Text()
        for sign, decisions in (("+ ", one.adds), ("- ", one.lacks)):
            if decisions:
                words.append("\n" if words else "").append(sign).append_text(listed(decisions, axes))
        if not words:
            words.append("the order of decisions")
        figures = (format_seconds(one.step_seconds), format_ratio(ratio), peak, format_percent(one.differs))
        rows.add_row(one.name, *figures, words)
    footnote = Text(
        "differs: share of the step spent on kernels and collectives that only one of the two has", style.LABEL
    )
    return style.section("other plans", rows, footnote)
