"""Branch and bound: the best plan, proven, where the space can be exhausted; else the best found and a proven lower bound.

A node is a plan, a child has one more decision; `Replicate`s come first, so what is decided stays decided (see `states`). Plans that
have led every op to the same state are one node, and a decision that changes no state is none. The search starts from the plan that
a short MCTS finds, which cuts most of the tree at once, and then takes the node of least bound first: whenever it ends, no plan
beats the least bound that is still open.

A node is cut when its `LowerBound`, with the price of its decisions, is no better than the best plan, or when no completion
can fit into memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf

import numpy as np

from toast_cli.plan.decisions import Plan
from toast_cli.plan.problem import Problem
from toast_cli.search.bound import LowerBound
from toast_cli.search.cluster import Least, decided, following
from toast_cli.search.mcts import grow
from toast_cli.search.model import Budget, Evaluate, Incumbent, OutOfBudget, SearchProgress, SearchResult
from toast_cli.search.objective import PRICE

FIRST_EVALUATIONS = 1500  # of MCTS, at most half of the budget
NODES = 300_000  # kept at most
BOUND_SHARE = 0.5  # of the time left, for the bound of the root

State = tuple[tuple[int, ...], frozenset[object]]  # [views] states, and what has been decided


@dataclass(frozen=True, slots=True)
class _Node:
    plan: Plan
    parts: list[Least]  # [clusters]
    states: tuple[int, ...]  # [views]

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def priced(self) -> float:
        """Its seconds as they compare with those of plans of fewer decisions."""
        return self.seconds * (1.0 + PRICE * len(self.plan))


def exact(
    problem: Problem,
    evaluate: Evaluate,
    budget: Budget,
    rng: np.random.Generator,
    progress: SearchProgress | None = None,
    starts: Sequence[Plan] = (),
) -> SearchResult:
    """Best-first branch and bound; see the module docstring."""
    incumbent = Incumbent(problem, evaluate, budget, progress, starts)
    proof = Proof(incumbent)
    first = FIRST_EVALUATIONS if budget.evaluations is None else min(FIRST_EVALUATIONS, budget.evaluations // 2)
    stopped = "exhausted"
    try:
        try:
            grow(incumbent, rng, first)
        except OutOfBudget as why:
            if str(why) != "iterations":  # without plans to look at there is still a bound to be had
                raise
        proof.run()
    except OutOfBudget as why:
        stopped = str(why)
    except KeyboardInterrupt:
        stopped = "interrupted"
    return incumbent.result(stopped, proven=proof.complete, lower_bound=proof.lower_bound)


class Proof:
    """Looks for better plans than the incumbent's, until there can be none (`complete`) or the budget is spent."""

    def __init__(self, incumbent: Incumbent) -> None:
        self.complete = False
        self._incumbent = incumbent
        self._problem = incumbent.problem
        self._heap: list[tuple[float, int, _Node]] = []
        self._expanded: _Node | None = None  # at the moment
        self._least_cut = inf  # seconds
        self._visited: set[State] = set()

    @property
    def lower_bound(self) -> float:
        """Seconds that no plan can beat; 0 where nothing is known. The best plan's own time where it is proven to be the best: one
        of more decisions may be faster still, by less than what they are charged."""
        best = self._incumbent.best_cost.step_seconds
        if self.complete:
            return best
        nodes = [node for _, _, node in self._heap] + ([self._expanded] if self._expanded else [])
        return min(best, self._least_cut, min((node.seconds for node in nodes), default=0.0))

    def run(self) -> None:
        """Raises OutOfBudget or KeyboardInterrupt when it has to end before all is done."""
        incumbent, fixed = self._incumbent, self._problem.fixed
        bound = LowerBound(self._problem, incumbent.ends_within(BOUND_SHARE))
        states = tuple(bound.states.state(view, fixed) for view in range(len(bound.states.touches)))
        root = _Node(fixed, bound.parts(fixed), states)
        number = count()  # settles ties: the younger node first, it is the deeper one
        self._visited.add((states, decided(fixed)))
        heapq.heappush(self._heap, (root.priced, 0, root))
        while self._heap and self._heap[0][0] < self._limit():
            incumbent.check()
            if len(self._visited) > NODES:
                raise OutOfBudget("nodes")
            self._expanded = heapq.heappop(self._heap)[2]
            for child in self._children(self._expanded, bound):
                if child.priced >= self._limit():
                    self._least_cut = min(self._least_cut, child.seconds)
                elif bound.may_fit(child.parts):
                    heapq.heappush(self._heap, (child.priced, -next(number), child))
                    incumbent.look(self._problem.canonical(child.plan))
            self._expanded = None
        self.complete = True

    def _children(self, node: _Node, bound: LowerBound) -> Iterator[_Node]:
        """One decision further; only what has not been reached otherwise."""
        for decision in following(self._problem.space, node.plan, self._problem.fixed):
            plan = (*node.plan, decision)
            states = list(node.states)
            for view in bound.states.touched(decision):
                states[view] = bound.states.state(view, plan)
            reached = tuple(states)
            if reached == node.states or (reached, decided(plan)) in self._visited:
                continue
            self._visited.add((reached, decided(plan)))
            yield _Node(plan, bound.parts(plan, node.parts), reached)

    def _limit(self) -> float:
        """What the priced time of a plan must stay under to be better than the best's."""
        incumbent = self._incumbent
        if not incumbent.objective.fastest or not incumbent.fits(incumbent.best_cost):
            return inf
        return incumbent.best_cost.step_seconds * (1.0 + PRICE * len(incumbent.best)) * (1.0 - 1e-9)
