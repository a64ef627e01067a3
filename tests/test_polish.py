"""Lines of climbing: where they begin, how far they go on, and what they remember."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import chain, product

import pytest
from perceptrons import evaluator_of
from programs import round_mesh

from toast_cli.cost.model import Cost
from toast_cli.plan.decisions import Plan
from toast_cli.search.climb import Promise, climb_around
from toast_cli.search.edits import suited
from toast_cli.search.exact import priced
from toast_cli.search.model import Budget
from toast_cli.search.moves import Moves
from toast_cli.search.polish import WORDINGS, polish
from toast_cli.search.shares import GROWN, Growth

MODULE = sys.modules[polish.__module__]
EVALUATOR = evaluator_of(round_mesh(data=4, model=2))
PROBLEM = EVALUATOR.problem
Worth = Callable[[Plan], float]


class Watched:
    """Lines that are watched.

    Attributes:
        looked: plans in the order in which their costs were asked for. begun: where each line, or step of one, began,
            and how many plans had been looked at by then. promises: what it knew of edits everywhere, the very dict.

    Args:
        climb: instead of a climb around a plan. costs: instead of the evaluator's.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        climb: Callable[[Worth, Plan], Plan] | None = None,
        costs: Callable[[Plan], Cost] = EVALUATOR.cost,
    ) -> None:
        self.looked: list[Plan] = []
        self.begun: list[tuple[Plan, int]] = []
        self.promises: list[Promise] = []
        self._climb, self._costs = climb, costs
        monkeypatch.setattr(MODULE, "climb_around", self._around)

    def cost(self, plan: Plan) -> Cost:
        self.looked.append(plan)
        return self._costs(plan)

    def _around(self, moves: Moves, worth: Worth, plan: Plan, promise: Promise) -> Plan:
        if not moves.local:
            self.begun.append((plan, len(self.looked)))
            self.promises.append(promise)
        return self._climb(worth, plan) if self._climb else climb_around(moves, worth, plan, promise)


def of_merit(plan: Plan) -> tuple[float, str]:
    return priced(plan, EVALUATOR.cost(plan)), repr(plan)


def some_plans() -> list[Plan]:
    """From the best to the worst."""
    return sorted({suited(PROBLEM, plan) for plan in product(PROBLEM.decisions.choices, repeat=3)}, key=of_merit)


class OnlyFurther(Growth):
    """Growth of further lines only."""

    def of_first_line(self, looked: int, found: int) -> int:
        return 0


def test_edits_of_a_plan_go_on_where_they_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was looked at before is not looked at again."""
    watched = Watched(monkeypatch)
    asked: list[int] = []

    class Heard(Growth):
        def of_first_line(self, looked: int, found: int) -> int:
            asked.append(looked)
            return super().of_first_line(looked, found)

    monkeypatch.setattr(MODULE, "VAIN", 99)
    result = polish(PROBLEM, watched.cost, Budget(300), [()], growth=Heard(total=500))
    assert asked == list(range(300, result.evaluations + 1, 100))
    assert result.evaluations == len(watched.looked) == len(set(watched.looked)) > GROWN * 500


def test_edits_of_a_plan_end_where_two_steps_of_them_find_nothing() -> None:
    asked: list[tuple[int, int]] = []

    class Endless(Growth):
        def of_first_line(self, looked: int, found: int) -> int:
            asked.append((looked, found))
            return 50

    result = polish(PROBLEM, EVALUATOR.cost, Budget(300), [()], growth=Endless())
    assert result.stopped == "iterations"
    assert result.evaluations == asked[-1][0] + 50
    assert result.best_found_at < asked[-2][0]
    assert all(found > before for (before, _), (_, found) in zip(asked, asked[2:], strict=False))


def test_a_line_from_elsewhere_goes_on_from_what_it_has_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that the first line leaves of what a search may look at."""
    watched, other = Watched(monkeypatch), suited(PROBLEM, PROBLEM.decisions.choices[:1])
    result = polish(
        PROBLEM, watched.cost, Budget(40), [()], growth=OnlyFurther(total=100), again=[other], of_each=Budget(30)
    )  # fmt: skip
    assert [count for _, count in watched.begun] == [1, 40, 70, 85, 100, 115, 130, 145, 150]
    assert result.evaluations == len(set(watched.looked)) == 180
    started, *went_on = [plan for plan, count in watched.begun if 40 <= count < 150]
    assert started == other
    merit = [of_merit(plan)[0] for plan in went_on]
    assert merit == sorted(merit, reverse=True)
    assert merit[0] == min(of_merit(plan)[0] for plan in watched.looked[40:70])


