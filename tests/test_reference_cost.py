"""The evaluator, which remembers and works out differences, against a plain one that walks over everything for each
plan.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import cases, plans

from toast_cli.plan.decisions import Plan
from toast_cli.plan.loops import LOOP_EDGES, edges, held_over
from toast_cli.plan.problem import Problem
from toast_cli.price.buffers import Buffers
from toast_cli.price.items import make_items
from toast_cli.price.kernel_pricing import WorkPricer
from toast_cli.price.pricing import Pricer
from toast_cli.price.profile import CompilerProfile


def reference(problem: Problem, plan: Plan, profile: CompilerProfile) -> tuple[float, float, float, float]:
    """(compute seconds, communication seconds, peak bytes, argument bytes): every op and every tick looked at,
    nothing remembered.
    """
    items = make_items(problem, profile)
    pricer, working = Pricer(problem, items, {}), WorkPricer(problem, profile, {})
    holdings = Buffers(problem, items, pricer)
    lowered = {number: problem.op_sharding(number, plan) for number in range(len(problem.patterns))}
    lowered[LOOP_EDGES] = edges(problem.mesh.sizes, held_over(problem.roles, plan))
    compute = communication = arguments = 0.0
    for work in items.work:
        compute += working.seconds(work, lowered[work.pattern])
        communication += sum(use.seconds for use in pricer.work_collectives(work, lowered[work.pattern]))
    for read in items.neighbours:
        communication += sum(use.seconds for use in pricer.neighbour_collectives(read, lowered))
    for added in items.sums:
        communication += sum(use.seconds for use in pricer.sum_collectives(added, lowered))
    alive, brief = [0.0] * (items.lives.end + 2), [0.0] * (items.lives.end + 2)
    on_chip = holdings.on_chip
    for item in items.arrays:
        copies, made = pricer.copies(item, lowered), lowered[item.pattern].shardings[item.result]
        communication += sum(use.seconds for use in pricer.array_collectives(item, made, copies))
        for kind, size in holdings.held(item, lowered[item.pattern], copies):
            for value in item.values:
                for first, last in holdings.of_value(item, kind, value):
                    for step in range(first, last + 1):
                        alive[step] += size
                        if size <= on_chip.largest and holdings.is_brief(kind, value, (first, last)):
                            brief[step] += size
            if holdings.role(item, kind) == "argument":
                arguments += size * len(item.values)
    peak = max(a - min(b, on_chip.capacity) for a, b in zip(alive, brief, strict=True))
    return compute, communication, peak, arguments


@settings(max_examples=40)
@given(st.data())
def test_the_evaluator_agrees_with_a_plain_one(data: st.DataObject) -> None:
    case = data.draw(cases())
    for plan in data.draw(st.lists(plans(case.problem), min_size=1, max_size=4)):
        cost = case.evaluator.exact_cost(plan)
        found = (cost.compute_seconds, cost.communication_seconds, cost.peak_bytes, cost.argument_bytes)
        assert found == pytest.approx(reference(case.problem, plan, case.evaluator.profile), rel=1e-9, abs=1e-12)
