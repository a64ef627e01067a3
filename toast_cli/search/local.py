"""Local search: improves a plan by edits from a table of neighbourhoods, then restarts from perturbed good plans.

The neighbourhoods take turns: once each has had one, the next is the one whose last turns gained most per evaluated
plan (Ropke, Pisinger 2006). In its turn it tries its edits, first those that gained most when they were last tried
(Minoux 1978); of edits that remove the same decisions it applies the best, if that improves the plan. A plan that no
neighbourhood improves is a local optimum. A restart, which takes turns as well, changes one of the best local optima by
a few random edits and improves that: iterated local search (Lourenco, Martin, Stutzle 2003).
"""

from __future__ import annotations

from collections import defaultdict
from math import inf

import numpy as np

from toast_cli.plan.decisions import Plan
from toast_cli.search.edits import Edit, results
from toast_cli.search.incumbent import Incumbent
from toast_cli.search.moves import NEIGHBOURHOODS, Moves

LEAST_GAIN = 1e-9  # of reward (nats of step time): less is rounding
DESCENT = 100  # evaluations to improve each start plan
TURN = 150  # evaluations of a neighbourhood in one turn
TRIAL = 100  # evaluations after a restart
KICKS = 3  # random edits of a restart, at most
POOL = 4  # local optima that restarts begin from
IDLE = 30  # turns in a row that lead to known plans only: the space is exhausted
RESTART = "restart"


class LocalSearch:
    """Improves plans of one problem. Statistics about edits are shared by all plans."""

    def __init__(self, incumbent: Incumbent, moves: Moves, rng: np.random.Generator) -> None:
        self._incumbent, self._moves, self._rng = incumbent, moves, rng
        self._rates = _unknown()
        self._promise: dict[Edit, float] = {}  # gain of an edit when it was last tried
        self._optima: dict[Plan, float] = {}  # plans that a descent ended at -> reward

    def run(self) -> None:
        """Improves each start plan a little, then the incumbent until a plateau (see `Incumbent.is_flat`)."""
        worth = self._incumbent.worth
        for start in sorted(self._incumbent.starts, key=lambda one: (-worth(one), repr(one))):
            self._rates = _unknown()
            reached = self.improve(start, DESCENT)
            self._optima[reached] = worth(reached)
        stuck, idle, begun = set[str](), 0, len(self._incumbent.seen)
        while not self._incumbent.is_flat(begun) and idle < IDLE:
            plan, looked = self._incumbent.best, len(self._incumbent.seen)
            name = self._next(stuck)
            if name == RESTART:
                self._restart(plan)
            elif self._turn(name, plan)[1]:
                stuck.add(name)
            if self._incumbent.best != plan:
                stuck.clear()
            idle = 0 if len(self._incumbent.seen) > looked else idle + 1

    def improve(self, plan: Plan, evaluations: float) -> Plan:
        """The local optimum reached from `plan`, or the plan reached after `evaluations` evaluations."""
        looked, stuck = len(self._incumbent.seen), {RESTART}
        while len(stuck) < len(self._rates) and len(self._incumbent.seen) - looked < evaluations:
            name = self._next(stuck)
            better, is_stuck = self._turn(name, plan)
            if better != plan:
                plan, stuck = better, {RESTART}
            elif is_stuck:
                stuck.add(name)
        return plan

    def _next(self, stuck: set[str]) -> str:
        """The neighbourhood whose turn it is: the one with the highest recent gain that is not stuck; of equal ones,
        the one whose last turn is longest ago."""
        return max((name for name in self._rates if name not in stuck), key=self._rates.__getitem__)

    def _learn(self, name: str, gain: float, looked: int) -> None:
        """Updates a neighbourhood's rate by the gain of a turn that began after `looked` evaluations."""
        rate, before = gain / (len(self._incumbent.seen) - looked + 1), self._rates.pop(name)
        self._rates[name] = rate if before == inf else 0.5 * (rate + before)

    def _restart(self, plan: Plan) -> None:
        """Changes one of the best local optima by a few random edits, and improves that for a while."""
        self._optima[plan] = self._incumbent.worth(plan)
        pool = sorted(self._optima, key=lambda one: (-self._optima[one], repr(one)))[:POOL]
        changed = pool[int(self._rng.integers(len(pool)))]
        for _ in range(int(self._rng.integers(1, KICKS + 1))):
            changed = self._changed(changed)
        looked, reached = len(self._incumbent.seen), self.improve(changed, TRIAL)
        self._optima[reached] = self._incumbent.worth(reached)
        self._learn(RESTART, max(0.0, self._optima[reached] - self._optima[plan]), looked)

    def _turn(self, name: str, plan: Plan) -> tuple[Plan, bool]:
        """One turn of a neighbourhood: (the plan reached, whether all edits were tried and none improved it)."""
        start, looked, complete = plan, len(self._incumbent.seen), True
        before = reward = self._incumbent.worth(plan)
        rivals: dict[object, list[Edit]] = defaultdict(list)  # edits of the same decisions: the best of them is made
        for edit in NEIGHBOURHOODS[name](self._moves, plan):
            rivals[edit.out or edit].append(edit)
        for edits in sorted(rivals.values(), key=lambda edits: -max(self._promise.get(e, 0.0) for e in edits)):
            best, better = reward + LEAST_GAIN, plan
            for edit in edits:
                if len(self._incumbent.seen) - looked > TURN:
                    complete = False
                    break
                found = {result: self._incumbent.worth(result) for result in results(self._moves.problem, plan, edit)}
                if found:
                    most = max(found, key=found.__getitem__)
                    self._promise[edit] = found[most] - reward
                    if found[most] > best:
                        best, better = found[most], most
            if better != plan:
                plan, reward = better, best
            if not complete:
                break
        self._learn(name, reward - before, looked)
        return plan, complete and plan == start

    def _changed(self, plan: Plan) -> Plan:
        """The plan after one random edit of a random neighbourhood; the plan itself where that has none."""
        neighbourhood = list(NEIGHBOURHOODS.values())[int(self._rng.integers(len(NEIGHBOURHOODS)))]
        edits = neighbourhood(self._moves, plan)
        if not edits:
            return plan
        found = list(results(self._moves.problem, plan, edits[int(self._rng.integers(len(edits)))]))
        return found[int(self._rng.integers(len(found)))] if found else plan


def _unknown() -> dict[str, float]:
    """Initial rates: neighbourhood -> recent reward per evaluation, infinite so that each gets a turn."""
    return dict.fromkeys((*NEIGHBOURHOODS, RESTART), inf)
