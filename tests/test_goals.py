"""Goals: how they are read, how they order plans, and what the command makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from programs import SAMPLES, arg, case_of, round_mesh

from toast_cli.base.errors import UsageError
from toast_cli.cli.app import run
from toast_cli.plan.decisions import Bound, Figure, Goal, Shard, parse_goal
from toast_cli.price.cost import Cost
from toast_cli.price.evaluator import Evaluator
from toast_cli.search.incumbent import Objective
from toast_cli.search.run import Settings, run_search

BLOCK = str(SAMPLES / "block_tiny.mlirbc.zst")
MLP = str(SAMPLES / "mlp_tiny.mlir")


@pytest.mark.parametrize(
    ("minimise", "subject_to", "goal"),
    [
        ([], [], Goal()),
        (["peak_memory"], [], Goal((Figure("peak_memory"),))),
        (["step_time", "peak_memory"], [], Goal((Figure("step_time"), Figure("peak_memory")))),
        (["step_time, peak_memory"], [], Goal((Figure("step_time"), Figure("peak_memory")))),
        (["communication[data]"], [], Goal((Figure("communication", "data"),))),
        ([], ["peak_memory<=24GiB"], Goal(bounds=(Bound(Figure("peak_memory"), 24 * 2.0**30),))),
        ([], [" communication[data] ≤ 20ms "], Goal(bounds=(Bound(Figure("communication", "data"), 0.02),))),
        ([], ["communication[data]<=0"], Goal(bounds=(Bound(Figure("communication", "data"), 0.0),))),
    ],
)
def test_goals_are_read(minimise: list[str], subject_to: list[str], goal: Goal) -> None:
    assert parse_goal(minimise, subject_to) == goal


@pytest.mark.parametrize(
    ("minimise", "subject_to", "what", "hint"),
    [
        (["speed"], [], "unknown metric 'speed'", "step_time"),
        (["step_time", "step_time"], [], "step_time is given twice", "once"),
        (["peak_memory[data]"], [], "has no meaning", "communication[AXIS]"),
        (["communication[]"], [], "has no meaning", "communication[AXIS]"),
        ([], ["peak_memory"], "cannot read", "24GiB"),
        ([], ["memory<=1GiB"], "unknown metric 'memory'", "peak_memory"),
        ([], ["peak_memory<=20ms"], "not an amount of memory", "28GiB"),
        ([], ["step_time<=20GiB"], "not a time", "0.5 ms"),
        ([], ["peak_memory>=24GiB"], "cannot read", "<="),
    ],
)
def test_goals_that_cannot_be_read_say_what_can(
    minimise: list[str], subject_to: list[str], what: str, hint: str
) -> None:
    with pytest.raises(UsageError) as error:
        parse_goal(minimise, subject_to)
    assert what in error.value.what
    assert hint in error.value.hint


def program(x: Any, w: Any, v: Any) -> Any:
    return jnp.tanh(x @ w) @ v


def evaluator(goal: Goal, limit: int = 2**40) -> Evaluator:
    of = case_of(program, arg(256, 512), arg(512, 2048), arg(2048, 512), mesh=round_mesh(data=4, model=2))
    mesh = replace(of.problem.mesh, limit_bytes=limit)
    return Evaluator(replace(of.problem, mesh=mesh, goal=goal))


def best(goal: Goal, limit: int = 2**40) -> tuple[Evaluator, Cost, bool]:
    found = evaluator(goal, limit)
    result = run_search(found, Settings(evaluations=30))
    return found, result.cost, result.fits


def test_each_figure_is_smallest_when_it_is_minimised() -> None:
    names = ("step_time", "peak_memory", "argument_memory", "compute")
    costs = {name: best(parse_goal([name]))[1] for name in names}
    read = {
        "step_time": lambda c: c.step_seconds,
        "peak_memory": lambda c: c.peak_bytes,
        "argument_memory": lambda c: c.argument_bytes,
        "compute": lambda c: c.compute_seconds,
    }
    for name in names:
        smallest = min(read[name](cost) for cost in costs.values())
        assert read[name](costs[name]) <= smallest * 1.006, name


def test_plans_equal_in_the_first_figure_are_told_apart_by_the_next() -> None:
    objective = Objective(
        replace(evaluator(parse_goal(["step_time", "peak_memory"])).problem), Cost(1.0, 0.0, 100.0, 50.0)
    )
    fast, lean, slow = Cost(1.0, 0.0, 100.0, 50.0), Cost(1.001, 0.0, 10.0, 5.0), Cost(2.0, 0.0, 1.0, 0.5)
    assert objective.rank((), lean) < objective.rank((), fast) < objective.rank((), slow)
    assert objective.reward((), lean) > objective.reward((), fast) > objective.reward((), slow)


def test_step_time_settles_what_the_goal_leaves_open() -> None:
    objective = Objective(evaluator(parse_goal(["peak_memory"])).problem, Cost(1.0, 0.0, 100.0, 50.0))
    assert objective.rank((), Cost(1.0, 0.0, 10.0, 5.0)) < objective.rank((), Cost(2.0, 0.0, 10.0, 5.0))


def test_what_exceeds_a_bound_loses_and_less_excess_is_better() -> None:
    goal = parse_goal([], ["step_time<=1s", "argument_memory<=10"])
    objective = Objective(evaluator(goal, limit=100).problem, Cost(1.0, 0.0, 100.0, 50.0))
    ordered = [
        Cost(0.9, 0.0, 99.0, 9.0),
        Cost(0.5, 0.0, 99.0, 11.0),
        Cost(1.2, 0.0, 99.0, 11.0),
        Cost(0.1, 0.0, 200.0, 50.0),
    ]
    ranks = [objective.rank((), cost) for cost in ordered]
    assert ranks == sorted(ranks)
    rewards = [objective.reward((), cost) for cost in ordered]
    assert rewards == sorted(rewards, reverse=True)
    assert [objective.met(cost) for cost in ordered] == [True, False, False, False]


def test_communication_is_told_apart_by_axis() -> None:
    found = evaluator(parse_goal([], ["communication[data]<=1s"]))
    plans = {axis: tuple(Shard(g, axis) for g in found.problem.weight_bytes) for axis in (0, 1)}
    for axis, plan in plans.items():
        cost = found.cost(plan)
        assert cost.axis_seconds[axis] == pytest.approx(cost.communication_seconds)
        assert cost.axis_seconds[1 - axis] == 0.0
    assert best(parse_goal([], ["communication[model]<=0"]))[1].axis_seconds[1] == 0.0


def test_a_bound_is_kept_when_it_can_be() -> None:
    _, free, _ = best(Goal())
    limit = int(free.peak_bytes * 0.9)
    _, bound, met = best(parse_goal([], [f"peak_memory<={limit}"]))
    assert met
    assert bound.peak_bytes <= limit


def test_a_bound_that_cannot_be_kept_is_a_result() -> None:
    _, cost, met = best(parse_goal([], ["step_time<=1ns"]))
    assert not met
    assert cost.step_seconds <= best(Goal())[1].step_seconds * 1.006  # what exceeds it least


# ---------------------------------------------------------------- the command


def test_the_report_says_what_was_minimised_and_which_bounds_hold(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    code = run(
        ["partition", MLP, "--mesh", "h100-8", "--minimise", "peak_memory", "--subject-to", "step_time<=10s",
         "--iterations", "30", "--json", str(report)]
    )  # fmt: skip
    assert code == 0
    out = capsys.readouterr().out
    assert "minimised  peak_memory" in out
    assert "✓ holds    step_time" in out
    facts = json.loads(report.read_text())["goal"]
    assert facts["minimised"] == ["peak_memory"]
    assert [(b["figure"], b["limit"], b["holds"]) for b in facts["bounds"]] == [("step_time", 10.0, True)]


def test_a_broken_bound_exits_like_what_does_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "out.mlir"
    code = run(
        [
            "partition",
            MLP,
            "--mesh",
            "h100-8",
            "--subject-to",
            "step_time<=1ns",
            "--iterations",
            "50",
            "-o",
            str(output),
        ]
    )
    out = capsys.readouterr().out
    assert code == 3
    assert not output.exists()
    assert "no plan found keeps all bounds" in out
    assert out.endswith("out.mlir was not written: the plan breaks a bound\n")


def test_an_unknown_axis_in_a_goal_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["partition", MLP, "--mesh", "v4-32", "--subject-to", "communication[dat]<=1ms"]) == 2
    err = capsys.readouterr().err
    assert "unknown mesh axis 'dat'" in err
    assert "data, model" in err
