"""What edits of plans lead to: the second half of a search.

A line of climbing tries every edit of a plan, looks around the plan that none makes better, and lets decisions of that
hold in a part of the program only in the end. Where a line ends depends on where it begins, on the order in which
edits are tried, and on the words of a plan: of two that mean the same, the same edit makes two that do not. So more
lines follow the first: from other plans, from the best one with its mesh axes exchanged, and from the first line's
start in other words. They share what has been looked at, so that a line that comes to where another has been ends soon;
what it leaves goes to lines from more plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from math import inf

from toast_cli.plan.decisions import Plan
from toast_cli.plan.problem import Problem
from toast_cli.search.climb import LEAST_GAIN, Promise, climb_around
from toast_cli.search.edits import suited
from toast_cli.search.model import Budget, Evaluate, Incumbent, OutOfBudget, SearchProgress, SearchResult
from toast_cli.search.moves import Moves, SecondsOf
from toast_cli.search.shares import NO_GROWTH, Growth

LOCAL_SHARE = 0.22  # of a line, kept for decisions that hold in a part of the program only
WORDINGS = 2  # other ones of the plan at which the first line begins, from which lines begin, too
VAIN = 2  # steps in a row by which the first line goes on and that may find nothing better
STEPS = 2  # by which a further line goes on, in each share of one


class _Enough(Exception):  # noqa: N818 - not an error: it ends a stage of a line
    """Raised when a stage has used its share of the budget."""


def polish(
    problem: Problem,
    evaluate: Evaluate,
    budget: Budget,
    plans: Sequence[Plan],
    progress: SearchProgress | None = None,
    growth: Growth = NO_GROWTH,
    again: Sequence[Plan] = (),
    of_each: Budget | None = None,
    seconds: SecondsOf | None = None,
) -> SearchResult:
    """The best plan that a line of climbing from the given ones in turn leads to, and further lines.

    Args:
        budget: of the first line. growth: how far lines go on where that is spent. again: where further lines begin: at
            the first of these, at the best plan with its axes exchanged, and, as far as growth allows, at the others.
            of_each: evaluations and seconds of each further line; None for no such lines. seconds: see `Moves`.
    """
    incumbent = Incumbent(problem, evaluate, budget, progress)
    lines = _Lines(incumbent, seconds)
    stopped = lines.first(plans, growth)
    own: list[Plan | None] = [*again[:1], None]  # None: the best plan with its axes exchanged
    for number, start in enumerate((*own, *lines.worded_otherwise(plans[0]), *again[1:])):
        if of_each is None or stopped == "interrupted":
            break
        each = of_each if number < len(own) else lines.budget_left(growth, of_each)
        if each is None:
            break
        ended = lines.further(_turned(problem, incumbent.best) if start is None else start, each, growth)
        stopped = ended if ended == "interrupted" else stopped
    return incumbent.result(stopped)


class _Lines:
    """Climbs of one search."""

    def __init__(self, incumbent: Incumbent, seconds: SecondsOf | None) -> None:
        self._incumbent = incumbent
        self._everywhere = Moves(incumbent.problem, seconds=seconds)
        self._in_parts = Moves(incumbent.problem, local=True, seconds=seconds)
        self._reached: Plan = ()
        self._promises: tuple[Promise, Promise] = {}, {}  # of edits everywhere and in parts, in this line
        self._ended: set[float] = set()  # seconds of a step of the plans at which lines have ended

    def first(self, plans: Sequence[Plan], growth: Growth) -> str:
        """The line from these plans; why it ended."""
        incumbent, vain = self._incumbent, 0
        stopped = self._climb(plans)
        while (
            stopped == "iterations"
            and vain < VAIN
            and (extra := growth.of_first_line(len(incumbent.seen), incumbent.best_found_at))
        ):
            before = incumbent.best
            incumbent.allow(extra, None)
            stopped = self._climb([self._reached])  # what is left of it: mostly decisions that hold in a part
            vain = vain + 1 if incumbent.best == before else 0
        self._ended.add(incumbent.best_cost.step_seconds)
        return stopped

    def budget_left(self, growth: Growth, most: Budget) -> Budget | None:
        """What growth leaves for a further line, `most` at most; None where that is nothing."""
        extra = self._evaluations_left(growth)
        return replace(most, evaluations=min(extra, most.evaluations or extra)) if extra else None

    def further(self, start: Plan, budget: Budget, growth: Growth) -> str:
        """A line from elsewhere with a budget of its own; why it ended. It goes on, as far as growth allows, unless it
        has come to where another line has ended."""
        incumbent = self._incumbent
        self._promises = {}, {}
        incumbent.allow(budget.evaluations, budget.seconds)
        stopped = self._climb([start], incumbent.used)
        step = (budget.evaluations or 0) // STEPS
        while (
            stopped == "iterations"
            and self._step_seconds not in self._ended
            and (extra := min(step, self._evaluations_left(growth)))
        ):
            incumbent.allow(extra, None)
            stopped = self._climb([self._reached], incumbent.used)
        self._ended.add(self._step_seconds)
        return stopped

    def worded_otherwise(self, plan: Plan) -> list[Plan]:
        """Plans that have been looked at and are as good as this one: other words for the same, mostly, from which the
        same edits lead elsewhere."""
        seen, reward = self._incumbent.seen, self._incumbent.reward
        if plan not in seen:
            return []
        worth = reward(plan, seen[plan])
        alike = (
            other for other, cost in seen.items() if other != plan and abs(reward(other, cost) - worth) <= LEAST_GAIN
        )
        return list(islice(alike, WORDINGS))

    @property
    def _step_seconds(self) -> float:
        """Of the plan that the last line has reached."""
        return self._incumbent.seen[self._reached].step_seconds

    def _evaluations_left(self, growth: Growth) -> int:
        return growth.of_further_lines(len(self._incumbent.seen), self._incumbent.best_found_at)

    def _climb(self, plans: Sequence[Plan], began: float = 0.0) -> str:
        """A line, or a step of one; why it ended. began: the part of the budget that was used before it."""
        incumbent = self._incumbent
        until, ended = 1.0 - LOCAL_SHARE * (1.0 - began), False
        self._reached, most = plans[0], -inf
        everywhere, in_parts = self._promises

        def worth(plan: Plan) -> float:
            nonlocal most
            if not ended and incumbent.used >= until and plan not in incumbent.seen:
                raise _Enough
            found = incumbent.worth(plan)
            if found > most + LEAST_GAIN:
                self._reached, most = plan, found
            return found

        try:
            with suppress(_Enough):
                for plan in plans:
                    climb_around(self._everywhere, worth, plan, everywhere)
            ended = True
            climb_around(self._in_parts, worth, self._reached, in_parts)
        except OutOfBudget as why:
            return str(why)
        except KeyboardInterrupt:
            return "interrupted"
        return "plateau"


def _turned(problem: Problem, plan: Plan) -> Plan:
    """The plan with each mesh axis in the place of the one before it, as far as that suits the problem."""
    axes = [axis for axis, size in enumerate(problem.mesh.sizes) if size > 1]
    after = dict(zip(axes, [*axes[1:], *axes[:1]], strict=True))
    return suited(problem, tuple(decision._replace(axis=after.get(decision.axis, decision.axis)) for decision in plan))
