"""Whole searches: what their budgets mean, shapes of the mesh, and Ctrl-C at any time."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from clock import Clock
from perceptrons import evaluator_of
from programs import round_mesh

from toast_cli.cost.model import Cost
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.hardware import Mesh
from toast_cli.plan.decisions import Plan, Shard
from toast_cli.search import SEARCHES
from toast_cli.search.edits import suited
from toast_cli.search.exact import priced
from toast_cli.search.interrupts import interruptible
from toast_cli.search.mesh_search import search_mesh
from toast_cli.search.run import run_search
from toast_cli.search.shapes import search_shapes
from toast_cli.search.shares import GROWN, LATE, MORE, Growth, shares_of, with_trees

SHAPES = ({"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4}, {"data": 2, "model": 2, "more": 2})


def meshes(limit_bytes: int = 2**40) -> list[Mesh]:
    return [round_mesh(limit_bytes, **shape) for shape in SHAPES]


class Counted:
    """An evaluator's costs; `calls` counts them, `then` is called before each."""

    def __init__(self, evaluator: Evaluator, then: Callable[[int], None] = lambda calls: None) -> None:
        self.plans: set[Plan] = set()
        self._cost, self._then, self.calls = evaluator.cost, then, 0
        evaluator.cost = self  # type: ignore[assignment, method-assign]

    def __call__(self, plan: Plan) -> Cost:
        self.calls += 1
        self._then(self.calls)
        self.plans.add(plan)
        return self._cost(plan)


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("iterations", [1, 2, 3, 16, 50, 301])
def test_iterations_are_all_plans_that_are_evaluated(name: str, iterations: int) -> None:
    evaluator = evaluator_of(round_mesh(data=4, model=2))
    counted = Counted(evaluator)
    result = run_search(evaluator, name, 0, iterations)
    assert result.evaluations <= iterations
    # Roots may look at the same plan, and the plan without decisions serves as the reference.
    assert len(counted.plans) <= iterations
    if iterations <= 50 and name == "mcts":
        assert result.evaluations == iterations


@pytest.mark.parametrize("iterations", [40, 3000])
def test_a_search_is_never_worse_than_a_plan_it_was_given_to_start_from(iterations: int) -> None:
    evaluator = evaluator_of(round_mesh(data=4, model=2))
    known = run_search(evaluator, "exact")
    short = run_search(evaluator, "mcts", 0, 4)
    assert short.plan != known.plan
    result = run_search(evaluator, "mcts", 0, iterations, starts=[(), known.plan])
    assert result.cost.step_seconds <= known.cost.step_seconds
    assert len(result.plan) <= len(known.plan)
    assert short.cost.step_seconds > known.cost.step_seconds


def test_what_is_fixed_otherwise_is_left_out_of_plans_to_start_from() -> None:
    problem = evaluator_of(round_mesh(data=4, model=2)).problem
    plan = run_search(Evaluator(problem), "exact").plan
    first = next(d for d in plan if isinstance(d, Shard))
    other = first._replace(axis=1 - first.axis)
    fixed = replace(problem, fixed=(first, other), closed=frozenset({0}))
    assert set(suited(fixed, plan)) == {first, other, *(d for d in plan if isinstance(d, Shard) and d.axis == 1)}
    assert suited(problem, plan) == plan
    assert run_search(Evaluator(fixed), "mcts", 0, 50, starts=[plan]).plan[:2] == (first, other)


@pytest.mark.parametrize("iterations", [1, 3, 7, 60, 400])
def test_iterations_are_those_of_all_mesh_shapes_together(iterations: int) -> None:
    _, result = search_shapes(evaluator_of, meshes(), "mcts", 0, iterations, None, 1)
    assert result.evaluations <= iterations
    assert result.evaluations >= min(iterations, len(SHAPES)) - 1


