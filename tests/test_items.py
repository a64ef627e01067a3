"""Array items: which readers can be left out because they take an array as it is made, whatever the plan."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import cases, plans

from toast_cli.price.arrays import reads_as_made
from toast_cli.price.items import make_items


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
