"""Ops that do otherwise than decisions say: what that means, that it is found, and that it can be told and kept."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from brute_force import best_of_all
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Case, arg, case_of, round_mesh
from random_programs import cases, plans
from small_programs import PROGRAMS
from test_one_meaning import disagreements
from test_reference_cost import reference

from toast_cli.cli import main
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.evaluate.iteration_memo import IterationMemo
from toast_cli.plan.decisions import PLACE, Override, Plan, Replicate, Shard, length_of
from toast_cli.plan.goal import parse_goal
from toast_cli.plan.iteration import NO_PART
from toast_cli.plan.parts import fine_parts, ops_of_parts, parted_into, with_parts
from toast_cli.plan.problem import Problem
from toast_cli.plan.saved import apply_plan, carried_over, read_plan, save_plan, with_places
from toast_cli.program.caches import has_caches
from toast_cli.search import certify, finish
from toast_cli.search import overrides as search_overrides
from toast_cli.search.every_split import every_iteration, splits_near
from toast_cli.search.finish import finished
from toast_cli.search.model import SearchResult
from toast_cli.search.objective import PRICE
from toast_cli.search.override_places import Place, otherwise, overrides
from toast_cli.search.overrides import overridden
from toast_cli.search.run import run_search
from toast_cli.search.selection import Bound
from toast_cli.tactics import starting_plans


@st.composite
def overridden_cases(draw: st.DrawFn) -> tuple[Case, Plan]:
    """A random program some of whose ops are in parts, and a plan that says something about them."""
    case = draw(cases())
    alone = fine_parts(case.problem, 10_000)
    chosen = draw(st.sets(st.sampled_from(sorted(set(alone))), max_size=4))
    problem = with_parts(case.problem, [part if part in chosen else NO_PART for part in alone])
    said = []
    for axis in range(2):
        places = []
        for part, ops in ops_of_parts(problem).items():
            slots = min(len(problem.patterns[problem.op_pattern[op]].groups) for op in ops)
            of = draw(st.lists(st.integers(0, slots - 1), max_size=2, unique=True)) if slots else []
            places.append((part, tuple(of)))
        if places:
            said.append(Override(axis, tuple(places)))
    plan = problem.canonical((*draw(plans(problem)), *said))
    return Case(case.source, Evaluator(problem)), plan


@settings(max_examples=40, deadline=None)
@given(overridden_cases())
def test_an_override_comes_before_all_other_decisions(drawn: tuple[Case, Plan]) -> None:
    """Where its slot can be split, it is; where there is none, the axis splits nothing. All else is as it was."""
    case, plan = drawn
    problem, sizes = case.problem, case.problem.mesh.sizes
    others = tuple(d for d in plan if not isinstance(d, Override))
    about = {part: d.axis for d in plan if isinstance(d, Override) for part, _ in d.places}
    rows = IterationMemo(problem)
    steps = rows.steps(plan)
    numbers = [rows.row(view, steps) for view in rows.views]
    for number, pattern in enumerate(problem.patterns):
        found = problem.iterate(number, plan)
        assert rows.iteration(number, numbers) == found
        if pattern.part not in about:
            assert found == problem.iterate(number, others)
        for decision in (d for d in plan if isinstance(d, Override)):
            slots = dict(decision.places).get(pattern.part)
            if slots == ():
                assert all(decision.axis not in axes for axes in found.slot_axes)
            elif slots and decision.axis == 0 and pattern.form.kinds[slots[0]].name != "BLOCKED":
                fits = all(extent % sizes[0] == 0 for extent in pattern.form.extents[slots[0]])
                if fits and not pattern.form.majors[slots[0]]:
                    assert 0 in found.slot_axes[slots[0]]


@settings(max_examples=40, deadline=None)
@given(overridden_cases())
def test_it_means_the_same_to_everyone(drawn: tuple[Case, Plan]) -> None:
    """The plain evaluator, the lowered program and the report agree with the evaluator."""
    case, plan = drawn
    cost = case.evaluator.exact_cost(plan)
    found = (cost.compute_seconds, cost.communication_seconds, cost.peak_bytes, cost.argument_bytes)
    assert found == pytest.approx(reference(case.problem, plan, case.evaluator.profile), rel=1e-9, abs=1e-12)
    assert disagreements(case.source, case.evaluator, plan) == []


@settings(max_examples=30, deadline=None)
@given(drawn=overridden_cases())
def test_it_can_be_kept(drawn: tuple[Case, Plan], tmp_path_factory: pytest.TempPathFactory) -> None:
    case, plan = drawn
    file = tmp_path_factory.mktemp("plans") / "plan.json"
    file.write_bytes(save_plan(case.problem, plan))
    saved = read_plan(str(file))
    whole = with_parts(case.problem, [NO_PART] * len(case.problem.op_pattern))
    again = with_places(whole, saved)
    carried, notes = carried_over(again, saved)
    kept = [d for d in carried if isinstance(d, Override)]
    said = [d for d in plan if isinstance(d, Override)]
    assert [d.axis for d in kept] == [d.axis for d in said]
    assert not any("single ops" in note for note in notes)
    same = (*(d for d in plan if not isinstance(d, Override)), *kept)
    assert Evaluator(again).exact_cost(same).step_seconds == case.evaluator.exact_cost(plan).step_seconds


@cache
def small(name: str, mesh: tuple[tuple[str, int], ...] = (("data", 4), ("model", 2))) -> tuple[Case, SearchResult]:
    """What a short search finds: of axial attention a longer one leaves no more than 4 % to gain."""
    of, iterations = PROGRAMS[name], 400 if name == "axial attention" else 2000
    case = case_of(of.run, *of.shapes, donate=of.donate, mesh=round_mesh(**dict(mesh)))
    return case, run_search(case.evaluator, "mcts", 0, iterations, starts=starting_plans(case.problem))


@pytest.mark.parametrize("name", ["attention, short", "block", "axial attention", "recurrence"])
def test_what_no_decision_says_is_found(name: str) -> None:
    """Keys and values whole along the sequence where all else is split along it; one strand of an array that has a
    dimension twice left alone; gates along the batch. A recurrence leaves its state where the next step reads it, and
    the bound does not ask for that."""
    case, found = small(name)
    best = best_of_all(case.problem).seconds
    assert found.cost.step_seconds > 1.04 * best
    evaluator, better = overridden(case.evaluator, found, starting_plans(case.problem), PRICE, place_must_gain=0.0)
    assert better.cost.step_seconds <= (1.06 if name == "recurrence" else 1.01) * best
    assert any(isinstance(d, Override) for d in better.plan)
    assert evaluator.exact_cost(better.plan) == better.cost
    fresh = Evaluator(evaluator.problem).exact_cost(better.plan)
    assert fresh.step_seconds == pytest.approx(better.cost.step_seconds, rel=1e-9)


def test_it_is_found_again() -> None:
    case, found = small("attention, short")
    plans = {overridden(Evaluator(case.problem), found, starting_plans(case.problem))[1].plan for _ in range(2)}
    assert len(plans) == 1
    assert any(isinstance(d, Override) for d in plans.pop())


def test_what_gains_less_than_asked_for_is_not_said() -> None:
    case, found = small("axial attention")
    evaluator, same = overridden(case.evaluator, found, (), must_gain=0.9)
    assert evaluator is case.evaluator
    assert same.plan == found.plan


def test_each_kind_of_op_that_does_otherwise_must_gain_something() -> None:
    """With a price on each of them fewer do, and none where they gain less than that."""
    case, found = small("axial attention")

    def places(each: float) -> int:
        _, better = overridden(case.evaluator, found, starting_plans(case.problem), PRICE, place_must_gain=each)
        return sum(len(decision.places) for decision in better.plan if isinstance(decision, Override))

    assert places(0.0) > places(0.005) > places(0.5) == 0


def test_a_gain_that_was_promised_and_is_not_there_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assignments are priced at no more than they cost; the exact cost counts."""
    case, found = small("attention, long")
    plan, run = found.plan, search_overrides._Search.run
    monkeypatch.setattr(search_overrides._Search, "run", lambda of, cheapest, must_gain: run(of, cheapest, PRICE))
    assert overridden(case.evaluator, found, starting_plans(case.problem), 0.05)[1].plan == plan
    assert overridden(case.evaluator, found, starting_plans(case.problem), 0.01)[1].plan != plan


