"""Searches: same seed same plan, anytime, within budget, never worse than where they start, and as good as the best of
all shardings."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brute_force import best_of_all
from clock import Clock
from programs import Case, arg, case_of, evaluator_of, mesh_of, problem_of, round_mesh, sample
from sweeps import sweep

from toast_cli.base.children import interruptible
from toast_cli.base.errors import UsageError
from toast_cli.hardware import Mesh
from toast_cli.plan.decisions import Plan, Shard
from toast_cli.plan.problem import make_problem
from toast_cli.plan.problem import on_mesh as problem_on_mesh
from toast_cli.price.cost import Cost
from toast_cli.price.evaluator import Evaluator
from toast_cli.request import Effort
from toast_cli.search.incumbent import Budget, Incumbent, Objective, Rank, SearchResult
from toast_cli.search.mcts import LocalSearch
from toast_cli.search.moves import NEIGHBOURHOODS, Moves, subject, suited
from toast_cli.search.run import GLANCE, PLANS, Candidate, Searched, Settings, run_search, search_candidates
from toast_cli.tactics import starting_plans

WEIGHTS = {"down": arg(512, 256), "up": arg(256, 512)}


def momentum(p: Any, m: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        return jnp.sum((x + jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)

    m = jax.tree.map(lambda a, g: 0.9 * a + g, m, jax.grad(loss)(p))
    return jax.tree.map(lambda w, a: w - 0.1 * a, p, m), m


def gradient_step(x: Any, w: Any) -> Any:
    return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)


PROGRAMS: dict[str, tuple[Any, tuple[Any, ...], tuple[int, ...]]] = {
    "perceptron": (momentum, (WEIGHTS, WEIGHTS, arg(64, 256)), (0, 1)),
    "gradient step": (gradient_step, (arg(64, 32), arg(32, 64)), (1,)),
    "gram matrix": (lambda x: x.T @ x, (arg(256, 64),), ()),
}
ONE_AXIS, TWO_AXES = round_mesh(data=4), round_mesh(data=4, model=2)


@cache
def case(name: str, axes: int = 2) -> Case:
    run, shapes, donate = PROGRAMS[name]
    return case_of(run, *shapes, donate=donate, mesh=TWO_AXES if axes == 2 else ONE_AXIS)


def fresh(name: str = "perceptron", mesh: Mesh = TWO_AXES) -> Evaluator:
    """An evaluator that has learnt nothing."""
    of = case(name)
    return Evaluator(make_problem(of.program, of.problem.dimensions, mesh))


def tight(name: str, limit_bytes: int) -> Evaluator:
    return fresh(name, replace(TWO_AXES, limit_bytes=limit_bytes))


def rank(evaluator: Evaluator, plan: Plan) -> Rank:
    """How good a plan is, by its exact cost; less is better."""
    objective = Objective(evaluator.problem, evaluator.cost(evaluator.problem.fixed))
    return objective.rank(plan, evaluator.exact_cost(plan))


class Counted:
    """An evaluator's costs; `plans` are those asked for, `then` is called before each with their number."""

    def __init__(self, evaluator: Evaluator, then: Callable[[int], None] = lambda calls: None) -> None:
        self.plans: set[Plan] = set()
        self._cost, self._then, self.calls = evaluator.cost, then, 0
        evaluator.cost = self  # type: ignore[assignment, method-assign]

    def __call__(self, plan: Plan, below: float = math.inf) -> Cost:
        self.calls += 1
        self._then(self.calls)
        self.plans.add(plan)
        return self._cost(plan, below)


def press(at: int) -> Callable[[int], None]:
    """Ctrl-C at so many plans."""
    return lambda calls: os.kill(os.getpid(), signal.SIGINT) if calls == at else None


# ---------------------------------------------------------------- all of them


def test_the_same_seed_gives_the_same_plan_and_beats_the_unsharded_program() -> None:
    evaluator = fresh("gradient step")
    first, second = (run_search(evaluator, Settings(7, 300)) for _ in range(2))
    facts: list[Callable[[SearchResult], object]] = [
        lambda r: (r.plan, r.cost, r.evaluations, r.best_found_at, r.stopped)
    ]
    assert all(fact(first) == fact(second) for fact in facts)
    assert first.fits
    assert first.cost == evaluator.exact_cost(first.plan)
    assert first.cost.step_seconds < evaluator.cost(()).step_seconds
    assert first.plan == evaluator.problem.canonical(first.plan)


@pytest.mark.parametrize("evaluations", [1, 2, 101])
def test_no_more_plans_are_evaluated_than_allowed(evaluations: int) -> None:
    evaluator = fresh()
    counted = Counted(evaluator)
    result = run_search(evaluator, Settings(evaluations=evaluations))
    assert 0 <= result.best_found_at < result.evaluations <= evaluations
    assert len(counted.plans) <= evaluations
    assert result.evaluations < evaluations or result.stopped == "iterations"


