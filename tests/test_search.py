"""Searches: one signature, same seed same plan, anytime, within budget, and as good as what can be proven."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import combinations, permutations, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clock import Clock
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import SAMPLES, Case, arg, case_of, evaluator_of, round_mesh, sample
from random_programs import cases, plans

from toast_cli.cost.model import Cost
from toast_cli.dimensions import analyse
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.frontend import load
from toast_cli.hardware import Mesh, load_spec
from toast_cli.plan.accumulation import ACCUMULATORS
from toast_cli.plan.decision_space import DecisionSpace
from toast_cli.plan.decisions import NOWHERE, Plan, Replicate, Shard
from toast_cli.plan.loop_reads import LOOP_READS
from toast_cli.plan.patterns import make_problem
from toast_cli.plan.problem import Problem
from toast_cli.search import SEARCHES, Budget, SearchResult
from toast_cli.search.climb import climb, climb_around
from toast_cli.search.edits import Edit, results
from toast_cli.search.mesh_search import Confirmed
from toast_cli.search.moves import LEAST_STAKE, Moves
from toast_cli.search.polish import polish
from toast_cli.search.run import (
    EVALUATIONS,
    FEW_PATTERNS,
    FEW_PATTERNS_TIMES,
    SMALL,
    default_evaluations,
    run_search,
)
from toast_cli.search.selection import bound as bound_of
from toast_cli.search.shares import with_trees
from toast_cli.search.wide_edits import about_axes, families
from toast_cli.tactics import starting_plans, strategy

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


def search(name: str, of: Case | Evaluator, budget: Budget = Budget(), seed: int = 0) -> SearchResult:  # noqa: B008 - frozen
    evaluator = of.evaluator if isinstance(of, Case) else of
    return SEARCHES[name](evaluator.problem, evaluator.cost, budget, np.random.default_rng(seed), None)


def tight(of: Case, limit_bytes: int) -> Evaluator:
    """The same with so much memory."""
    return Evaluator(make_problem(of.program, of.problem.dimensions, replace(of.problem.mesh, limit_bytes=limit_bytes)))


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", SEARCHES)
def test_all_share_one_signature_and_beat_the_unsharded_program(name: str) -> None:
    of = case("gradient step")
    result = search(name, of, Budget(evaluations=500))
    assert result.fits
    assert result.cost == of.evaluator.cost(result.plan)
    assert result.cost.step_seconds < of.evaluator.cost(()).step_seconds
    assert 0 <= result.best_found_at <= result.evaluations <= 500
    assert result.plan == of.problem.canonical(result.plan)


@pytest.mark.parametrize("name", SEARCHES)
def test_the_same_seed_gives_the_same_plan(name: str) -> None:
    first, second = (search(name, case("perceptron"), Budget(evaluations=300), seed=7) for _ in range(2))
    assert (first.plan, first.cost, first.evaluations, first.best_found_at, first.stopped) == (
        second.plan, second.cost, second.evaluations, second.best_found_at, second.stopped,
    )  # fmt: skip


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("evaluations", [1, 17, 40])
def test_no_more_plans_are_evaluated_than_allowed(name: str, evaluations: int) -> None:
    of = case("perceptron")
    result = search(name, of, Budget(evaluations=evaluations))
    assert result.evaluations <= evaluations
    if result.evaluations == evaluations:
        assert result.stopped == "iterations"


@pytest.mark.parametrize("name", SEARCHES)
def test_the_clock_ends_a_search(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of, clock = case("perceptron"), Clock(monkeypatch)
    start = clock.seconds

    def slow(plan: Plan) -> Cost:
        clock.seconds += 0.01
        return of.evaluator.cost(plan)

    result = SEARCHES[name](of.problem, slow, Budget(seconds=0.145), np.random.default_rng(0), None)
    assert result.stopped in ("budget", "plateau")
    assert result.evaluations <= 15
    assert clock.seconds - start < 0.16


class Interrupting:
    """Costs of plans, and Ctrl-C at one of them."""

    def __init__(self, evaluator: Evaluator, at: int) -> None:
        self.evaluator, self.at, self.calls = evaluator, at, 0
        self.looked_at: list[tuple[float, Plan]] = []

    def __call__(self, plan: Plan) -> Cost:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        cost = self.evaluator.cost(plan)
        self.looked_at.append((cost.step_seconds, plan))
        return cost


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("at", [2, 9, 20])
def test_an_interrupt_returns_the_best_so_far(name: str, at: int) -> None:
    of = case("perceptron")
    evaluate = Interrupting(of.evaluator, at)
    result = SEARCHES[name](of.problem, evaluate, Budget(evaluations=5000), np.random.default_rng(0), None)
    assert result.stopped == "interrupted"
    assert not result.proven
    assert result.cost == of.evaluator.cost(result.plan)
    assert (
        result.cost.step_seconds <= min(seconds for seconds, _ in evaluate.looked_at) * 1.01
    )  # all but the price of decisions


@pytest.mark.parametrize("name", SEARCHES)
def test_when_nothing_fits_the_plan_of_least_memory_comes_back(name: str) -> None:
    of = case("perceptron")
    evaluator = tight(of, 1)
    result = search(name, evaluator, Budget(evaluations=3000))
    assert not result.fits
    assert result.cost.peak_bytes < of.evaluator.cost(()).peak_bytes / 4


@pytest.mark.parametrize("name", SEARCHES)
def test_a_plan_that_fits_beats_a_faster_one_that_does_not(name: str) -> None:
    of = case("gram matrix")
    free, least = search(name, of), search(name, tight(of, 1))
    assert least.cost.peak_bytes < free.cost.peak_bytes / 2
    limit = int(free.cost.peak_bytes / 2)
    result = search(name, tight(of, limit))
    assert result.fits
    assert result.cost.peak_bytes <= limit
    assert free.cost.step_seconds < result.cost.step_seconds <= least.cost.step_seconds


@pytest.mark.parametrize("name", SEARCHES)
def test_decisions_that_are_given_stay(name: str) -> None:
    of = case("perceptron")
    given = (of.shard("p['up'].1", "data"), of.shard("x.0", "model"))
    evaluator = Evaluator(replace(of.problem, fixed=given))
    result = search(name, evaluator, Budget(evaluations=400))
    assert result.plan[:2] == given
    assert len(set(result.plan)) == len(result.plan)


def test_progress_is_told() -> None:
    of = case("perceptron")
    told: list[tuple[float, int, float, float]] = []
    SEARCHES["mcts"](
        of.problem, of.evaluator.cost, Budget(evaluations=300), np.random.default_rng(0), lambda *a: told.append(a)
    )
    best = [seconds for seconds, *_ in told]
    assert len(told) > 2
    assert best == sorted(best, reverse=True)
    assert [n for _, n, *_ in told] == sorted(n for _, n, *_ in told)
    assert all(0.0 <= used <= 1.0 for *_, used in told)


# ---------------------------------------------------------------- against the proven optimum


def all_plans(problem: Problem) -> Iterator[Plan]:
    shards = [d for d in problem.decisions.choices if isinstance(d, Shard)]
    rest = [d for d in problem.decisions.choices if not isinstance(d, Shard)]
    for count in range(len(shards) + 1):
        for chosen in permutations(shards, count):
            if len({(d.group, d.axis) for d in chosen}) == count:
                for kept in range(len(rest) + 1):
                    for whole in combinations(rest, kept):
                        yield (*chosen, *whole)


# The price of a decision lets a slightly slower plan of fewer decisions win; no plan here has more than ten.
PRICED = 1.006


@pytest.mark.parametrize(("name", "axes"), [("perceptron", 1), ("gradient step", 1), ("gram matrix", 1)])
def test_exact_proves_that_nothing_tried_is_better(name: str, axes: int) -> None:
    of = case(name, axes)
    best = min(
        of.evaluator.cost(plan).step_seconds for plan in {of.problem.canonical(p) for p in all_plans(of.problem)}
    )
    result = search("exact", of)
    assert result.lower_bound <= min(best, result.cost.step_seconds) * (1.0 + 1e-6)
    assert result.cost.step_seconds <= best * PRICED
    assert result.proven
    assert result.cost.step_seconds <= result.lower_bound * PRICED


@pytest.mark.parametrize(("name", "axes"), [("perceptron", 1), ("gradient step", 2), ("gram matrix", 2)])
def test_mcts_reaches_the_proven_optimum_for_every_seed(name: str, axes: int) -> None:
    of = case(name, axes)
    least = bound_of(of.problem, 30.0).seconds
    for seed in range(6):
        found = search("mcts", of, Budget(evaluations=1500), seed)
        assert 0.0 < found.cost.step_seconds <= least * PRICED, seed


def test_exact_out_of_budget_still_bounds_what_is_possible() -> None:
    of = case("perceptron")
    full, short = search("exact", of), search("exact", of, Budget(evaluations=10))
    assert not short.proven
    assert short.lower_bound == pytest.approx(full.lower_bound, rel=1e-9) and short.lower_bound > 0
    assert short.lower_bound <= full.cost.step_seconds * (1 + 1e-9) < short.cost.step_seconds


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_no_plan_beats_the_bound(data: st.DataObject) -> None:
    of = data.draw(cases())
    bound = bound_of(of.problem, 20.0).seconds
    for plan in data.draw(st.lists(plans(of.problem), min_size=1, max_size=5)):
        assert (
            bound <= of.evaluator.cost(plan).step_seconds * (1.0 + 1e-6) + 1e-12
        )  # costs are rounded to 2**-48 seconds a part


# ---------------------------------------------------------------- runs of several roots


# A fork of a process that has loaded JAX warns; nothing of JAX is used after it.
@pytest.mark.filterwarnings("ignore:os.fork", "ignore:.*fork")
@pytest.mark.parametrize("iterations", [400, 2600])  # one line of climbing, and further ones
def test_the_number_of_processes_does_not_change_the_plan(iterations: int) -> None:
    results = []
    for jobs in (1, 2):
        evaluator = tight(case("perceptron"), 2**40)
        starts = starting_plans(evaluator.problem)
        results.append(run_search(evaluator, "mcts", 3, iterations, None, jobs, starts=starts))
    one, two = results
    assert (one.plan, one.cost.step_seconds, one.evaluations) == (two.plan, two.cost.step_seconds, two.evaluations)


@pytest.mark.filterwarnings("ignore:os.fork", "ignore:.*fork")
@pytest.mark.parametrize("jobs", [1, 2])
def test_progress_of_all_roots_is_told(jobs: int) -> None:
    told: list[tuple[float, int, float, float]] = []
    result = run_search(tight(case("perceptron"), 2**40), "mcts", 3, 400, None, jobs, lambda *facts: told.append(facts))
    fractions = [fraction for _, _, _, fraction in told]
    assert max(fractions) > 0.9 and fractions == sorted(fractions)
    assert max(looked for _, looked, _, _ in told) > 200  # trees have fewer: lines of climbing tell, too
    assert min(best for best, _, _, _ in told) >= result.cost.step_seconds


def test_an_interrupted_root_ends_the_run() -> None:
    evaluator = tight(case("perceptron"), 2**40)
    evaluator.cost = Interrupting(tight(case("perceptron"), 2**40), 30)  # type: ignore[method-assign]
    result = run_search(evaluator, "mcts", 0, None, None, 1)
    assert result.stopped == "interrupted"
    assert result.evaluations < 30


@pytest.mark.filterwarnings("ignore:os.fork", "ignore:.*fork")
def test_an_interrupt_reaches_roots_in_other_processes(tmp_path: Path) -> None:
    evaluator = tight(case("perceptron"), 2**40)
    quick, parent, calls = evaluator.cost, os.getpid(), 0

    def slow(plan: Plan) -> Cost:
        nonlocal calls
        calls += 1
        if calls == 20 and os.getpid() != parent:
            with suppress(FileExistsError):  # the process that is here first presses Ctrl-C
                (tmp_path / "pressed").touch(exist_ok=False)
                os.kill(parent, signal.SIGINT)
        time.sleep(0.01)
        return quick(plan)

    evaluator.cost = slow  # type: ignore[method-assign]
    result = run_search(evaluator, "mcts", 0, 100_000, None, 2)  # far longer than until the interrupt
    assert result.stopped == "interrupted"
    assert 2 <= result.evaluations < 10_000
    assert result.cost.step_seconds < quick(()).step_seconds


def test_a_real_program_searched_twice_gives_one_plan() -> None:
    source, _ = sample("mlp_tiny")
    mesh: Mesh = round_mesh(data=8, model=2)
    one, two = (run_search(evaluator_of(source, mesh), "mcts", 5, 300, None, 1) for _ in range(2))
    assert one.plan == two.plan
    assert one.fits


def test_no_edit_makes_the_plan_of_a_search_better() -> None:
    """A large graph network takes more edits than a tree has evaluations left: seed 0 was 13 % behind others."""
    program = load(str(SAMPLES / "gns_train.mlirbc.zst")).program
    problem = make_problem(program, analyse(program), load_spec("v4-32").mesh())
    evaluator = Evaluator(problem)
    found = run_search(evaluator, "mcts", 0, starts=starting_plans(problem))
    further = polish(problem, Confirmed(evaluator), Budget(), [found.plan])
    assert further.cost.step_seconds > found.cost.step_seconds * 0.998


def test_seeds_agree() -> None:
    """The best plan splits the sequence in one part of the program over one axis and in another part over the other:
    seeds were up to 1 % apart."""
    program = load(str(SAMPLES / "long_train.mlirbc.zst")).program
    problem = make_problem(program, analyse(program), load_spec("v6e-64").mesh())
    starts = starting_plans(problem)
    steps = [run_search(Evaluator(problem), "mcts", seed, starts=starts).cost.step_seconds for seed in (0, 3)]
    assert max(steps) <= min(steps) * 1.002


def test_what_is_moved_out_of_a_loop_comes_with_what_makes_it_worth_it() -> None:
    """A loop's width over both axes takes 7 times as long, 5 with what it reads gathered before it, 3.5 with its sums
    behind it, and with both less than without any."""
    program = load(str(SAMPLES / "rnn_train.mlirbc.zst")).program
    problem = make_problem(program, analyse(program), load_spec("v4-32").mesh())
    plan = run_search(Evaluator(problem), "mcts", 0, 3000, starts=starting_plans(problem)).plan
    moved = {(problem.roles[d.role], d.axis) for d in plan if isinstance(d, Replicate)}
    assert moved >= set(product((ACCUMULATORS, LOOP_READS), (0, 1)))


def test_what_is_handed_over_in_a_loop_comes_with_gathers_before_it() -> None:
    """The batch over both axes, but where gradients of a recurrence's weights are summed over it: there one axis splits
    the weights. Without gathers before the loops that takes four times as long as data parallelism, with them 0.6
    times; a search that does not try the two together ends 10 % below it."""
    program = load(str(SAMPLES / "rnn_train.mlirbc.zst")).program
    problem = make_problem(program, analyse(program), load_spec("v6e-64").mesh({"data": 8, "model": 8}))
    evaluator, moves, plan = Evaluator(problem), Moves(problem), strategy(problem, "data-parallel")
    edits = moves.handed_over_in_loops(plan)
    assert {d.axis for edit in edits for d in edit.into if isinstance(d, Replicate)} == {0, 1}
    reached = [to for edit in edits for to in results(problem, plan, edit)]
    best = min(reached, key=lambda to: evaluator.cost(to).step_seconds)
    without = problem.canonical(tuple(d for d in best if isinstance(d, Shard)))
    seconds = evaluator.cost(plan).step_seconds
    assert evaluator.cost(best).step_seconds < 0.65 * seconds
    assert evaluator.cost(without).step_seconds > 2.0 * seconds
    found = run_search(evaluator, "mcts", 0, starts=starting_plans(problem))
    assert found.cost.step_seconds < 0.6 * seconds


def test_few_unlike_ops_have_twice_the_plans() -> None:
    """However many ops there are: they take little more time."""
    program = load(str(SAMPLES / "t2b_train.mlirbc.zst")).program
    problem = make_problem(program, analyse(program), load_spec("v4-32").mesh())
    assert len(program.ops) > SMALL[-1][0]
    assert len(problem.patterns) < FEW_PATTERNS
    assert default_evaluations(problem) == with_trees(problem, FEW_PATTERNS_TIMES * EVALUATIONS)


def test_what_takes_two_edits_is_found_from_the_neighbours() -> None:
    """Either of two decisions alone is worse than none, the two are better."""
    problem = case("perceptron").problem
    moves = Moves(problem)
    singles = [unit for unit in moves.after(()) if len(unit) == 1]
    one, other = next(
        (a, b) for a, b in combinations(singles, 2) if a[0][:2] != b[0][:2] and (*a, *b) not in moves.macros
    )

    def reward(plan: Plan) -> float:
        held = [unit[0] in plan for unit in (one, other)]
        return 0.01 * all(held) - 0.02 * any(held) * (not all(held)) - 0.03 * (len(plan) - sum(held))

    assert climb(moves, reward, (), {}) == ()
    assert set(climb_around(moves, reward, ())) == {*one, *other}


def test_what_is_decided_about_one_axis_can_be_decided_about_another() -> None:
    problem = case("perceptron").problem
    free = [
        d for d in problem.decisions.choices if isinstance(d, Shard) and d.axis == 0 and problem.decisions.offers(d)
    ]
    first = (free[0], next(d for d in free if d.group != free[0].group))
    both = {edit.into for edit in about_axes(Moves(problem), (*first, free[0]._replace(axis=1)))}
    assert tuple(d._replace(axis=1) for d in first) in both


def test_decisions_about_one_dimension_exchange_where_they_hold() -> None:
    problem = case("perceptron").problem
    one = next(
        to._replace(axis=0)
        for d in problem.decisions.choices
        if isinstance(d, Shard)
        for to in problem.decisions.variants(d)
        if isinstance(to, Shard) and to.unless != NOWHERE
    )
    other = one._replace(axis=1, unless=NOWHERE)
    exchanged = one._replace(unless=NOWHERE), other._replace(unless=one.unless)
    assert Edit((one, other), exchanged) in about_axes(Moves(problem), (one, other))
    assert (*exchanged,) in set(results(problem, (one, other), Edit((one, other), exchanged)))


def test_one_of_two_decisions_about_a_dimension_comes_to_hold_in_a_part_only() -> None:
    problem = case("perceptron").problem
    part = next(
        to
        for d in problem.decisions.choices
        if isinstance(d, Shard) and d.axis == 0
        for to in problem.decisions.parts(d)
        if isinstance(to, Shard)
    )
    plan = (part._replace(only=NOWHERE), part._replace(axis=1, only=NOWHERE))
    edits = Moves(problem, local=True).local_edits(plan)
    assert Edit(plan[:1], (part,)) in edits and Edit(plan, (part,)) in edits
    assert all(map(problem.decisions.offers, (part, *plan)))
    assert Moves(problem).local_edits(plan) == []


def test_a_part_is_split_along_another_group_first_where_most_time_is() -> None:
    """What is added holds in a part only, is about no group and axis that the plan has, and none of it is left out but
    where next to no time is spent."""
    source, _ = sample("vit_tiny")
    evaluator = evaluator_of(source, "v5e-16")
    problem = evaluator.problem
    plan = strategy(problem, "data-parallel")
    held = {d[:2] for d in plan if isinstance(d, Shard)}
    added = [edit.into[0] for edit in Moves(problem, local=True).local_additions(plan)]
    expected = {
        to
        for d in problem.decisions.choices
        if isinstance(d, Shard) and d[:2] not in held
        for to in problem.decisions.parts(d)
    }
    assert {d._replace(sides=()) for d in added} == {d._replace(sides=()) for d in expected} != set()
    spent = evaluator.seconds_between(plan)
    at_stake = [spent.get((d.group, d.only), 0.0) for d in added if isinstance(d, Shard)]
    ordered = [e.into[0] for e in Moves(problem, local=True, seconds=evaluator.seconds_between).local_additions(plan)]
    least = LEAST_STAKE * max(spent.values())
    assert sorted((s for s in at_stake if s > least), reverse=True) == [spent[d.group, d.only] for d in ordered]
    assert Moves(problem).local_additions(plan) == []


def test_what_is_added_may_leave_some_ops_alone_at_once() -> None:
    """Where the plan has nothing of a group over an axis; the units are not among it, and what it leaves is not what
    is at stake."""
    source, _ = sample("vit_tiny")
    evaluator = evaluator_of(source, "v5e-16")
    problem = evaluator.problem
    plan = strategy(problem, "data-parallel")
    held = {d[:2] for d in plan if isinstance(d, Shard)}
    first = {d[:2]: d for d in reversed(problem.decisions.choices) if isinstance(d, Shard) and d[:2] not in held}
    expected = {to for d in first.values() for to in problem.decisions.variants(d)} - {*problem.decisions.choices}
    moves = Moves(problem)
    assert {edit.into for edit in moves.varied_additions(plan)} == {(d,) for d in expected} != set()
    spent = evaluator.seconds_between(plan)

    def stake(d: Shard) -> float:
        return spent[d.group, d.group] - spent.get((d.group, d.unless), 0.0)

    added = [e.into[0] for e in Moves(problem, seconds=evaluator.seconds_between).varied_additions(plan)]
    stakes = [stake(d) for d in added if isinstance(d, Shard)]
    least = LEAST_STAKE * max(spent.values())
    assert stakes == sorted((s for d in expected if isinstance(d, Shard) and (s := stake(d)) > least), reverse=True)


def test_a_climb_adds_what_leaves_some_ops_alone() -> None:
    """Where nothing else is rewarded, it ends with it."""
    source, _ = sample("vit_tiny")
    problem = evaluator_of(source, "v5e-16").problem
    plan = strategy(problem, "data-parallel")
    wanted = Moves(problem).varied_additions(plan)[-1].into[0]
    reached = climb(Moves(problem), lambda to: float(wanted in to), plan, {}, hands_over=False)
    assert wanted in reached


def test_a_part_with_next_to_none_of_the_time_is_left_alone() -> None:
    source, _ = sample("vit_tiny")
    problem = evaluator_of(source, "v5e-16").problem
    plan = strategy(problem, "data-parallel")
    wanted, less = [
        edit
        for edit in dict.fromkeys(e.into[0] for e in Moves(problem, local=True).local_additions(plan))
        if isinstance(edit, Shard) and edit.axis == 0
    ][:2]
    spent = {(wanted.group, wanted.only): 1.0, (less.group, less.only): 0.99 * LEAST_STAKE}
    moves = Moves(problem, local=True, seconds=lambda _: spent)
    assert {(d[0], d.only) for edit in moves.local_additions(plan) for d in edit.into if isinstance(d, Shard)} == {
        (wanted.group, wanted.only)
    }


def test_searches_know_where_the_time_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where decisions are added that hold in a part only, and where such that leave some ops alone."""
    of = case("perceptron")
    asked = list[Plan]()
    whole = Evaluator.seconds_between
    ordered = set[str]()

    def heard(evaluator: Evaluator, plan: Plan) -> Any:
        asked.append(plan)
        return whole(evaluator, plan)

    def listen(name: str) -> None:
        additions = getattr(Moves, name)

        def added(moves: Moves, plan: Plan) -> list[Edit]:
            before = len(asked)
            found: list[Edit] = additions(moves, plan)
            if len(asked) > before:
                ordered.add(name)
            return found

        monkeypatch.setattr(Moves, name, added)

    monkeypatch.setattr(Evaluator, "seconds_between", heard)
    listen("local_additions")
    listen("varied_additions")
    run_search(Evaluator(of.problem), "mcts", 0)
    assert ordered == {"local_additions", "varied_additions"}