def test_every_way_to_split_an_op_can_be_said() -> None:
    """Scattered results too, on whichever dimension or not at all, whatever decisions about groups there are, and each
    op with its axes in an order of its own."""
    case = case_of(lambda x, w: (x @ w) @ w, arg(16, 16), arg(16, 16))
    problem = with_parts(case.problem, list(range(len(case.program.ops))))
    shards = [d for d in problem.decisions.choices if isinstance(d, Shard)]
    first, second = (problem.op_pattern[k] for k, op in enumerate(case.program.ops) if op.name.endswith("dot_general"))
    ways = every_iteration(problem.patterns[first], problem.mesh.sizes)
    assert any(any(way.scattered) for way in ways)
    for by_groups in ((), *((d,) for d in shards), *permutations(shards, 2)):
        plan = problem.canonical(tuple(by_groups))
        picked = [problem.iterate(pattern, plan) for pattern in range(len(problem.patterns))]
        for number, way in enumerate(ways):
            picked[first], picked[second] = way, ways[-number]
            said = problem.canonical((*plan, *overrides(problem, otherwise(problem, plan, picked))))
            for pattern in (first, second):
                found = problem.iterate(pattern, said)
                assert (found.slot_axes, found.shardings) == (picked[pattern].slot_axes, picked[pattern].shardings)


