"""Monte Carlo Tree Search over plans.

A state is a plan in canonical order, so plans reached in different orders of equivalent decisions are one node (the tree is
a graph). Every state is itself a complete plan: stopping there is always possible, and its value is at least its own reward.
Selection is PUCT; the prior of a decision is what it was worth at the root and in all roll-outs that held it (as in AMAF
statistics); a roll-out appends decisions, each time the best of a few drawn from the prior, and its value is the best plan on
the way. Since decisions are appended in order of priority, a roll-out alone cannot put a new decision before old ones: every
other simulation therefore varies one of the best plans so far (inserts, moves, exchanges or drops a decision). The best plan
is polished in the end: every plan one change away is tried until none is better.

Sources: Kocsis & Szepesvari 2006 (UCT); Rosin 2011 (PUCT); Gelly & Silver 2011 (AMAF); automap (arXiv:2112.02958) and
TOAST (arXiv:2508.15010) for MCTS over sharding decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

import numpy as np

from toast_cli.plan.decisions import Decision, Plan
from toast_cli.plan.problem import Problem
from toast_cli.search.model import Budget, Evaluate, Incumbent, OutOfBudget, SearchProgress, SearchResult
from toast_cli.search.moves import Move, neighbours, next_moves

EXPLORATION = 0.7  # PUCT constant, for rewards scaled to [0, 1]
ROLLOUT_DRAWS = 3  # decisions tried at each step of a roll-out
ROLLOUT_DEPTH = 10
TEMPERATURE = 0.25  # of the prior, in units of reward (nats of speed-up)
VARIATIONS = 8  # neighbours tried in one simulation that varies an elite plan
ELITE = 6  # best plans kept for variation
POLISH_SHARE = 0.25  # of the budget, kept for polishing
PLATEAU = 80  # simulations without a better plan that end the search


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
        self.low = self.high = 0.0
        self.elite: list[tuple[float, Plan]] = []  # best rewards first

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
        if len(self.elite) < ELITE or reward > self.elite[-1][0]:
            if all(plan != other for _, other in self.elite):
                self.elite = sorted([*self.elite, (reward, plan)], key=lambda e: (-e[0], repr(e[1])))[:ELITE]
        return reward

    def prior(self, moves: list[Move]) -> np.ndarray:
        worth = np.array([max(self.worth.get(d, self.low) for d in move) for move in moves])
        weight = np.exp((worth - worth.max(initial=-np.inf)) / TEMPERATURE) + 0.02
        return np.asarray(weight / weight.sum())

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

    def roll_out(self, plan: Plan) -> float:
        best = self.reward(plan)
        idle = 0
        for _ in range(ROLLOUT_DEPTH):
            moves = next_moves(self.problem, plan)
            if not moves or idle > 1:
                break
            draws = self.rng.choice(len(moves), size=min(ROLLOUT_DRAWS, len(moves)), replace=False, p=self.prior(moves))
            reward, k = max((self.reward(self.incumbent.extend(plan, moves[k])), k) for k in draws)
            plan = self.incumbent.extend(plan, moves[k])
            idle = 0 if reward > best else idle + 1
            best = max(best, reward)
        return best

    def vary(self) -> None:
        """Random neighbours of a random elite plan; follows the first that is better."""
        _, plan = self.elite[int(self.rng.integers(len(self.elite)))]
        start = self.reward(plan)
        for _ in range(VARIATIONS):
            other = self._neighbour(plan)
            if self.reward(other) > start:
                plan, start = other, self.reward(other)

    def _neighbour(self, plan: Plan) -> Plan:
        """`plan` with a decision drawn from the prior put in anywhere, or one moved, exchanged or dropped."""
        fixed = self.problem.fixed
        free = list(plan[len(fixed) :])
        kind = self.rng.random()
        if free and kind < 0.6:  # drop one, and perhaps put it elsewhere
            dropped = free.pop(int(self.rng.integers(len(free))))
            if kind < 0.2:
                free.insert(int(self.rng.integers(len(free) + 1)), dropped)
        if kind >= 0.3 or not free:
            moves = next_moves(self.problem, (*fixed, *free))
            if moves:
                place = int(self.rng.integers(len(free) + 1))
                free[place:place] = moves[int(self.rng.choice(len(moves), p=self.prior(moves)))]
        return self.problem.canonical((*fixed, *free))

    def back_up(self, path: list[_Node], reward: float) -> None:
        for node in path:
            node.visits += 1
            node.best = max(node.best, reward)


def mcts(
    problem: Problem, evaluate: Evaluate, budget: Budget, rng: np.random.Generator, progress: SearchProgress | None = None
) -> SearchResult:
    """Monte Carlo Tree Search, then polishing of the best plan; see the module docstring."""
    incumbent = Incumbent(problem, evaluate, budget, progress)
    tree = _Tree(problem, incumbent, rng)
    stopped = "plateau"
    try:
        for move in next_moves(problem, problem.fixed):  # what each move is worth alone
            tree.reward(incumbent.extend(problem.fixed, move))
        stopped = "iterations"
        idle = 0
        while idle < PLATEAU and incumbent.used < 1.0 - POLISH_SHARE and tree.node(problem.fixed).moves:
            before = incumbent.best
            path = tree.descend()
            tree.back_up(path, tree.roll_out(path[-1].plan))
            tree.vary()
            idle = 0 if incumbent.best != before else idle + 1
        if idle >= PLATEAU or not tree.node(problem.fixed).moves:
            stopped = "plateau"
        polish(problem, incumbent)
    except OutOfBudget as why:
        stopped = str(why)
    except KeyboardInterrupt:
        stopped = "interrupted"
    return incumbent.result(stopped)


def polish(problem: Problem, incumbent: Incumbent) -> None:
    """Hill-climbs from the best plan over all plans one change away."""
    improved = True
    while improved:
        improved = False
        start = incumbent.best
        for plan in neighbours(problem, start):
            incumbent.look(plan)
            if incumbent.best != start:
                improved = True
                break
