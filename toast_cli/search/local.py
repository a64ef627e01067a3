"""Local search over plans: first improvement over a table of neighbourhoods, then restarts from changed good plans.

In each step the neighbourhood that has gained most per plan looked at has its turn. It tries its edits, first those
that gained most when they were last tried (Minoux 1978), and keeps every improvement. A plan that no neighbourhood
improves is a local optimum. The search then changes one of the best local optima by a few random edits and improves
that: iterated local search (Lourenco, Martin, Stutzle 2003) with adaptive choice of neighbourhoods (Ropke, Pisinger
2006).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from math import inf

import numpy as np

from toast_cli.plan.decisions import Plan
from toast_cli.search.edits import Edit, results
from toast_cli.search.incumbent import Incumbent
from toast_cli.search.moves import NEIGHBOURHOODS, Moves

LEAST_GAIN = 1e-9  # of reward (nats of step time): less is rounding
TURN = 150  # plans that a neighbourhood looks at before others have their turn
TRIAL = 100  # plans looked at from a changed plan
KICKS = 3  # random edits of a restart, at most
POOL = 4  # local optima that restarts begin from
FIRST_RATE = 1e-3  # gain per plan that the first neighbourhood is expected to have
IDLE = 30  # turns in a row that lead to known plans only: the space is exhausted
RESTART = "restart"


class LocalSearch:
    """Improves plans of one problem. What is learnt about neighbourhoods and edits serves all plans.

    Attributes:
        gained, spent: reward gained and plans looked at, by neighbourhood.
    """

    def __init__(self, incumbent: Incumbent, moves: Moves, rng: np.random.Generator) -> None:
        self._incumbent, self._moves, self._rng = incumbent, moves, rng
        names = [*NEIGHBOURHOODS, RESTART]
        self.gained = dict.fromkeys(names, 0.0)
        self.spent = dict.fromkeys(names, 0)
        # Recent gain per plan looked at; at first in the order of the table.
        self._rate = {name: FIRST_RATE / place for place, name in enumerate(names, 1)}
        self._promise: dict[Edit, float] = {}  # gain of an edit when it was last tried
        self._optima: dict[Plan, float] = {}  # plans that a descent ended at -> reward

    def run(self) -> None:
        """Improves the incumbent until little is to be expected (see `Incumbent.is_flat`)."""
        plan, stuck, idle = self._incumbent.best, set[str](), 0
        while not self._incumbent.is_flat() and idle < IDLE:
            looked = len(self._incumbent.seen)
            name = self._most_promising([RESTART, *NEIGHBOURHOODS], stuck)
            if name == RESTART:
                self._restart(plan)
            else:
                better, gain, complete = self._turn(name, plan, self._incumbent.worth(plan))
                plan = better
                if gain <= 0.0 and complete:
                    stuck.add(name)
            if self._incumbent.best != plan:
                plan = self._incumbent.best
                stuck.clear()
            idle = 0 if len(self._incumbent.seen) > looked else idle + 1

    def improve(self, plan: Plan, evaluations: float) -> Plan:
        """The plan that improvements of `plan` lead to: a local optimum, unless so many plans are looked at before."""
        looked, stuck = len(self._incumbent.seen), set[str]()
        reward = self._incumbent.worth(plan)
        while len(stuck) < len(NEIGHBOURHOODS) and len(self._incumbent.seen) - looked < evaluations:
            name = self._most_promising(NEIGHBOURHOODS, stuck)
            better, gain, complete = self._turn(name, plan, reward)
            if gain > 0.0:
                plan, reward = better, reward + gain
                stuck.clear()
            elif complete:
                stuck.add(name)
        return plan

    def _restart(self, plan: Plan) -> None:
        """Changes one of the best local optima by a few random edits, and improves that for a while."""
        best, looked = self._incumbent.worth(plan), len(self._incumbent.seen)
        self._optima[plan] = best
        pool = sorted(self._optima, key=lambda one: (-self._optima[one], repr(one)))[:POOL]
        changed = pool[int(self._rng.integers(len(pool)))]
        for _ in range(int(self._rng.integers(1, KICKS + 1))):
            changed = self._changed(changed)
        reached = self.improve(changed, TRIAL)
        self._optima[reached] = self._incumbent.worth(reached)
        self._learn(RESTART, max(0.0, self._optima[reached] - best), len(self._incumbent.seen) - looked)

    def _most_promising(self, names: Iterable[str], stuck: Container[str]) -> str:
        return max((name for name in names if name not in stuck), key=self._rate.__getitem__)

    def _learn(self, name: str, gain: float, looked: int) -> None:
        self.gained[name] += gain
        self.spent[name] += looked
        self._rate[name] = 0.5 * self._rate[name] + 0.5 * gain / (looked + 1)

    def _turn(self, name: str, plan: Plan, reward: float) -> tuple[Plan, float, bool]:
        """One turn of a neighbourhood: the plan it leads to, what that gains, and whether all its edits were tried."""
        start, looked, complete = reward, len(self._incumbent.seen), True
        edits = NEIGHBOURHOODS[name](self._moves, plan)
        for edit in sorted(edits, key=lambda e: -self._promise.get(e, 0.0)):
            if len(self._incumbent.seen) - looked > TURN:
                complete = False
                break
            best, better = -inf, plan
            for result in results(self._moves.problem, plan, edit):
                found = self._incumbent.worth(result)
                if found > best:
                    best, better = found, result
            if best == -inf:
                continue
            self._promise[edit] = best - reward
            if best > reward + LEAST_GAIN:
                plan, reward = better, best
        self._learn(name, reward - start, len(self._incumbent.seen) - looked)
        return plan, reward - start, complete

    def _changed(self, plan: Plan) -> Plan:
        """The plan after one random edit of a random neighbourhood; the plan itself where that has none."""
        neighbourhood = list(NEIGHBOURHOODS.values())[int(self._rng.integers(len(NEIGHBOURHOODS)))]
        edits = neighbourhood(self._moves, plan)
        if not edits:
            return plan
        found = list(results(self._moves.problem, plan, edits[int(self._rng.integers(len(edits)))]))
        return found[int(self._rng.integers(len(found)))] if found else plan