def test_ops_that_name_axes_in_one_order_take_one_decision_for_each() -> None:
    places = [Place(0, {0: (0,), 1: (1,)}), Place(1, {0: (1,), 1: ()}), Place(2, {1: (0,)})]
    case = case_of(lambda x, w: x @ w, arg(16, 16), arg(16, 16))
    problem = with_parts(case.problem, list(range(len(case.program.ops))))
    parts = [problem.patterns[place.pattern].part for place in places]
    said = overrides(problem, places)
    assert [d.axis for d in said] == [0, 1]
    assert [dict(d.places) for d in said] == [
        {parts[0]: (0,), parts[1]: (1,)}, {parts[0]: (1,), parts[1]: (), parts[2]: (0,)},
    ]  # fmt: skip
    other = overrides(problem, [*places[:2], Place(2, {1: (0,), 0: ()})])
    assert [d.axis for d in other] == [0, 1, 0]


def test_nothing_is_said_against_the_user() -> None:
    """Not where decisions are fixed, axes closed, or something else than time is to be small."""
    case, found = small("axial attention")
    for changes in (
        {"fixed": found.plan[:1]},
        {"closed": frozenset({0})},
        {"goal": parse_goal(("peak_memory",))},
    ):
        problem: Problem = replace(case.problem, **changes)
        evaluator = Evaluator(problem)
        assert overridden(evaluator, found, (), PRICE) == (evaluator, found)


def test_a_result_that_takes_over_a_buffer_is_in_the_part_of_its_argument() -> None:
    case = case_of(lambda w, x: (w - x.T @ x, x.sum()), arg(16, 16), arg(8, 16), donate=(0,))
    parts = fine_parts(case.problem, 1000)
    first = len(case.program.ops) - len(case.program.results)
    assert parts[0] == parts[first]
    assert len(set(parts)) == len(parts) - 1


def test_ops_are_told_apart_only_as_far_as_asked_for() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jax.nn.relu(x @ w) ** 2)

    case = case_of(lambda w, x: jax.grad(loss)(w, x), arg(16, 16), arg(8, 16))
    assert len(set(fine_parts(case.problem, 1))) == len(case.problem.patterns)
    assert len(set(fine_parts(case.problem, 1000))) > len(case.problem.patterns)