def test_parts_that_gain_are_among_those_where_most_time_is() -> None:
    """Splitting some of a graph network's products otherwise than an expert does makes it faster, and which is seen
    early."""
    source, _ = sample("gns_tiny")
    evaluator = evaluator_of(source, "v5e-16")
    problem, plan = evaluator.problem, starting_plans(evaluator.problem)[0]
    moves = Moves(problem, local=True, seconds=evaluator.seconds_between)

    def best(edits: list[Edit]) -> float:
        return min(evaluator.cost(to).step_seconds for edit in edits for to in results(problem, plan, edit))

    added, seconds = moves.local_additions(plan), evaluator.cost(plan).step_seconds
    assert best(added[:10]) < 0.995 * seconds
    assert best(added[:10]) == best(added)
    reached = climb(moves, lambda to: -evaluator.cost(to).step_seconds, plan, {})
    assert evaluator.cost(reached).step_seconds <= best(added)


def test_a_line_adds_what_holds_in_a_part_only() -> None:
    """Where nothing else is rewarded, the climb of parts ends with it."""
    source, _ = sample("vit_tiny")
    problem = evaluator_of(source, "v5e-16").problem
    moves, plan = Moves(problem, local=True), strategy(problem, "data-parallel")
    wanted = moves.local_additions(plan)[-1].into[0]
    assert wanted in climb(moves, lambda to: float(wanted in to), plan, {})
    assert wanted not in climb(Moves(problem), lambda to: float(wanted in to), plan, {})


