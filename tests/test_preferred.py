"""A known strategy is preferred to a plan that is hardly faster."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from programs import SAMPLES, evaluator_of, sample

from toast_cli.frontend import load
from toast_cli.pipeline import partition, problem_of
from toast_cli.plan.decisions import Plan, parse_goal
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.memory_fit import RISK
from toast_cli.report.build import build_report
from toast_cli.request import Request
from toast_cli.search.incumbent import SearchResult
from toast_cli.tactics import PricedStrategy, parse_tactics, priced_strategies, strategy
from toast_cli.tactics.strategies import MARGIN, preferred, with_batch_over_data

NEARLY_ALL = -1.0  # of the memory limit, so that the plan may not fit


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    return evaluator_of(sample("mlp_tiny")[0], "v4-32")


def found(evaluator: Evaluator, plan: Plan, *, seconds: float, peak_bytes: float, fits: bool = True) -> SearchResult:
    """A search that found `plan`, which costs so much."""
    cost = evaluator.exact_cost(plan)
    cost = replace(
        cost, compute_seconds=seconds, communication_seconds=0.0, exposed_seconds=None, peak_bytes=peak_bytes
    )
    return SearchResult(plan, cost, fits, 100, 50, 1.0, "iterations")


def fastest_expert(evaluator: Evaluator) -> PricedStrategy:
    return min(priced_strategies(evaluator)[0].values(), key=lambda one: one.rank)


@pytest.mark.parametrize(
    ("faster", "memory", "fits", "is_taken"),
    [
        (0.9 * MARGIN, 1.0, True, True),  # nearly as fast, as much memory
        (0.9 * MARGIN, 0.1, True, True),  # more memory, of which there is plenty
        (1.1 * MARGIN, 0.1, True, False),  # the same where the gain is larger
        (1.1 * MARGIN, 1.0, True, False),  # the gain is worth it
        (0.9 * MARGIN, 1.0, False, False),  # nothing fits, so that memory is what counts
        (0.9 * RISK, NEARLY_ALL, True, True),  # a plan that may not fit
        (1.1 * (MARGIN + RISK + MARGIN * RISK), NEARLY_ALL, True, False),
    ],
)
def test_a_strategy_within_the_margin_is_taken(
    evaluator: Evaluator, faster: float, memory: float, fits: bool, is_taken: bool
) -> None:
    best = fastest_expert(evaluator)
    other = strategy(evaluator.problem, "megatron")
    seconds = best.cost.step_seconds / (1 + faster)
    peak = evaluator.problem.mesh.limit_bytes if memory == NEARLY_ALL else memory * best.cost.peak_bytes
    result = found(evaluator, other, seconds=seconds, peak_bytes=peak, fits=fits)
    _, taken = preferred((evaluator, result))
    assert taken.strategy == (best.name if is_taken else "")
    assert taken.plan == (best.plan if is_taken else other)
    assert taken.fastest == ((evaluator.problem, other, result.cost) if is_taken else None)


@pytest.mark.parametrize(
    ("slower", "memory", "other", "hidden", "is_taken"),
    [
        (0.9 * MARGIN, 0.5, "zero2", 0.0, True),  # fewer decisions
        (0.9 * MARGIN, 2.0, "zero2", 0.0, False),  # fewer, but the other one is better in both step and memory
        (0.9 * MARGIN, 2.0, "zero2", 0.5, True),  # better in the step only if its communication overlaps
        (1.1 * MARGIN, 0.5, "zero2", 0.0, False),
        (0.9 * MARGIN, 2.0, "fsdp+expert", 0.0, False),
        (0.9 * MARGIN, 2.0, "zero2 x megatron", 0.0, True),  # simpler
        (1.1 * MARGIN, 2.0, "zero2 x megatron", 0.0, False),
        (-0.001, 2.0, "zero2 x megatron", 0.0, True),
    ],
)
def test_of_known_strategies_the_simplest_is_taken(
    evaluator: Evaluator,
    monkeypatch: pytest.MonkeyPatch,
    slower: float,
    memory: float,
    other: str,
    hidden: float,
    is_taken: bool,
) -> None:
    """Plain FSDP rather than another strategy; the search's plan is as fast as that one, or 4 % faster where FSDP is
    no slower than it."""
    longer, shorter = (priced_strategies(evaluator)[0][name] for name in ("zero2", "fsdp"))
    assert len(shorter.plan) < len(longer.plan)
    cost = replace(longer.cost, compute_seconds=1.0, communication_seconds=0.0, peak_bytes=1e6)
    costs = {
        longer.plan: replace(cost, communication_seconds=hidden, exposed_seconds=0.0),
        shorter.plan: replace(cost, compute_seconds=1.0 + slower, peak_bytes=memory * 1e6),
    }
    known = {
        one.name: replace(one, name=name, axes="", cost=costs[one.plan])
        for one, name in ((longer, other), (shorter, "fsdp"))
    }
    monkeypatch.setattr(sys.modules[preferred.__module__], "priced_strategies", lambda _: (known, {}))
    monkeypatch.setattr(sys.modules[preferred.__module__], "without_idle", lambda _, plan: plan)
    monkeypatch.setattr(evaluator, "exact_cost", lambda plan: costs[plan])
    fastest = replace(cost, compute_seconds=1.0 / 1.04 if slower < 0 else 1.0)
    result = SearchResult((), fastest, True, 100, 50, 1.0, "iterations")
    assert preferred((evaluator, result))[1].strategy == ("fsdp" if is_taken else other)


def test_what_would_fill_the_memory_is_not_preferred(evaluator: Evaluator) -> None:
    cost = fastest_expert(evaluator).cost
    tight = replace(evaluator.problem.mesh, limit_bytes=int(1.1 * cost.peak_bytes))
    small = Evaluator(replace(evaluator.problem, mesh=tight))
    other = strategy(small.problem, "megatron")
    result = found(small, other, seconds=cost.step_seconds / 1.01, peak_bytes=0.5 * cost.peak_bytes)
    assert preferred((small, result))[1].plan == other


def test_decisions_that_gain_little_go(evaluator: Evaluator) -> None:
    """A decision about an axis that the plan has spent changes nothing."""
    problem = evaluator.problem
    plan = strategy(problem, "fsdp")
    longer = problem.canonical((*plan, *strategy(problem, "megatron")))
    cost = evaluator.exact_cost(longer)
    assert len(longer) > len(plan)
    assert evaluator.exact_cost(plan).step_seconds <= (1 + MARGIN) * cost.step_seconds
    result = SearchResult(longer, cost, True, 100, 50, 1.0, "iterations")
    _, taken = preferred((evaluator, result))
    assert len(taken.plan) < len(longer)
    assert taken.cost.step_seconds <= (1 + MARGIN) * cost.step_seconds


def test_who_says_what_is_best_gets_it() -> None:
    """`--minimise step_time` takes the fastest plan, and the report says so where another was preferred."""
    (path,) = (str(p) for p in SAMPLES.iterdir() if p.name == "vit_tiny.stablehlo.zst")
    by_default = partition(Request(path, "v4-32", iterations=20))
    fastest = partition(Request(path, "v4-32", iterations=20, minimise=("step_time",)))
    assert fastest.result.fastest is None
    assert fastest.result.cost.step_seconds <= by_default.result.cost.step_seconds
    said = [note for note in by_default.report.analysis.notes if "--minimise step_time" in note]
    assert len(said) == bool(by_default.result.strategy)


def test_a_known_strategy_takes_no_tactic_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-2 is FSDP with weights that are replicated after all."""
    fsdp = Evaluator(parse_tactics(["fsdp"]).state(evaluator_of(sample("t2b_tiny")[0], "v4-32").problem))
    fixed, zero2 = fsdp.problem.fixed, priced_strategies(fsdp)[0]["zero2"]
    assert zero2.plan[: len(fixed)] == fixed
    monkeypatch.setattr(sys.modules[preferred.__module__], "priced_strategies", lambda _: ({"zero2": zero2}, {}))
    result = found(fsdp, fixed, seconds=zero2.cost.step_seconds, peak_bytes=zero2.cost.peak_bytes)
    assert preferred((fsdp, result))[1].plan == fixed


