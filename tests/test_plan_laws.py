"""What holds for the shardings of any plan of any program."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from programs import result_shardings
from random_programs import cases, plans

from toast_cli.plan.decisions import Shard
from toast_cli.plan.sharding import Sharding


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
