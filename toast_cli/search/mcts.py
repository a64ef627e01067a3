"""Monte Carlo Tree Search over plans.

A state is a plan in canonical order, so plans reached in different orders of equivalent decisions are one node (the tree is
a graph). Every state is itself a complete plan: stopping there is always possible, and its value is at least its own reward.
Selection is PUCT; the prior of a decision is what it was worth at the root and in all plans that held it (as in AMAF
statistics). A roll-out appends decisions, each time the best of a few drawn from the prior, and then climbs: since appended
decisions always come last in priority, edits inside the plan are what a roll-out alone cannot do (see `climb`). Its value is the
best plan on the way.

Sources: Kocsis & Szepesvari 2006 (UCT); Rosin 2011 (PUCT); Gelly & Silver 2011 (AMAF); automap (arXiv:2112.02958) and
TOAST (arXiv:2508.15010) for MCTS over sharding decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

import numpy as np

from toast_cli.plan.decisions import Decision, Plan
from toast_cli.plan.problem import Problem
from toast_cli.search.climb import Promise, climb
from toast_cli.search.model import Budget, Evaluate, Incumbent, OutOfBudget, SearchProgress, SearchResult
from toast_cli.search.moves import Edit, Move, next_moves

EXPLORATION = 0.7  # PUCT constant, for rewards scaled to [0, 1]
ROLLOUT_DRAWS = 3  # decisions tried at each step of a roll-out
ROLLOUT_DEPTH = 10
TEMPERATURE = 0.25  # of the prior, in units of reward (nats of speed-up)
PATIENCE = 20  # edits in a row that may fail in the climb of a roll-out,
NEAR = 0.02  # unless it comes so close to the best plan, in units of reward: then all edits are tried
POLISH_SHARE = 0.1  # of the budget, kept for climbing from the best plan in the end
PLATEAU = 60  # simulations without a better plan that end the search


@dataclass(slots=True)
class _Node:
    plan: Plan
    moves: list[Move]
    visits: int = 0
    best: float = float("-inf")  # best reward at or below this node
    children: dict[int, Plan] = field(default_factory=dict)  # place in `moves` -> child state


class _Tree:
    def __init__(self, problem: Problem, incumbent: Incumbent, rng: np.random.Generator) -> None:
        self.problem, self.incumbent, self.rng = problem, incumbent, rng
        self.nodes: dict[Plan, _Node] = {}
        self.worth: dict[Decision, float] = {}  # best reward of a plan that holds the decision, smoothed
        self.promise: Promise = {}
        self.tops: set[Plan] = set()  # plans that no edit makes better
        self.low = self.high = 0.0

    def node(self, plan: Plan) -> _Node:
        found = self.nodes.get(plan)
        if found is None:
            found = self.nodes[plan] = _Node(plan, next_moves(self.problem, plan))
        return found

    def reward(self, plan: Plan) -> float:
        reward = self.incumbent.reward(plan, self.incumbent.look(plan))
        self.low, self.high = min(self.low, reward), max(self.high, reward)
        for decision in plan:
            old = self.worth.get(decision, reward)
            self.worth[decision] = max(reward, old + 0.05 * (reward - old))
        return reward

    def prior(self, moves: list[Move]) -> np.ndarray:
        worth = np.array([max(self.worth.get(d, self.low) for d in move) for move in moves])
        weight = np.exp((worth - worth.max(initial=-np.inf)) / TEMPERATURE) + 0.02
        return np.asarray(weight / weight.sum())

    def look_around(self) -> None:
        """What each move is worth alone."""
        root = self.problem.fixed
        for move in next_moves(self.problem, root):
            self.promise[Edit((), move)] = self.reward(self.incumbent.extend(root, move))

    def simulate(self) -> None:
        path = self.descend()
        plan, best = self.roll_out(path[-1].plan)
        plan = climb(self.problem, self.reward, plan, self.promise, PATIENCE)
        if self.reward(plan) > self.high - NEAR and plan not in self.tops:
            plan = self.climb_to_the_top(plan)
        self.back_up(path, max(best, self.reward(plan)))

    def climb_to_the_top(self, plan: Plan) -> Plan:
        plan = climb(self.problem, self.reward, plan, self.promise)
        self.tops.add(plan)
        return plan

    def descend(self) -> list[_Node]:
        """From the root to a node with an untried decision, which it takes."""
        path = [self.node(self.problem.fixed)]
        while path[-1].moves and len(path) < 32:
            node = path[-1]
            choice = self._select(node)
            fresh = choice not in node.children
            if fresh:
                node.children[choice] = self.incumbent.extend(node.plan, node.moves[choice])
            child = self.node(node.children[choice])
            path.append(child)
            if fresh or not child.visits:
                break
        return path

    def _select(self, node: _Node) -> int:
        span = max(self.high - self.low, 1e-9)
        prior = self.prior(node.moves)
        scores = EXPLORATION * prior * sqrt(node.visits + 1)
        for choice in range(len(node.moves)):
            child = self.nodes.get(node.children[choice]) if choice in node.children else None
            if child and child.visits:
                scores[choice] = (child.best - self.low) / span + scores[choice] / (1 + child.visits)
            else:  # as good as the node itself until known better
                scores[choice] += (max(node.best, self.low) - self.low) / span
        return int(scores.argmax())

    def roll_out(self, plan: Plan) -> tuple[Plan, float]:
        best, found = self.reward(plan), plan
        idle = 0
        for _ in range(ROLLOUT_DEPTH):
            moves = next_moves(self.problem, plan)
            if not moves or idle > 1:
                break
            draws = self.rng.choice(len(moves), size=min(ROLLOUT_DRAWS, len(moves)), replace=False, p=self.prior(moves))
            reward, k = max((self.reward(self.incumbent.extend(plan, moves[k])), k) for k in draws)
            plan = self.incumbent.extend(plan, moves[k])
            idle = 0 if reward > best else idle + 1
            if reward > best:
                best, found = reward, plan
        return found, best

    def back_up(self, path: list[_Node], reward: float) -> None:
        for node in path:
            node.visits += 1
            node.best = max(node.best, reward)


def mcts(
    problem: Problem,
    evaluate: Evaluate,
    budget: Budget,
    rng: np.random.Generator,
    progress: SearchProgress | None = None,
) -> SearchResult:
    """Monte Carlo Tree Search, then polishing of the best plan; see the module docstring."""
    incumbent = Incumbent(problem, evaluate, budget, progress)
    tree = _Tree(problem, incumbent, rng)
    stopped = "plateau"
    try:
        tree.look_around()
        tree.climb_to_the_top(problem.fixed)
        idle = 0
        while idle < PLATEAU and incumbent.used < 1.0 - POLISH_SHARE and tree.node(problem.fixed).moves:
            before = incumbent.best
            tree.simulate()
            idle = 0 if incumbent.best != before else idle + 1
        tree.climb_to_the_top(incumbent.best)
    except OutOfBudget as why:
        stopped = str(why)
    except KeyboardInterrupt:
        stopped = "interrupted"
    return incumbent.result(stopped)
