"""Plans evaluated one after another, each as a change to the one before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import cases, plans

from toast_cli.price.evaluator import Evaluator


@settings(max_examples=30)
@given(st.data())
def test_costs_do_not_depend_on_what_was_evaluated_before(data: st.DataObject) -> None:
    problem = data.draw(cases()).problem
    plan = data.draw(plans(problem))
    known = Evaluator(problem)
    # One goes and one comes, at either end; one changes its place.
    for each in (plan[:-1], plan[1:], plan[:-1], plan, (*plan[1:], *plan[:1]), plan, (*plan[-1:], *plan[:-1])):
        assert known.cost(each) == Evaluator(problem).cost(each)