def test_no_more_time_is_spent_between_two_groups_than_where_either_is() -> None:
    """Nor is more spent where one group is than in all, of which that is most."""
    source, _ = sample("vit_tiny")
    evaluator = evaluator_of(source, "v5e-16")
    plan = strategy(evaluator.problem, "data-parallel")
    spent, step = evaluator.seconds_between(plan), evaluator.cost(plan).step_seconds
    assert 0.5 * step < max(spent.values()) <= step * (1 + 1e-9)
    assert all(spent[one, other] == spent[other, one] <= spent[one, one] for one, other in spent)


def test_families_of_groups_are_edited_at_once() -> None:
    """Layers of a U-Net have channels of their own: all that are split alike leave the same ops, or change axes."""
    source, _ = sample("unet_tiny")
    problem = evaluator_of(source, "v5e-16").problem
    members = defaultdict[int, list[Shard]](list)
    for d in problem.decisions.choices:
        if isinstance(d, Shard) and d.axis == 0 and d.unless == NOWHERE and not any(d.sides):
            members[problem.dimensions.groups[d.group].family].append(d)
    several = max(members.values(), key=len)
    plan = problem.canonical(tuple(several))
    edits = families(Moves(problem), plan)
    assert all(len(edit.out) == len(edit.into) > 1 and set(edit.out) <= set(several) for edit in edits)
    assert any({d.axis for d in edit.into} == {1} for edit in edits)
    assert any(len({d.unless for d in edit.into if isinstance(d, Shard)} - {NOWHERE}) == 1 for edit in edits)
    assert all(any(True for _ in results(problem, plan, edit)) for edit in edits)
    assert families(Moves(problem), plan[:1]) == []
    assert set(edits) <= set(Moves(problem).exchanges(plan))