def test_the_clock_ends_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, evaluator = Clock(monkeypatch), fresh()

    def tick(_: int) -> None:
        clock.seconds += 0.01

    start, counted = clock.seconds, Counted(evaluator, tick)
    result = run_search(evaluator, Settings(seconds=0.145))
    assert result.stopped == "budget"
    assert counted.calls <= 16  # of which one is the reference
    assert clock.seconds - start < 0.16


@pytest.mark.parametrize("at", [1, 2, 15])
def test_ctrl_c_ends_a_search_with_its_best_plan(at: int) -> None:
    evaluator = fresh()
    counted = Counted(evaluator, press(at))
    result = run_search(evaluator, Settings())
    assert result.stopped == "interrupted"
    assert result.evaluations <= at + 1
    assert rank(evaluator, result.plan) == min(rank(evaluator, plan) for plan in counted.plans)


def interrupted(evaluator: Evaluator) -> SearchResult:
    Counted(evaluator, press(2))
    return run_search(evaluator, starts=starting_plans(evaluator.problem))


@pytest.mark.parametrize("limit_bytes", [2**40, 2**19, 1])  # much memory, little, and too little for any plan
@pytest.mark.parametrize("evaluations", sweep([1, 30, 800, None], 1, 30, None))  # None: interrupted early
def test_a_search_is_never_worse_than_a_plan_it_was_given_to_start_from(
    limit_bytes: int, evaluations: int | None
) -> None:
    evaluator = tight("perceptron", limit_bytes)
    starts = starting_plans(evaluator.problem)
    if evaluations is None:
        result = interrupted(evaluator)
    else:
        result = run_search(evaluator, Settings(evaluations=evaluations), starts)
    judge = tight("perceptron", limit_bytes)
    assert rank(judge, result.plan) <= min(rank(judge, suited(judge.problem, plan)) for plan in starts)
    assert result.fits == (result.cost.peak_bytes <= limit_bytes)


@pytest.mark.parametrize(("name", "seed"), sweep(product(PROGRAMS, [0, 1]), ("gradient step", 0)))
def test_more_plans_never_end_in_a_worse_one(name: str, seed: int) -> None:
    evaluator = fresh(name)
    budgets = (*(Settings(seed=seed, evaluations=n) for n in (3, 20, 150, 600, 2000)), *_efforts(seed))
    ranks = [rank(evaluator, run_search(evaluator, budget).plan) for budget in budgets]
    assert all(after <= before for before, after in pairwise(ranks[:5]))
    assert all(after <= before for before, after in pairwise(ranks[5:]))


def _efforts(seed: int) -> list[Settings]:
    return [Settings(seed=seed, effort=effort) for effort in sorted(Effort, key=lambda one: PLANS[one])]


def test_when_nothing_fits_the_plan_of_least_memory_comes_back() -> None:
    evaluator = tight("perceptron", 1)
    result = run_search(evaluator, Settings(evaluations=1000))
    assert not result.fits
    assert result.cost.peak_bytes < evaluator.cost(()).peak_bytes / 4


def test_a_plan_that_fits_beats_a_faster_one_that_does_not() -> None:
    budget = Settings(evaluations=500)
    free, least = run_search(fresh("gram matrix"), budget), run_search(tight("gram matrix", 1), budget)
    limit = int(free.cost.peak_bytes / 2)
    assert least.cost.peak_bytes < limit
    result = run_search(tight("gram matrix", limit), budget)
    assert result.fits and result.cost.peak_bytes <= limit
    assert free.cost.step_seconds < result.cost.step_seconds <= least.cost.step_seconds


def test_decisions_that_are_given_stay() -> None:
    of = case("perceptron")
    given = (of.shard("p['up'].1", "data"), of.shard("x.0", "model"))
    result = run_search(Evaluator(replace(of.problem, fixed=given)), Settings(evaluations=400))
    assert result.plan[:2] == given
    assert len(set(result.plan)) == len(result.plan)


def test_what_is_fixed_otherwise_is_left_out_of_plans_to_start_from() -> None:
    problem = case("perceptron").problem
    plan = run_search(Evaluator(problem), Settings(evaluations=300)).plan
    first = next(d for d in plan if isinstance(d, Shard))
    other = first._replace(axis=1 - first.axis)
    fixed = replace(problem, fixed=(first, other), closed=frozenset({0}))
    free = (d for d in plan if isinstance(d, Shard) and d.axis == 1 and subject(d) != subject(other))
    assert set(suited(fixed, plan)) == {first, other, *free}
    assert suited(problem, plan) == plan
    assert run_search(Evaluator(fixed), Settings(evaluations=50), starts=[plan]).plan[:2] == (first, other)