def test_the_best_mesh_shape_wins() -> None:
    each = 1000
    alone = [run_search(evaluator_of(mesh), "mcts", 0, each).cost.step_seconds for mesh in meshes()]
    budget = each * len(alone)
    evaluator, result = search_shapes(evaluator_of, meshes(), "mcts", 0, budget, None, 1)
    assert result.cost.step_seconds <= min(alone) * 1.0001
    assert result.cost == evaluator.exact_cost(result.plan)
    again, same = search_shapes(evaluator_of, meshes(), "mcts", 0, budget, None, 1)
    assert (again.problem.mesh, same.plan, same.evaluations) == (
        evaluator.problem.mesh,
        result.plan,
        result.evaluations,
    )


def test_a_time_limit_holds_for_all_mesh_shapes_together_and_seconds_are_wall_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    start = clock.seconds

    def tick(calls: int) -> None:
        clock.seconds += 0.002

    def slow(mesh: Mesh) -> Evaluator:
        evaluator = evaluator_of(mesh)
        Counted(evaluator, tick)
        return evaluator

    _, result = search_shapes(slow, meshes(), "mcts", 0, None, 0.6, 1)
    assert 0.5 < clock.seconds - start < 0.7
    assert result.seconds == pytest.approx(clock.seconds - start)


@pytest.mark.filterwarnings("ignore:os.fork", "ignore:.*fork")
def test_seconds_are_wall_seconds_when_roots_run_side_by_side() -> None:
    evaluator = evaluator_of(round_mesh(data=4, model=2))
    Counted(evaluator, lambda calls: time.sleep(0.002))
    start = time.monotonic()
    result = run_search(evaluator, "mcts", 0, 200, None, 2)
    assert 0.15 < result.seconds <= time.monotonic() - start


def test_a_search_goes_on_while_it_finds_better_plans() -> None:
    """By a fifth of its budget each time, where edits of its best plan are left to try and one has made it better."""
    evaluator, went_on = evaluator_of(round_mesh(data=4, model=2)), list[int]()
    for total in (300, 1300, 3000, 6000):
        as_told = search_mesh(evaluator, "mcts", 0, total, None, 1, None, ())
        grown = search_mesh(evaluator, "mcts", 0, total, None, 1, None, (), grows=True)
        went_on.append(grown.evaluations - as_told.evaluations)
        assert as_told.evaluations <= total
        line = grown.evaluations - shares_of(evaluator.problem, total).again * total
        assert line <= (GROWN + MORE) * total or grown.best_found_at > LATE * (line - MORE * total)
        assert priced(grown.plan, grown.cost) <= priced(as_told.plan, as_told.cost)
        if as_told.best_found_at > LATE * as_told.evaluations and as_told.evaluations == total:
            assert went_on[-1]
    assert went_on[0] == 300
    assert went_on[-1] < 0.3 * 6000  # all has been tried but a line from other words


def test_how_far_a_search_may_grow() -> None:
    growth = Growth(trees=200, total=1000)
    assert growth.of_first_line(looked=800, found=1) == 0  # no edit has made it better
    assert growth.of_first_line(looked=1200, found=2) == 200
    assert growth.of_first_line(looked=1300, found=900) == growth.of_first_line(looked=1700, found=1300) == 0
    assert growth.of_first_line(looked=1300, found=1000) == 200  # the best was found lately
    assert growth.of_further_lines(looked=1000, found=2) == 300
    assert growth.of_further_lines(looked=1400, found=2) == growth.of_further_lines(looked=1000, found=1) == 0
    assert Growth().of_first_line(100, 50) == Growth().of_further_lines(100, 50) == 0


@pytest.mark.parametrize("grows", [False, True])
def test_what_trees_have_looked_at_counts_where_a_search_grows(monkeypatch: pytest.MonkeyPatch, grows: bool) -> None:
    module, heard = sys.modules[search_mesh.__module__], list[tuple[Growth, int]]()
    polished = module.polish

    def listening(*args: Any, **options: Any) -> Any:
        lines = polished(*args, **options)
        heard.append((next(arg for arg in args if isinstance(arg, Growth)), lines.evaluations))
        return lines

    monkeypatch.setattr(module, "polish", listening)
    found = search_mesh(evaluator_of(round_mesh(data=4, model=2)), "mcts", 0, 300, None, 1, None, (), grows=grows)
    ((growth, of_lines),) = heard
    assert growth == (Growth(found.evaluations - of_lines, 300) if grows else Growth())


