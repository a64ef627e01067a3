"""Pairs of tactics that a report compares with where the strategies it lists are far slower than the plan."""

from __future__ import annotations

import jax
import pytest
from programs import arg, case_of, round_mesh

from toast_cli.dimensions import analyse
from toast_cli.plan.problem import Problem, make_problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.report.build import PRODUCTS, _baselines
from toast_cli.tactics import priced_strategies, strategy
from toast_cli.tactics.strategies import BASELINES, PAIRS


def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
    for _ in range(3):
        x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return x


@pytest.fixture(scope="module")
def problem() -> Problem:
    """Two large images for sixteen devices: only the smaller axis can take the batch, and the images the larger."""
    program = case_of(convolve, arg(2, 512, 512, 64), arg(3, 3, 64, 64)).program
    return make_problem(program, analyse(program), round_mesh(2**40, data=8, model=2))


def test_pairs_are_plans_that_can_be_asked_for(problem: Problem) -> None:
    found = priced_strategies(Evaluator(problem), PAIRS)[0]
    assert found["data-parallel x spatial"].axes == "data-parallel:model + spatial:data"  # no other assignment applies
    assert strategy(problem, "data-parallel:model+spatial:data") == found["data-parallel x spatial"].plan
    assert len({one.plan for one in found.values()}) == len(found)


def test_a_report_compares_with_the_best_of_them(problem: Problem) -> None:
    evaluator = Evaluator(problem)
    listed = {"unsharded", *priced_strategies(evaluator, BASELINES)[0]}
    expert = "data-parallel x spatial"
    seconds = priced_strategies(evaluator, PAIRS)[0][expert].cost.step_seconds
    beside = _baselines(evaluator, seconds, {})
    added = beside.keys() - listed
    assert expert in added
    assert len(added) <= PRODUCTS
    known = min(beside[name].cost.step_seconds for name in listed)
    assert known > 2 * seconds
    assert all(beside[name].cost.step_seconds < known for name in added)
    assert _baselines(evaluator, known, {}).keys() == listed  # a strategy that is as fast says enough
