"""Meshes that join axes of another one: their links, plans said of either, and searches that start from them."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import cache

import pytest
from programs import SAMPLES, round_mesh

from toast_cli.dimensions import analyse
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.frontend import load
from toast_cli.hardware import Mesh, load_spec
from toast_cli.plan.decisions import Plan, Replicate, Shard
from toast_cli.plan.goal import parse_goal
from toast_cli.plan.patterns import make_problem
from toast_cli.plan.problem import Problem
from toast_cli.program.model import Program
from toast_cli.search.coarser import Coarser, coarser
from toast_cli.search.mesh_search import search_mesh
from toast_cli.search.run import run_search
from toast_cli.tactics import starting_plans, strategy


@cache
def program(name: str = "mlp_tiny.mlir") -> Program:
    return load(str(SAMPLES / name)).program


def problem_of(mesh: Mesh, pins: tuple[str, ...] = (), name: str = "mlp_tiny.mlir") -> Problem:
    return make_problem(program(name), analyse(program(name)), mesh, pins)


def problem_on(spec: str, **shape: int) -> Problem:
    return problem_of(load_spec(spec).mesh(shape))


def joined(problem: Problem, *parts: tuple[int, ...]) -> Coarser:
    return next(found for found in coarser(problem) if found.parts == parts)


@pytest.mark.parametrize(
    ("spec", "fine", "parts", "coarse"),
    [
        ("v5e-256", {"a": 4, "b": 4, "c": 4, "d": 4}, ((0, 2), (1, 3)), {"a": 16, "b": 16}),
        ("v5e-16", {"a": 2, "b": 2, "c": 2, "d": 2}, ((0, 2), (1, 3)), {"a": 4, "b": 4}),
        ("p100-8", {"a": 2, "b": 2, "c": 2}, ((0, 1), (2,)), {"a": 4, "b": 2}),
    ],
)
def test_pieces_of_a_dimension_are_what_the_specification_lays_out_whole(
    spec: str, fine: dict[str, int], parts: tuple[tuple[int, ...], ...], coarse: dict[str, int]
) -> None:
    found = joined(problem_on(spec, **fine), *parts).problem.mesh
    wanted = load_spec(spec).mesh(coarse)
    assert found.sizes == wanted.sizes
    assert [set(axis.links) for axis in found.axes] == [set(axis.links) for axis in wanted.axes]


def test_each_cut_of_the_axes_is_looked_at_and_those_along_the_same_links() -> None:
    parts = [found.parts for found in coarser(problem_on("v5e-256", a=4, b=4, c=4, d=4))]
    assert parts == [((0,), (1, 2, 3)), ((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0, 2), (1, 3))]
    assert [found.parts for found in coarser(problem_of(round_mesh(a=2, b=1, c=2, d=2)))] == [
        ((0,), (1,), (2, 3)),
        ((0, 2), (1,), (3,)),
    ]


def test_where_something_is_said_of_axes_none_are_joined() -> None:
    problem = problem_on("v5e-16", a=2, b=2, c=4)
    assert coarser(problem)
    assert not coarser(problem_on("v5e-16", a=4, b=4))
    fixed = next(d for d in problem.decisions.choices if isinstance(d, Shard))
    assert not coarser(replace(problem, fixed=(fixed,)))
    assert not coarser(replace(problem, closed=frozenset({1})))
    assert not coarser(replace(problem, goal=parse_goal(subject_to=["communication[a]<=1ms"])))
    assert coarser(replace(problem, goal=parse_goal(subject_to=["peak_memory<=1GiB"])))
    path = program().arguments[0].path
    assert not coarser(problem_of(problem.mesh, (f"{path}=a",)))


@pytest.mark.parametrize("name", ["fsdp", "data-parallel", "megatron"])
def test_a_plan_comes_back_from_its_refinement(name: str) -> None:
    """And each of its refinements takes as long, where the pieces of an axis are those of one line."""
    problem = problem_on("v5e-16", a=2, b=2, c=2, d=2)
    found = joined(problem, (0, 2), (1, 3))
    plan = strategy(found.problem, name)
    refined = list(found.refined(plan))
    assert len(refined) == 4
    for fine in refined:
        assert all(map(problem.decisions.offers, fine))
        assert found.coarsened(fine) == plan
    seconds = min(Evaluator(problem).exact_cost(problem.canonical(fine)).step_seconds for fine in refined)
    assert seconds <= Evaluator(found.problem).exact_cost(plan).step_seconds * 1.001


def test_what_is_said_of_a_piece_alone_is_left_out() -> None:
    found = joined(problem_on("v5e-16", a=2, b=2, c=4), (0, 1), (2,))
    choices = found.problem.decisions.choices
    one, two, *_ = (d for d in choices if isinstance(d, Shard) and d.axis == 0 and not any(d.sides))
    rest = next(d for d in choices if isinstance(d, Replicate) and d.axis == 1)
    said: Plan = (one, two, one._replace(axis=1), rest._replace(axis=2))
    assert found.coarsened(said) == (one, rest)


def test_a_search_starts_from_what_it_finds_on_coarser_meshes() -> None:
    """A state-space model whose best plan for 8 x 2 is found on that mesh only: a search of 4 x 2 x 2 by itself ends
    3 % above it."""
    problem = problem_of(load_spec("v4-32").mesh({"a": 4, "b": 2, "c": 2}), name="ssm_train.mlirbc.zst")
    evaluator, starts = Evaluator(problem), starting_plans(problem)
    result = run_search(evaluator, "mcts", 0, 6000, starts=starts)
    found, each = joined(problem, (0, 1), (2,)), 2000
    coarse = search_mesh(
        evaluator.of(found.problem), "mcts", 0, each, None, 1, None, [found.coarsened(plan) for plan in starts]
    )
    assert result.cost.step_seconds <= 1.001 * coarse.cost.step_seconds
    assert result.evaluations > each  # those of all its searches
    assert result.best_found_at <= result.evaluations
    assert [number for number, _ in result.trail] == sorted(number for number, _ in result.trail)


@pytest.mark.parametrize("iterations", [50, 1000, 3000])
def test_iterations_are_those_of_coarser_meshes_too(iterations: int) -> None:
    evaluator = Evaluator(problem_on("v5e-16", a=2, b=2, c=4))
    told: list[float] = []
    result = run_search(evaluator, "mcts", 0, iterations, progress=lambda *said: told.append(said[3]))
    assert result.evaluations <= iterations
    assert told == sorted(told)
    assert told[0] >= 0.0
    assert told[-1] <= 1.0


@pytest.mark.parametrize("at", [3, 700])
def test_ctrl_c_on_a_coarser_mesh_keeps_what_was_found_there(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(load_spec("v5e-16").mesh({"a": 2, "b": 2, "c": 2, "d": 2}), name="mlp_train.mlirbc.zst")
    evaluator, calls, price = Evaluator(problem), 0, Evaluator.cost

    def pressed(self: Evaluator, plan: Plan):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGINT)
        return price(self, plan)

    monkeypatch.setattr(Evaluator, "cost", pressed)
    result = run_search(evaluator, "mcts", 0, starts=starting_plans(problem))
    assert result.stopped == "interrupted"
    assert calls < at + 100
    assert result.fits
    assert result.cost.step_seconds == evaluator.exact_cost(result.plan).step_seconds
    if at > 100:
        assert result.cost.step_seconds < 0.9 * evaluator.exact_cost(problem.fixed).step_seconds