def test_lines_begin_at_the_middling_strategy_and_then_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    module, heard = sys.modules[search_mesh.__module__], list[list[Plan]]()
    polished = module.polish

    def listening(*args: Any, **options: Any) -> Any:
        heard.append(list(options["again"]))
        return polished(*args, **options)

    monkeypatch.setattr(module, "polish", listening)
    evaluator = evaluator_of(round_mesh(data=4, model=2))
    problem = evaluator.problem
    starts = [suited(problem, (choice,)) for choice in problem.decisions.choices if isinstance(choice, Shard)][:5]
    search_mesh(evaluator, "mcts", 0, 3000, None, 1, None, starts)
    ranked = sorted(dict.fromkeys(starts), key=lambda plan: priced(plan, evaluator.cost(plan)))
    middle = ranked[len(ranked) // 2]
    assert heard == [[middle, *(plan for plan in ranked if plan != middle)]]


def test_shares_of_a_budget() -> None:
    """Few plans are for one line only, fewer for trees alone; where the tool says how many, lines have what they are
    to have."""
    problem = evaluator_of(round_mesh(data=4, model=2)).problem
    assert shares_of(problem, 50) == (1.0, 0.0, 0.0)
    assert shares_of(problem, 1000).again == 0.0
    for total in (None, 1000, 5000, 100_000):
        shares = shares_of(problem, total)
        assert shares.trees + shares.first + 2.0 * shares.again == pytest.approx(1.0)
    for lines in (3000, 10_000):
        total = with_trees(problem, lines)
        assert shares_of(problem, total).trees * total == pytest.approx(total - lines, abs=2.0)
    many = evaluator_of(round_mesh(data=2, model=2, more=2)).problem
    assert with_trees(many, 3000) == 3000
    assert shares_of(many, 3000).again == 0.0


def test_what_one_root_learns_about_memory_does_not_help_the_next() -> None:
    """Else the plan would depend on whether they share a process."""
    evaluator = evaluator_of(round_mesh(2**19, data=4, model=2))
    first = run_search(evaluator, "mcts", 0, 500)
    evaluator.exact_cost(())
    assert run_search(evaluator, "mcts", 0, 500).plan == first.plan


# ---------------------------------------------------------------- Ctrl-C


def press(at: int) -> Callable[[int], None]:
    return lambda calls: os.kill(os.getpid(), signal.SIGINT) if calls == at else None


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("at", [1, 2, 15])
def test_ctrl_c_ends_a_search_with_its_best_plan(name: str, at: int) -> None:
    evaluator = evaluator_of(round_mesh(data=4, model=2))
    Counted(evaluator, press(at))
    result = run_search(evaluator, name, 0, 5000)
    assert result.stopped == "interrupted"
    assert result.evaluations <= at
    assert result.cost == evaluator.exact_cost(result.plan)


@pytest.mark.parametrize("at", [1, 3, 4])
def test_ctrl_c_between_searches_keeps_the_best_plan_so_far(at: int) -> None:
    """It strikes while an evaluator is made for mesh shape number `at`, where no search is running."""
    made = 0

    def make(mesh: Mesh) -> Evaluator:
        nonlocal made
        made += 1
        if made == at:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluator_of(mesh)

    evaluator, result = search_shapes(make, meshes(), "mcts", 0, 1000, None, 1)
    assert made == at
    assert result.stopped == "interrupted"
    if at > 1:
        assert result.cost.step_seconds < evaluator.cost(()).step_seconds


def test_a_second_ctrl_c_ends_the_program() -> None:
    with pytest.raises(KeyboardInterrupt), interruptible() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.0)


def test_afterwards_ctrl_c_means_what_it_did() -> None:
    before = signal.getsignal(signal.SIGINT)
    run_search(evaluator_of(round_mesh(data=4)), "mcts", 0, 20)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_search_runs_outside_the_main_thread() -> None:
    found: list[int] = []
    thread = threading.Thread(
        target=lambda: found.append(run_search(evaluator_of(round_mesh(data=4)), "mcts", 0, 20).evaluations)
    )
    thread.start()
    thread.join()
    assert found and 10 <= found[0] <= 20
