"""Searched plans against the best of all shardings, which is found without plans; see `brute_force`."""

from __future__ import annotations

import pytest
from brute_force import best_of_all
from programs import case_of, round_mesh
from small_programs import PROGRAMS, random_program

from toast_cli.search.run import run_search
from toast_cli.tactics import starting_plans

BEHIND = 1.01
MESHES = {"one axis": {"data": 4}, "two axes": {"data": 4, "model": 2}}
REACHED = (
    "attention, batch", "perceptron", "perceptron, wide", "convolution", "scatter", "fourier", "encoder and decoder",
)  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", REACHED)
def test_the_search_finds_the_best_of_all_shardings(name: str, mesh: str) -> None:
    small = PROGRAMS[name]
    case = case_of(small.run, *small.shapes, donate=small.donate, mesh=round_mesh(**MESHES[mesh]))
    best = best_of_all(case.problem)
    assert best.seconds <= best.least * 1.0005  # what it is measured against is the best
    found = run_search(case.evaluator, "mcts", 0, 2000, starts=starting_plans(case.problem))
    assert best.least <= found.cost.step_seconds * (1.0 + 1e-6)
    assert found.cost.step_seconds <= best.seconds * BEHIND


@pytest.mark.parametrize("number", range(12))
def test_no_plan_beats_the_best_of_all_shardings(number: int) -> None:
    """The bound holds and its assignment can be had: else the yardstick is wrong."""
    small = random_program(number)
    case = case_of(small.run, *small.shapes, donate=small.donate, mesh=round_mesh(data=4, model=2))
    best = best_of_all(case.problem)
    found = run_search(case.evaluator, "mcts", 0, 300)
    assert best.least * (1.0 - 1e-6) <= min(best.seconds, found.cost.step_seconds)