def test_ways_near_a_plan_differ_in_one_thing() -> None:
    case = case_of(lambda x, w: x @ w, arg(16, 16), arg(16, 16))
    (number,) = (case.problem.op_pattern[k] for k, op in enumerate(case.program.ops) if op.name.endswith("dot_general"))
    pattern, sizes = case.problem.patterns[number], case.problem.mesh.sizes
    both_on_one = ((0, 1), (), ())
    every = {iteration.slot_axes for iteration in every_iteration(pattern, sizes)}
    near = splits_near(pattern, sizes, both_on_one, (0, 1))
    assert near[0] == both_on_one
    assert set(near) <= every
    assert {((1,), (0,), ()), ((), (0, 1), ()), ((0,), (), ()), ((), (), ()), ((1, 0), (), ())} <= set(near)
    assert ((), (0,), (1,)) not in near
    held = splits_near(pattern, sizes, both_on_one, (0,))
    assert len(held) > 1
    assert all(1 in split[0] for split in held)


def test_a_search_ends_with_it_as_its_budget_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    case, found = small("axial attention")
    starts = tuple(starting_plans(case.problem))
    _, better = finished(case.evaluator, found, "mcts", starts)
    assert better.cost.step_seconds < 0.9 * found.cost.step_seconds
    assert better.evaluations > found.evaluations
    for name, iterations, seconds in (("greedy", None, None), ("mcts", 100, None), ("mcts", None, 0.1)):
        assert not any(
            isinstance(d, Override) for d in finished(case.evaluator, found, name, starts, iterations, seconds)[1].plan
        )
    asked: list[float | None] = []
    monkeypatch.setattr(finish, "overridden", lambda *of, **how: asked.append(how.get("seconds")) or of[:2])
    finished(case.evaluator, replace(found, seconds=1.0), "mcts", starts, None, 3.0)
    assert asked == []
    finished(case.evaluator, replace(found, seconds=1.0), "mcts", starts, None, 60.0)
    assert [seconds is not None and 50.0 < seconds <= 59.0 for seconds in asked] == [True]
    stopped = replace(found, stopped="interrupted")
    assert finished(case.evaluator, stopped, "mcts", starts) == (case.evaluator, stopped)


def test_a_proof_is_of_the_whole_space() -> None:
    """What decisions about groups cannot say keeps a plan from being proven; with overrides it is."""
    of = PROGRAMS["axial attention"]
    case = case_of(of.run, *of.shapes, mesh=round_mesh(data=4))
    starts = tuple(starting_plans(case.problem))
    by_groups = run_search(case.evaluator, "exact", 0, starts=starts)
    assert not by_groups.proven
    _, proven = finished(case.evaluator, by_groups, "exact", starts)
    assert proven.proven
    assert proven.cost.step_seconds < by_groups.cost.step_seconds
    assert proven.cost.step_seconds <= proven.lower_bound * 1.01


