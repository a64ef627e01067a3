"""Local search over plans: first improvement over a table of neighbourhoods, then restarts from changed good plans.

In each step the neighbourhood that has gained most per plan looked at has its turn. It tries its edits, first those
that gained most when they were last tried (Minoux 1978), and keeps every improvement. A plan that no neighbourhood
improves is a local optimum. The search then changes one of the best local optima by a few random edits and improves
that: iterated local search (Lourenco, Martin, Stutzle 2003) with adaptive choice of neighbourhoods (Ropke, Pisinger
2006).
"""

from __future__ import annotations

from math import inf

import numpy as np

from toast_cli.plan.decisions import Plan
from toast_cli.search.edits import Edit, results
from toast_cli.search.incumbent import Incumbent
from toast_cli.search.moves import NEIGHBOURHOODS, Moves

LEAST_GAIN = 1e-9  # of reward (nats of step time): less is rounding
TURN = 150  # plans that a neighbourhood looks at before others have their turn
TRIAL = 100  # plans looked at from a changed plan, before it is dropped or improved to its end
KICKS = 3  # random edits of a restart, at most
POOL = 4  # local optima that restarts begin from
NEAR = 0.02  # of reward: how close to the best a trial must come to be improved to its end


class LocalSearch:
    """Improves plans of one problem. What is learnt about neighbourhoods and edits serves all plans.

    Attributes:
        gained, spent: reward gained and plans looked at, by neighbourhood.
    """

    def __init__(self, incumbent: Incumbent, moves: Moves, rng: np.random.Generator) -> None:
        self._incumbent, self._moves, self._rng = incumbent, moves, rng
        self.gained = dict.fromkeys(NEIGHBOURHOODS, 0.0)
        self.spent = dict.fromkeys(NEIGHBOURHOODS, 0)
        # Recent gain per plan looked at; at first in the order of the table.
        self._rate = {name: 1.0 / place for place, name in enumerate(NEIGHBOURHOODS, 1)}
        self._promise: dict[Edit, float] = {}  # gain of an edit when it was last tried
        self._optima: dict[Plan, float] = {}  # plans that a descent ended at -> reward

    def improve(self, plan: Plan, evaluations: float = inf) -> Plan:
        """The plan that improvements of `plan` lead to: a local optimum, unless so many evaluations are used before."""
        looked, stuck = len(self._incumbent.seen), set[str]()
        reward = self._incumbent.worth(plan)
        while len(stuck) < len(NEIGHBOURHOODS) and len(self._incumbent.seen) - looked < evaluations:
            name = max((n for n in NEIGHBOURHOODS if n not in stuck), key=lambda n: self._rate[n])
            better, gain, complete = self._turn(name, plan, reward)
            if gain > 0.0:
                plan, reward = better, reward + gain
                stuck.clear()
            elif complete:
                stuck.add(name)
        self._optima[plan] = reward
        return plan

    def restart(self) -> None:
        """Changes one of the best local optima by a few random edits, and improves what comes of it if it is good."""
        best = self._incumbent.best
        self._optima.setdefault(best, self._incumbent.worth(best))
        pool = sorted(self._optima, key=lambda plan: (-self._optima[plan], repr(plan)))[:POOL]
        plan = pool[int(self._rng.integers(len(pool)))]
        for _ in range(int(self._rng.integers(1, KICKS + 1))):
            plan = self._changed(plan)
        known = len(self._optima)
        reached = self.improve(plan, TRIAL)
        if len(self._optima) > known and self._optima[reached] > self._incumbent.worth(self._incumbent.best) - NEAR:
            self.improve(reached)

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
        used = len(self._incumbent.seen) - looked
        self.gained[name] += reward - start
        self.spent[name] += used
        self._rate[name] = 0.5 * self._rate[name] + 0.5 * (reward - start) / (used + 1)
        return plan, reward - start, complete

    def _changed(self, plan: Plan) -> Plan:
        """The plan after one random edit of a random neighbourhood; the plan itself where that has none."""
        neighbourhood = list(NEIGHBOURHOODS.values())[int(self._rng.integers(len(NEIGHBOURHOODS)))]
        edits = neighbourhood(self._moves, plan)
        if not edits:
            return plan
        found = list(results(self._moves.problem, plan, edits[int(self._rng.integers(len(edits)))]))
        return found[int(self._rng.integers(len(found)))] if found else plan
