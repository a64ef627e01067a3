"""Meshes of three and more axes: products are scattered in two steps, and what one mesh can do its refinement can."""

from __future__ import annotations

from functools import cache

import pytest
from programs import SAMPLES

from toast_cli.dimensions import analyse
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.frontend import load
from toast_cli.hardware import load_spec
from toast_cli.plan.lower import lower
from toast_cli.plan.patterns import make_problem
from toast_cli.plan.problem import Problem
from toast_cli.plan.sharding import scattered_in
from toast_cli.program.model import Program
from toast_cli.tactics import strategy


@cache
def program() -> Program:
    return load(str(SAMPLES / "mlp_tiny.mlir")).program


def problem_on(**shape: int) -> Problem:
    return make_problem(program(), analyse(program()), load_spec("v5e-16").mesh(shape))


@pytest.mark.parametrize(
    ("axes", "steps"),
    [
        ([], []),
        ([3], [(3,)]),
        ([1, 0], [(1,), (0,)]),
        ([0, 1, 2], [(0, 1), (2,)]),
        ([0, 1, 2, 3], [(0, 1), (2, 3)]),
    ],
)
def test_products_are_scattered_in_two_steps(axes: list[int], steps: list[tuple[int, ...]]) -> None:
    assert scattered_in(axes) == steps


def test_what_is_written_is_what_is_priced() -> None:
    """Each reduce-scatter of a gradient is one step of the path along which its constraints lie."""
    problem = problem_on(a=2, b=2, c=2, d=2)
    plan = strategy(problem, "fsdp")
    lowered = lower(problem, plan)
    ops, made_by = problem.program.ops, problem.program.producer
    products = {value for value in lowered.computed if ops[made_by[value]].kind.matrix_unit}
    hops = [one for one in lowered.collectives if one.kind == "reduce-scatter" and one.value in products]
    assert {one.axes for one in hops} == {(0, 1), (2, 3)}
    for one in hops:
        path = lowered.path(one.value)
        assert one.after in path
        assert len(path) == 2
    uses = Evaluator(problem).collectives(plan)
    used = {use.axes for use in uses if use.written[0] == "reduce-scatter" and use.value in products}
    assert used == {(0, 1), (2, 3)}


@pytest.mark.parametrize("name", ["fsdp", "zero2", "data-parallel"])
def test_a_strategy_over_all_of_a_finer_mesh_takes_no_longer(name: str) -> None:
    """v5e-16 as 4 x 4, and each of its lines in two pieces."""
    coarse, fine = (
        Evaluator(problem).exact_cost(strategy(problem, name)).step_seconds
        for problem in (problem_on(a=4, b=4), problem_on(a=2, b=2, c=2, d=2))
    )
    assert fine <= 1.01 * coarse