def test_progress_is_told() -> None:
    told: list[tuple[float, int, float, float]] = []
    run_search(fresh(), Settings(evaluations=300), progress=lambda *facts: told.append(facts))
    assert len(told) > 2
    assert [best for best, *_ in told] == sorted((best for best, *_ in told), reverse=True)
    assert [n for _, n, *_ in told] == sorted(n for _, n, *_ in told)
    assert all(0.0 <= used <= 1.0 for *_, used in told)


def test_the_best_plans_looked_at_are_kept() -> None:
    evaluator = fresh()
    result = run_search(evaluator, Settings(evaluations=200, keep=5))
    assert len(set(result.seen)) == 5
    assert result.plan == result.seen[0]
    assert sorted(result.seen, key=lambda plan: rank(evaluator, plan)) == list(result.seen)


def test_what_one_search_learns_about_memory_does_not_help_the_next() -> None:
    """Else the plan would depend on what was searched before."""
    evaluator = tight("perceptron", 2**19)
    first = run_search(evaluator, Settings(evaluations=500))
    evaluator.learn(())
    assert run_search(evaluator, Settings(evaluations=500)).plan == first.plan


def test_a_real_program_searched_twice_gives_one_plan() -> None:
    source, _ = sample("mlp_tiny")
    mesh = round_mesh(data=8, model=2)
    one, two = (run_search(evaluator_of(source, mesh), Settings(seed=5, evaluations=100)) for _ in range(2))
    assert one.plan == two.plan
    assert one.fits


# ---------------------------------------------------------------- against the optimum


# The price of a decision lets a slightly slower plan of fewer decisions win; no plan here has more than ten.
PRICED = 1.006


@pytest.mark.parametrize(
    ("name", "axes"),
    sweep([("perceptron", 1), ("gradient step", 2), ("gram matrix", 2)], ("perceptron", 1), ("gram matrix", 2)),
)
def test_every_seed_reaches_the_optimum(name: str, axes: int) -> None:
    of = case(name, axes)
    least = best_of_all(of.problem).least
    for seed in range(2):
        found = run_search(of.evaluator, Settings(seed=seed, evaluations=600))
        assert 0.0 < found.cost.step_seconds <= least * PRICED, seed


# ---------------------------------------------------------------- several candidates