def test_decoding_has_decisions_that_hold_in_a_part_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of queries and outputs are split over both axes, sequences over one of them where tokens attend."""
    source, _ = sample("itx_decode")
    problem = evaluator_of(source, "v5e-16").problem
    starts = starting_plans(problem)
    found = run_search(Evaluator(problem), "mcts", 0, 8000, starts=starts)
    assert any(isinstance(d, Shard) and d.only != NOWHERE for d in found.plan)
    monkeypatch.setattr(DecisionSpace, "parts", lambda _space, _decision: [])
    everywhere = run_search(Evaluator(problem), "mcts", 0, 8000, starts=starts)
    assert found.cost.step_seconds < 0.95 * everywhere.cost.step_seconds


def test_what_is_split_at_work_only_rests_whole() -> None:
    """Of each edit all kinds of arguments that would rest split by what it puts in, and are not kept whole already."""
    problem = case("perceptron").problem
    moves, rests = Moves(problem), problem.decisions.rests
    (plan, *_) = starting_plans(problem)
    for held in (plan, problem.canonical((*plan, next(iter(rests))))):
        edits = [*(Edit((), unit) for unit in moves.after(held)), *moves.variations(held)]
        expected = [
            Edit(out, (*into, *kept))
            for out, into in edits
            if (
                kept := [
                    d
                    for d, groups in rests.items()
                    if d not in held
                    and any((g, d.axis) in {i[:2] for i in into if isinstance(i, Shard)} for g in groups)
                ]
            )
        ]
        assert moves.at_work_only(held) == expected != []


def test_a_kind_of_arguments_can_rest_whole_over_all_axes_at_once() -> None:
    problem = case("perceptron").problem
    kept, groups = next(iter(problem.decisions.rests.items()))
    plan = tuple(Shard(min(groups), axis) for axis in (0, 1))
    together = {edit.into for edit in Moves(problem).rests(plan)}
    assert (kept._replace(axis=0), kept._replace(axis=1)) in together