def decode(cache: Any, x: Any, w: Any) -> Any:
    """Writes a row of a cache in each trip, and attends to all of it."""

    def step(at: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        cache, x = carry
        cache = jax.lax.dynamic_update_slice(cache, x @ w, (at, 0))
        return cache, jax.nn.softmax(x @ cache.T) @ cache

    return jax.lax.fori_loop(0, 8, step, (cache, x))


def decode_late(cache: Any, x: Any, w: Any) -> Any:
    """Attends to what earlier trips have written, and writes then."""

    def step(at: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        cache, x = carry
        y = jax.nn.softmax(x @ cache.T) @ cache
        return jax.lax.dynamic_update_slice(cache, x @ w, (at, 0)), y

    return jax.lax.fori_loop(0, 8, step, (cache, x))


def test_a_cache_is_told_from_what_a_scan_gathers() -> None:
    """Nothing is said of programs with caches unless a proof is asked for; see docs/benchmarks.md."""
    assert has_caches(case_of(decode, arg(8, 16), arg(1, 16), arg(16, 16)).program)
    assert has_caches(case_of(decode_late, arg(8, 16), arg(1, 16), arg(16, 16)).program)
    of = PROGRAMS["recurrence"]
    assert not has_caches(case_of(of.run, *of.shapes).program)


def test_parts_that_are_not_there() -> None:
    case = case_of(lambda x: x @ x, arg(8, 8))
    for places in ([((99,), ())], [((0,), (5,))], [((0, 1), ()), ((1,), ())]):
        with pytest.raises(ValueError, match=r"otherwise|split"):
            parted_into(case.problem, places)


def test_places_count_as_much_as_decisions() -> None:
    said = Override(0, ((0, (1,)), (1, ()), (2, ())))
    assert length_of((Shard(0, 0), Replicate(0, 0))) == 2
    assert length_of((Shard(0, 0), said)) == pytest.approx(1 + 3 * PLACE)


AXIAL = PROGRAMS["axial attention"]


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report tells it, `explain` explains it, and a stored report and a kept plan lead to the same plan again."""
    program, spec, kept = tmp_path / "axial.mlir", "v5e-16", tmp_path / "plan.json"
    shapes = (arg(1, 256, 256, 64, dtype=jnp.bfloat16), *(arg(64, 64, dtype=jnp.bfloat16),) * 2)
    program.write_text(str(jax.jit(AXIAL.run).lower(*shapes).as_text()))
    report, again = tmp_path / "r.json", tmp_path / "again.json"
    command = ["partition", str(program), "--mesh", spec]
    assert main([*command, "--json", str(report), "--save-plan", str(kept), "-o", str(tmp_path / "o.mlir")]) == 0
    facts = json.loads(report.read_text())
    decisions = facts["plan"]["decisions"]
    number, said = next((k, d) for k, d in enumerate(decisions, 1) if d["kind"] == "override")
    assert f"{said['target']} use a different sharding" in " ".join(capsys.readouterr().out.split())
    assert sum(len(place["ops"]) for place in said["places"]) == said["classes"]
    assert main(["explain", str(program), "--mesh", spec, "--report", str(report), "--decision", str(number)]) == 0
    assert "use a different sharding over" in capsys.readouterr().out
    assert main([*command, "--plan", str(kept), "--json", str(again)]) == 0
    found = json.loads(again.read_text())
    assert found["predicted"]["step_seconds"] == pytest.approx(facts["predicted"]["step_seconds"], rel=1e-9)
    capsys.readouterr()

    wider = tmp_path / "wider.mlir"
    shapes = (arg(1, 256, 256, 128, dtype=jnp.bfloat16), *(arg(128, 128, dtype=jnp.bfloat16),) * 2)
    wider.write_text(str(jax.jit(AXIAL.run).lower(*shapes).as_text()))
    assert main(["partition", str(wider), "--mesh", spec, "--plan", str(kept)]) == 0
    assert "it is about single ops" in " ".join(capsys.readouterr().out.split())

    other = tmp_path / "other.mlir"
    other.write_text(str(jax.jit(lambda x: x @ x).lower(arg(64, 64)).as_text()))
    assert main(["partition", str(other), "--mesh", spec, "--plan", str(kept)]) == 0
    assert "it is about single ops" in " ".join(capsys.readouterr().out.split())
    assert main(["explain", str(other), "--mesh", spec, "--report", str(report)]) == 2
    assert "another program" in capsys.readouterr().err


def test_a_kept_plan_is_fixed_and_its_problem_knows_the_parts(tmp_path: Path) -> None:
    case, found = small("axial attention")
    evaluator, better = overridden(case.evaluator, found, ())
    file = tmp_path / "plan.json"
    file.write_bytes(save_plan(evaluator.problem, better.plan))
    problem = apply_plan(case.problem, read_plan(str(file)))
    assert Evaluator(problem).exact_cost(problem.fixed).step_seconds == pytest.approx(better.cost.step_seconds)


def test_who_does_not_wait_for_a_proof_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the solver is at it: nothing else is tried then."""
    case, found = small("axial attention", (("data", 4),))

    def interrupted(*_: object) -> Bound:
        signal.raise_signal(signal.SIGINT)
        return Bound()

    monkeypatch.setattr(certify, "bound", interrupted)
    monkeypatch.setattr(finish, "overridden", lambda *_: pytest.fail("still looking"))
    _, ended = finished(case.evaluator, found, "exact", ())
    assert ended.stopped == "interrupted"
    assert ended.plan == found.plan