SHAPES = ({"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4}, {"data": 2, "model": 2, "more": 2})
MESHES = [round_mesh(**shape) for shape in SHAPES]


def on_mesh(mesh: Mesh) -> Evaluator:
    return fresh("perceptron", mesh)


def search_shapes(evaluator_of: Callable[[Mesh], Evaluator], settings: Settings) -> Searched:
    """The best plan on one of `MESHES`."""
    return search_candidates(
        lambda candidate: evaluator_of(candidate.mesh),
        [Candidate(0, mesh) for mesh in MESHES],
        settings,
        lambda searched: (-searched.result.cost.step_seconds,),
        starting_plans,
    )[0]


@pytest.mark.parametrize("evaluations", [1, 3, 60])
def test_iterations_are_those_of_all_mesh_shapes_together(evaluations: int) -> None:
    result = search_shapes(on_mesh, Settings(evaluations=evaluations)).result
    assert min(evaluations, len(SHAPES)) <= result.evaluations <= evaluations


def test_the_best_mesh_shape_wins() -> None:
    alone = [run_search(on_mesh(mesh), Settings(evaluations=40)).cost.step_seconds for mesh in MESHES]
    searched = search_shapes(on_mesh, Settings(evaluations=320))
    assert searched.result.cost.step_seconds <= min(alone) * 1.0001
    assert searched.result.cost == searched.evaluator.exact_cost(searched.result.plan)


def test_a_time_limit_holds_for_all_mesh_shapes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    start = clock.seconds

    def tick(_: int) -> None:
        clock.seconds += 0.002

    def slow(mesh: Mesh) -> Evaluator:
        evaluator = on_mesh(mesh)
        Counted(evaluator, tick)
        return evaluator

    result = search_shapes(slow, Settings(seconds=0.6)).result
    assert 0.5 < clock.seconds - start < 0.7
    assert result.seconds == pytest.approx(clock.seconds - start, abs=0.05)


@pytest.mark.parametrize("at", [1, 4])
def test_ctrl_c_between_searches_keeps_the_best_plan_so_far(at: int) -> None:
    """It strikes while an evaluator is made for mesh shape number `at`, where no search is running."""
    made = 0

    def make(mesh: Mesh) -> Evaluator:
        nonlocal made
        made += 1
        if made == at:
            os.kill(os.getpid(), signal.SIGINT)
        return on_mesh(mesh)

    searched = search_shapes(make, Settings(evaluations=100))
    assert made == at
    assert searched.result.stopped == "interrupted"
    if at > 1:
        assert searched.result.cost.step_seconds < searched.evaluator.cost(()).step_seconds


def test_most_of_the_budget_goes_to_the_reading_that_is_ahead_after_a_glance_at_each() -> None:
    """Whichever comes first; a reading for which an option does not apply costs nothing."""

    def evaluator_of(candidate: Candidate) -> Evaluator:
        if candidate.reading == 2:
            raise UsageError("does not apply", where="--strategy")
        return fresh(("gradient step", "gram matrix")[candidate.reading], TWO_AXES)

    def ahead(reading: int) -> Callable[[Searched], tuple[float, ...]]:
        return lambda searched: (searched.candidate.reading == reading,)

    plans = 200
    for leader in (0, 1):
        candidates = [Candidate(reading, TWO_AXES) for reading in (2, 0, 1)]
        first, second = search_candidates(evaluator_of, candidates, Settings(evaluations=plans), ahead(leader))
        assert (first.candidate.reading, second.candidate.reading) == (leader, 1 - leader)
        assert second.result.best_found_at < GLANCE * plans
        assert first.result.seen == () and first.result.evaluations == second.result.evaluations <= plans
    with pytest.raises(UsageError, match="does not apply"):
        search_candidates(evaluator_of, candidates[:1], Settings(evaluations=plans), ahead(0))


# ---------------------------------------------------------------- Ctrl-C and threads


def test_a_second_ctrl_c_ends_the_program() -> None:
    with pytest.raises(KeyboardInterrupt), interruptible() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.0)


def test_afterwards_ctrl_c_means_what_it_did() -> None:
    before = signal.getsignal(signal.SIGINT)
    run_search(fresh(), Settings(evaluations=20))
    assert signal.getsignal(signal.SIGINT) is before


def test_a_search_runs_outside_the_main_thread() -> None:
    found: list[int] = []
    evaluator = fresh()
    thread = threading.Thread(target=lambda: found.append(run_search(evaluator, Settings(evaluations=20)).evaluations))
    thread.start()
    thread.join()
    assert found == [20]


def local_search(name: str, seed: int = 0) -> tuple[Incumbent, LocalSearch]:
    evaluator = fresh(name)
    incumbent = Incumbent(evaluator, Budget(None, None), starting_plans(evaluator.problem))
    moves = Moves(evaluator.problem, evaluator.seconds_between)
    return incumbent, LocalSearch(incumbent, moves, np.random.default_rng(seed))


def test_each_plan_to_start_from_is_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    incumbent, local = local_search("perceptron")
    improved: list[Plan] = []
    improve = local.improve

    def watched(plan: Plan, evaluations: float) -> Plan:
        improved.append(plan)
        return improve(plan, evaluations)

    monkeypatch.setattr(local, "improve", watched)
    local.improve_each(incumbent.starts)
    assert len(incumbent.starts) > 6
    assert improved == list(incumbent.starts)


def test_a_turn_ends_within_an_edit_of_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also among edits that remove the same decisions, of which the best is made."""
    monkeypatch.setattr("toast_cli.search.mcts.TURN", 5)
    incumbent, local = local_search("perceptron")
    for neighbourhood in NEIGHBOURHOODS:
        for plan in incumbent.starts:
            incumbent.worth(plan)
            before = len(incumbent.seen)
            local._turn(neighbourhood, plan)
            assert len(incumbent.seen) - before <= 5 + 8  # an edit leads to a few plans


def test_a_mesh_that_shares_with_the_one_before_it_costs_as_it_does_alone() -> None:
    source = sample("mlp_tiny")[0]
    one, other = mesh_of("v4-32", {"data": 8, "model": 2}), mesh_of("v4-32", {"data": 16})
    before = evaluator_of(source, one)
    problem = problem_on_mesh(before.problem, other)
    assert problem is not None
    shared, alone = Evaluator(problem, like=before), evaluator_of(source, other)
    assert shared.items is before.items and alone.items is not before.items
    for plan in starting_plans(alone.problem):
        assert shared.exact_cost(plan) == alone.exact_cost(plan)
    pinned = problem_of(source, one, pins=(f"{source.program.arguments[0].path}=data",))
    assert problem_on_mesh(pinned, other) is None  # the pin is of this mesh's axes
    assert problem_on_mesh(before.problem, mesh_of("v4-16", {"data": 8})) is None  # fewer devices