def test_further_lines_begin_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the plans given, and from the best one with its mesh axes exchanged, each with a budget of its own."""
    watched, other = Watched(monkeypatch), suited(PROBLEM, PROBLEM.decisions.choices[:1])
    result = polish(PROBLEM, watched.cost, Budget(40), [()], again=[other], of_each=Budget(30))
    (first, _), (second, after_first), (third, after_second) = watched.begun
    assert (first, second) == ((), other)
    best = min(watched.looked[:after_second], key=lambda plan: of_merit(plan)[0])
    assert third == suited(PROBLEM, tuple(d._replace(axis=1 - d.axis) for d in best)) != best
    assert (after_first, after_second) == (40, 70)
    assert result.evaluations <= 40 + 2 * 30


def test_what_a_line_leaves_that_comes_to_where_another_has_ended_goes_to_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as growth allows; only the first of the plans given has a budget of its own."""
    plans = some_plans()
    first, *others = plans[-4:]
    watched = Watched(monkeypatch, lambda worth, plan: max((plan, *plans), key=worth))  # on until the budget ends
    monkeypatch.setattr(MODULE, "_turned", lambda problem, plan: others[1])
    growth, again = OnlyFurther(total=100), [others[0], others[2], *others]
    result = polish(PROBLEM, watched.cost, Budget(40), [first], growth=growth, again=again, of_each=Budget(20))
    assert [plan for plan, _ in watched.begun] == [first, others[0], others[1], others[2], *others[:3]]
    assert [count for _, count in watched.begun][:4] == [1, 40, 60, 80]
    assert result.evaluations == len(watched.looked) == len(set(watched.looked)) == 150 > watched.begun[-1][1]


def test_lines_begin_at_other_wordings_of_the_first_ones_start_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the strategies behind the first, as far as growth allows; wordings are as good."""
    long = [plan for plan in some_plans() if len(plan) == 3]
    better, others = long[0], long[1:3]
    start, *words = long[-WORDINGS - 2 :]

    def costs(plan: Plan) -> Cost:
        return EVALUATOR.cost(better if plan == better else start)

    def climb(worth: Worth, plan: Plan) -> Plan:
        return max((plan, *words, better), key=worth)

    watched = Watched(monkeypatch, climb, costs)
    polish(
        PROBLEM, watched.cost, Budget(40), [start], growth=OnlyFurther(total=1000), again=others, of_each=Budget(20)
    )  # fmt: skip
    begun = [plan for plan, _ in watched.begun]
    assert [begun[0], begun[1], *begun[3:]] == [start, others[0], *words[:WORDINGS], others[1]]


def test_a_line_goes_on_in_the_words_and_with_the_promises_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in those of a plan as good that comes first by the order in which ties are written down."""
    later, earlier = sorted((plan for plan in some_plans() if len(plan) == 3), key=repr, reverse=True)[:2]
    more = iter(some_plans())

    def climb(worth: Worth, plan: Plan) -> Plan:
        for one in chain((plan, later, earlier), more):
            worth(one)
        return plan

    def costs(plan: Plan) -> Cost:
        return EVALUATOR.cost(some_plans()[0] if plan in (later, earlier) else ())

    class Twice(Growth):
        def of_first_line(self, looked: int, found: int) -> int:
            return 20 if looked < 60 else 0

    watched = Watched(monkeypatch, climb, costs)
    result = polish(PROBLEM, watched.cost, Budget(20), [()], growth=Twice(), again=[earlier], of_each=Budget(20))
    assert result.plan == earlier
    assert [plan for plan, _ in watched.begun][:4] == [(), later, later, earlier]
    first, second, third, further = watched.promises[:4]
    assert first is second is third is not further
