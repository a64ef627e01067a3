"""Moves: what each neighbourhood proposes, and that all of it is plans."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import SAMPLES, Case, evaluator_of, sample
from random_programs import cases, plans
from sweeps import sweep

from toast_cli.dimensions import analyse
from toast_cli.frontend import load
from toast_cli.hardware import load_spec
from toast_cli.plan.decision_space import decision_space
from toast_cli.plan.decisions import NONE, Decision, Plan, Replicate, Shard
from toast_cli.plan.problem import Problem, make_problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.search.moves import LEAST_STAKE, NEIGHBOURHOODS, Edit, Moves, results, subject, suited
from toast_cli.tactics import starting_plans, strategy

FEW = 40  # edits of a neighbourhood that are looked at


def refuse(problem: Problem, before: Plan, edit: Edit, after: Plan) -> str:
    """Why a plan is none that searches may come to; empty if it is one."""
    subjects = [subject(d) if isinstance(d, Shard) else d for d in after]
    reasons = {
        "not canonical": after != problem.canonical(after),
        "nothing changed": after == before,
        "something is decided twice": len(set(subjects)) < len(subjects),
        "not what it was to start with": after[: len(problem.fixed)] != problem.fixed,
        "decisions that are not offered": not all(map(decision_space(problem).offers, after[len(problem.fixed) :])),
        "other decisions": set(after) != (set(before) - set(edit.out)) | set(edit.into),
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_every_edit_leads_to_plans(data: st.DataObject) -> None:
    of: Case = data.draw(cases())
    plan = suited(of.problem, data.draw(plans(of.problem)))
    moves = Moves(of.problem, of.evaluator.seconds_between)
    for name, neighbourhood in NEIGHBOURHOODS.items():
        for edit in neighbourhood(moves, plan)[:FEW]:
            for result in results(of.problem, plan, edit):
                assert not refuse(of.problem, plan, edit, result), (name, edit, result)


@pytest.mark.parametrize(
    ("sample_name", "spec"),
    sweep(
        [
            ("vit_tiny", "v5e-16"),
            ("rnn_tiny", "v5e-16"),
            ("moe_tiny", "h100-8"),
            ("itx_decode_tiny", "v5e-16"),
            ("unet_tiny", "v4-32"),
        ],
        ("rnn_tiny", "v5e-16"),
        ("moe_tiny", "h100-8"),
        ("itx_decode_tiny", "v5e-16"),
    ),
)
def test_edits_of_real_programs_lead_to_plans(sample_name: str, spec: str) -> None:
    evaluator = evaluator_of(sample(sample_name)[0], spec)
    problem = evaluator.problem
    moves = Moves(problem, evaluator.seconds_between)
    for plan in starting_plans(problem)[:2]:
        for neighbourhood in NEIGHBOURHOODS.values():
            edits = neighbourhood(moves, plan)
            for edit in edits[:: max(1, len(edits) // FEW)]:
                assert not any(refuse(problem, plan, edit, result) for result in results(problem, plan, edit))


@cache
def problem_of(name: str, spec: str = "v5e-16") -> Problem:
    return evaluator_of(sample(name)[0], spec).problem


def edits(name: str, problem: Problem, plan: Plan) -> list[Edit]:
    return NEIGHBOURHOODS[name](Moves(problem), plan)


def a_pair(problem: Problem) -> tuple[Shard, Shard]:
    """Decisions about one group over two axes, the first of which holds in some ops only."""
    one = next(
        to._replace(axis=0)
        for d in decision_space(problem).choices
        if isinstance(d, Shard)
        for to in decision_space(problem).variants(d)
        if isinstance(to, Shard) and to.unless != NONE
    )
    return one, one._replace(axis=1, unless=NONE)


def test_what_is_decided_about_one_axis_can_be_decided_about_another() -> None:
    problem = problem_of("mlp_tiny")
    free = [d for d in decision_space(problem).choices if isinstance(d, Shard) and d.axis == 0]
    first = (free[0], next(d for d in free if d.group != free[0].group))
    both = {edit.into for edit in edits("axes", problem, (*first, free[0]._replace(axis=1)))}
    assert tuple(d._replace(axis=1) for d in first) in both


def test_decisions_about_one_dimension_exchange_where_they_hold() -> None:
    problem = problem_of("vit_tiny")
    one, other = a_pair(problem)
    exchanged = one._replace(unless=NONE), other._replace(unless=one.unless)
    assert Edit((one, other), exchanged) in edits("axes", problem, (one, other))
    assert exchanged in set(results(problem, (one, other), Edit((one, other), exchanged)))


def test_one_or_all_decisions_about_a_dimension_come_to_hold_in_a_part_only() -> None:
    problem = problem_of("vit_tiny")
    part = next(
        to
        for d in decision_space(problem).choices
        if isinstance(d, Shard) and d.axis == 0
        for to in decision_space(problem).parts(d)
        if isinstance(to, Shard)
    )
    plan = (part._replace(only=NONE), part._replace(axis=1, only=NONE))
    found = edits("scopes", problem, plan)
    assert Edit(plan[:1], (part,)) in found and Edit(plan, (part, part._replace(axis=1))) in found


def test_additions_come_in_the_order_of_the_seconds_at_stake() -> None:
    evaluator = evaluator_of(sample("vit_tiny")[0], "v5e-16")
    plan = strategy(evaluator.problem, "data-parallel")
    spent = evaluator.seconds_between(plan)

    def stake(d: Decision) -> float:
        assert isinstance(d, Shard)
        if d.only != NONE:
            return spent.get((d.group, d.only), 0.0)
        return spent.get((d.group, d.group), 0.0) - spent.get((d.group, d.unless), 0.0)

    every = {edit.into[0] for edit in Moves(evaluator.problem).additions(plan)}
    ordered = [edit.into[0] for edit in Moves(evaluator.problem, evaluator.seconds_between).additions(plan)]
    least = LEAST_STAKE * max(spent.values())
    assert set(ordered) == {d for d in every if stake(d) > least} != every
    assert [stake(d) for d in ordered] == sorted(map(stake, ordered), reverse=True)
    held = {d[:2] for d in plan if isinstance(d, Shard)}
    assert not held & {d[:2] for d in every}


def test_a_kind_of_arguments_can_rest_whole_over_all_axes_at_once() -> None:
    problem = problem_of("mlp_tiny")
    kept, groups = next(iter(decision_space(problem).rests.items()))
    plan = problem.canonical(tuple(Shard(min(groups), axis) for axis in (0, 1)))
    together = {edit.into for edit in edits("storage", problem, plan)}
    assert (kept._replace(axis=0), kept._replace(axis=1)) in together


def test_what_is_handed_over_in_a_loop_comes_with_gathers_before_it() -> None:
    """The batch over both axes, but where gradients of a recurrence's weights are summed over it: there one axis splits
    the weights. Without gathers before the loops that takes twice as long as data parallelism or more."""
    program = load(str(SAMPLES / "rnn_train.mlirbc.zst")).program
    problem = make_problem(program, analyse(program), load_spec("v6e-64").mesh({"data": 8, "model": 8}))
    evaluator, plan = Evaluator(problem), strategy(problem, "data-parallel")
    found = [edit for edit in edits("hand over", problem, plan) if any(isinstance(d, Replicate) for d in edit.into)]
    reached = [to for edit in found for to in results(problem, plan, edit)]
    best = min(reached, key=lambda to: evaluator.cost(to).step_seconds)
    without = problem.canonical(tuple(d for d in best if isinstance(d, Shard)))
    seconds = evaluator.cost(plan).step_seconds
    assert evaluator.cost(best).step_seconds < 0.65 * seconds
    assert evaluator.cost(without).step_seconds > 2.0 * seconds


def test_no_more_time_is_spent_between_two_groups_than_where_either_is() -> None:
    """Nor is more spent where one group is than in all, of which that is most."""
    evaluator = evaluator_of(sample("vit_tiny")[0], "v5e-16")
    plan = strategy(evaluator.problem, "data-parallel")
    spent, step = evaluator.seconds_between(plan), evaluator.cost(plan).step_seconds
    assert 0.5 * step < max(spent.values()) <= step * (1 + 1e-9)
    assert all(spent[one, other] == spent[other, one] <= spent[one, one] for one, other in spent)
