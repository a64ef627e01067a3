"""Values that lie elsewhere than planned cost as much as in a problem where they are pinned there."""

from __future__ import annotations

from functools import cache

import pytest
from programs import SAMPLES

from toast_cli import pipeline
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.pipeline import Outcome, Request
from toast_cli.plan.lower import lower
from toast_cli.plan.patterns import make_problem
from toast_cli.plan.sharding import Sharding, replicated
from toast_cli.program.pins import Pins

SAME = 1e-9


@cache
def outcome(name: str) -> Outcome:
    (path,) = SAMPLES.glob(f"{name}.*")
    return pipeline.partition(Request(str(path), "v4-32", "data=4,model=4", strategy="fsdp:data"))


def pinned(found: Outcome, elsewhere: dict[int, Sharding]) -> tuple[float, float]:
    """Step seconds and peak bytes of the plan in a problem of its own, in which these values are pinned."""
    problem, plan = found.problem, found.result.plan
    names = problem.mesh.names
    pins = Pins(values={v: tuple(tuple(names[a] for a in axes) for axes in s) for v, s in elsewhere.items()})
    other = make_problem(problem.program, problem.dimensions, problem.mesh, (), pins, problem.workarounds)
    cost = Evaluator(other, [plan]).exact_cost(plan)
    return cost.step_seconds, cost.peak_bytes


def complete_values(found: Outcome) -> list[int]:
    """Values that some op makes whole, not partial, and that are split under the plan."""
    problem = found.problem
    lowered = lower(problem, found.result.plan)
    made = [v for op in problem.program.ops if op.operands and len(op.results) == 1 and op.loop < 0 for v in op.results]
    return [v for v in made if any(lowered.shardings[v]) and v not in lowered.partial and not problem.free[v]]


@pytest.mark.parametrize("name", ["mlp_tiny", "t2b_tiny"])
def test_it_is_priced_as_if_it_were_pinned(name: str) -> None:
    found = outcome(name)
    plan, evaluator = found.result.plan, found.evaluator
    before = evaluator.exact_cost(plan)
    values = complete_values(found)
    dearer = 0
    for value in values[:: max(1, len(values) // 3)]:
        elsewhere = {value: replicated(len(found.problem.program.values[value].shape))}
        cost = evaluator.cost_elsewhere(plan, elsewhere)
        seconds, peak = pinned(found, elsewhere)
        assert cost.step_seconds == pytest.approx(seconds, rel=SAME), value
        assert cost.peak_bytes == pytest.approx(peak, rel=SAME), value
        dearer += cost.step_seconds > before.step_seconds
    assert dearer


def test_what_lies_as_planned_costs_nothing() -> None:
    found = outcome("mlp_tiny")
    plan = found.result.plan
    lowered = lower(found.problem, plan)
    where = {v: lowered.shardings[v] for v in complete_values(found)}
    cost, before = found.evaluator.cost_elsewhere(plan, where), found.evaluator.exact_cost(plan)
    assert cost.step_seconds == pytest.approx(before.step_seconds, rel=SAME)
    assert cost.peak_bytes == pytest.approx(before.peak_bytes, rel=SAME)