@pytest.mark.parametrize(("longer", "is_taken"), [(0.9 * MARGIN, True), (1.1 * MARGIN, False)])
def test_the_shortest_plan_on_any_mesh_is_taken(monkeypatch: pytest.MonkeyPatch, longer: float, is_taken: bool) -> None:
    module = sys.modules[preferred.__module__]
    monkeypatch.setattr(module, "priced_strategies", lambda _: ({}, {}))
    monkeypatch.setattr(module, "shortened", lambda _, plan, *others: plan)
    path = str(SAMPLES / "mlp_tiny.mlir")
    two, one = (Evaluator(problem_of(path, "v4-32", shape)) for shape in ("data=8,model=2", "data=16"))
    plan = strategy(one.problem, "fsdp")
    cost = one.exact_cost(plan)
    other = SearchResult(plan, cost, True, 100, 50, 1.0, "iterations")
    seconds = cost.step_seconds / (1 + longer)
    result = found(two, strategy(two.problem, "fsdp x megatron"), seconds=seconds, peak_bytes=cost.peak_bytes)
    evaluator, taken = preferred((two, result), [(one, other)])
    assert (evaluator is one) == is_taken
    assert not taken.strategy
    notes = build_report(load(path), evaluator, taken, "mcts", 0).analysis.notes
    assert any("decisions on data=8,model=2 that is predicted 4.3% faster" in note for note in notes) == is_taken


def test_a_bound_on_an_axis_is_read_on_the_mesh_that_has_it() -> None:
    """Strategies on one axis are compared with a plan on two, of which a bound names the second."""
    goal, path = parse_goal((), ("communication[model]<=1s",)), str(SAMPLES / "mlp_tiny.mlir")
    two, one = (
        Evaluator(replace(problem_of(path, "v4-32", shape), goal=goal)) for shape in ("data=8,model=2", "data=16")
    )
    strategies = priced_strategies(one)[0].values()
    best = min(strategies, key=lambda known: known.rank)
    result = found(two, strategy(two.problem, "fsdp x megatron"), seconds=best.cost.step_seconds, peak_bytes=1e6)
    evaluator, taken = preferred((two, result), [(one, result)])
    assert evaluator is one and taken.strategy == "data-parallel"


@pytest.mark.parametrize(("mesh", "exchanged"), [("v5e-16", True), ("v4-32", False)])
def test_of_equal_axes_the_one_called_data_splits_the_batch(mesh: str, exchanged: bool) -> None:
    evaluator = evaluator_of(sample("mlp_tiny")[0], mesh)
    usual = strategy(evaluator.problem, "fsdp x megatron")
    turned = evaluator.problem.canonical(tuple(decision._replace(axis=1 - decision.axis) for decision in usual))
    result = SearchResult(turned, evaluator.exact_cost(turned), True, 100, 50, 1.0, "iterations")
    assert with_batch_over_data(evaluator, result).plan == (usual if exchanged else turned)
