"""What holds for the shardings of any plan of any program."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import result_shardings
from random_programs import cases, plans

from toast_cli.dimensions.model import FactorKind
from toast_cli.plan.axis_assignment import assigned_order
from toast_cli.plan.decisions import ASIDE, LOOK_UPS, NONE, SUMMED, Decision, Plan, Replicate, Shard
from toast_cli.plan.problem import Problem
from toast_cli.plan.sharding import Choice, OpPattern, Sharding, lay_out
from toast_cli.price.arrays import reads_as_made
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.items import make_items
from toast_cli.price.memo import OpShardingMemo


def check(sharding: Sharding, shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    axes = [axis for dim in sharding for axis in dim]
    assert len(set(axes)) == len(axes)
    for size, dim in zip(shape, sharding, strict=True):
        ways = 1
        for axis in dim:
            ways *= sizes[axis]
        assert size % ways == 0


@settings(max_examples=30)
@given(st.data())
def test_every_sharding_uses_an_axis_once_and_divides(data: st.DataObject) -> None:
    case = data.draw(cases())
    lowered = case.lowered(data.draw(plans(case.problem)))
    program, sizes = case.program, case.problem.mesh.sizes
    for value, sharding in zip(program.values, lowered.shardings, strict=True):
        check(sharding, value.shape, sizes)
    for value, sharding in lowered.computed.items():
        check(sharding, program.values[value].shape, sizes)
    for (op, position), sharding in lowered.required.items():
        check(sharding, program.values[program.ops[op].operands[position]].shape, sizes)


@settings(max_examples=30)
@given(st.data())
def test_donated_arguments_and_the_results_in_their_buffers_lie_alike(data: st.DataObject) -> None:
    case = data.draw(cases())
    lowered = case.lowered(data.draw(plans(case.problem)))
    results = result_shardings(case.program, lowered)
    for argument in case.program.arguments:
        if argument.aliased_result >= 0:
            assert results[argument.aliased_result] == lowered.shardings[argument.value]


@settings(max_examples=30)
@given(st.data())
def test_canonical_order_means_the_same(data: st.DataObject) -> None:
    case = data.draw(cases())
    plan = data.draw(plans(case.problem))
    canonical = case.problem.canonical(plan)
    assert case.lowered(canonical) == case.lowered(plan)
    assert case.problem.canonical(canonical) == canonical


@settings(max_examples=30)
@given(st.data())
def test_decisions_that_commute_have_one_canonical_order(data: st.DataObject) -> None:
    case = data.draw(cases())
    plan = list(data.draw(plans(case.problem)))
    canonical = case.problem.canonical(tuple(plan))
    for place in data.draw(st.lists(st.integers(0, max(0, len(plan) - 2)), max_size=8)):
        pair = plan[place : place + 2]
        if len(pair) == 2 and all(isinstance(d, Shard) for d in pair) and case.problem.commute(*pair):
            plan[place : place + 2] = reversed(pair)
    assert case.problem.canonical(tuple(plan)) == canonical


# -- array items: which readers can be left out because they take an array as it is made, whatever the plan


@settings(max_examples=30)
@given(st.data())
def test_readers_left_out_take_the_array_as_it_is_made(data: st.DataObject) -> None:
    problem = data.draw(cases()).problem
    program, patterns = problem.program, problem.op_pattern
    for plan in data.draw(st.lists(plans(problem), min_size=1, max_size=3)):
        for number, op in enumerate(program.ops):
            for k, value in enumerate(op.results):
                made = problem.op_sharding(patterns[number], plan)
                for user, position in program.users[value]:
                    if reads_as_made(problem, patterns[number], k, patterns[user], position):
                        assert made.shardings[k] == problem.op_sharding(patterns[user], plan).operands[position]
                        assert not made.reduced
                        assert not any(made.scattered)


@settings(max_examples=10)
@given(st.data())
def test_what_has_no_part_in_any_cost_is_neither_stored_nor_read_otherwise(data: st.DataObject) -> None:
    case = data.draw(cases())
    idle = [item for item in make_items(case.problem, case.evaluator.profile).arrays if not item.costs]
    assert not any(item.stored or item.readers for item in idle)


# -- plans evaluated one after another, each as a change to the one before


@settings(max_examples=30)
@given(st.data())
def test_costs_do_not_depend_on_what_was_evaluated_before(data: st.DataObject) -> None:
    problem = data.draw(cases()).problem
    plan = data.draw(plans(problem))
    known = Evaluator(problem)
    # One goes and one comes, at either end; one changes its place.
    for each in (plan[:-1], plan[1:], plan[:-1], plan, (*plan[1:], *plan[:1]), plan, (*plan[-1:], *plan[:-1])):
        assert known.cost(each) == Evaluator(problem).cost(each)


# -- how ops spend mesh axes: decision after decision, and by following what is known, against the rules read off the
# plan as a whole


def plain_choice(problem: Problem, pattern: OpPattern, plan: Plan) -> Choice:
    """Who gets which axis, each axis and each partial result looked at over the whole plan; patterns with windows
    aside.
    """
    form, sizes = pattern.form, problem.mesh.sizes
    shards = [
        d for d in plan if isinstance(d, Shard) and d.unless not in pattern.groups and d.only in (NONE, *pattern.groups)
    ]
    closed = {d.axis for d in plan if isinstance(d, Replicate) and d.role in (pattern.role, pattern.kind)}
    axes: list[list[int]] = [[] for _ in pattern.groups]
    table = {pattern.groups[s] for factors in form.operands[0] for s in factors} if pattern.looked_up else set()

    def count(of: list[int]) -> int:
        total = 1
        for axis in of:
            total *= sizes[axis]
        return total

    def factors_of(decision: Shard) -> list[int]:
        def chosen(factor: int) -> int:
            strand = pattern.strands[factor] if pattern.strands else None
            at = problem.resolution_place.get(strand.resolution, NONE) if strand else NONE
            return decision.sides[at] if 0 <= at < len(decision.sides) else 0

        def rank(factor: int) -> tuple[bool, int]:
            strand = pattern.strands[factor] if pattern.strands else None
            side = strand.side if strand else chosen(factor)
            return side < chosen(factor), side

        factors = [s for s, group in enumerate(pattern.groups) if group == decision.group]
        if decision.unless == SUMMED and any(form.kinds[s] is FactorKind.REDUCTION for s in factors):
            return []
        if decision.unless == LOOK_UPS and pattern.looked_up and not table & {decision.group}:
            return []
        if pattern.strands and any(chosen(s) == ASIDE for s in factors):
            return []
        return sorted(factors, key=rank)

    for decision in shards:
        if decision.axis not in closed:
            for factor in factors_of(decision):
                divides = all(e % (count(axes[factor]) * sizes[decision.axis]) == 0 for e in form.extents[factor])
                majors_full = all(count(axes[m]) == form.sizes[m] for m in form.majors[factor])
                if form.kinds[factor] is not FactorKind.BLOCKED and divides and majors_full:
                    axes[factor].append(decision.axis)
                    closed.add(decision.axis)
                    break
    partial = [a for kind, spent in zip(form.kinds, axes, strict=True) if kind is FactorKind.REDUCTION for a in spent]
    wanted = []
    for dims in form.results if partial else ():
        own, places = [list(spent) for spent in axes], []
        for axis in partial:
            places.append(NONE)
            for factor in (factor for d in shards if d.axis == axis for factor in factors_of(d)):
                factors = next((factors for factors in dims if factor in factors), ())
                divides = all(e % (count(own[factor]) * sizes[axis]) == 0 for e in form.extents[factor])
                if (
                    factors
                    and divides
                    and all(count(own[m]) == form.sizes[m] for m in factors[: factors.index(factor)])
                ):
                    own[factor].append(axis)
                    places[-1] = factor
                    break
        wanted.append(tuple(places))
    return tuple(map(tuple, axes)), tuple(wanted)


@settings(max_examples=40)
@given(st.data())
def test_rows_agree_with_the_rules_read_off_whole_plans(data: st.DataObject) -> None:
    problem = data.draw(cases()).problem
    rows = OpShardingMemo(problem)
    for plan in data.draw(st.lists(plans(problem), min_size=1, max_size=4)):
        steps = rows.steps(plan)
        numbers = [rows.row(view, steps) for view in rows.views]
        for number, pattern in enumerate(problem.patterns):
            if pattern.space is None:
                found = lay_out(pattern, plain_choice(problem, pattern, plan))
                assert found == rows.op_sharding(number, numbers) == problem.op_sharding(number, plan)


@settings(max_examples=40)
@given(st.data())
def test_equal_states_have_the_same_future(data: st.DataObject) -> None:
    problem = data.draw(cases()).problem
    rows = OpShardingMemo(problem)
    one, other, more = (assigned_order(data.draw(plans(problem))) for _ in range(3))
    more = tuple(d for d in more if isinstance(d, Shard))
    for view in rows.views:
        if rows.state(view, rows.steps(one)) == rows.state(view, rows.steps(other)):
            assert rows.row(view, rows.steps((*one, *more))) == rows.row(view, rows.steps((*other, *more)))


@pytest.mark.parametrize(
    ("plan", "first"),
    [
        ((Shard(0, 0), Replicate(0, 0)), [Replicate(0, 0), Shard(0, 0)]),
        ((Shard(1, 0), Shard(0, 1)), [Shard(1, 0), Shard(0, 1)]),
    ],
)
def test_replicates_are_spent_first_and_all_else_keeps_its_order(plan: Plan, first: list[Decision]) -> None:
    assert list(assigned_order(plan)) == first
