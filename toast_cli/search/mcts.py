"""Monte Carlo Tree Search over plans.

A state is a plan in canonical order, so plans reached in different orders of equivalent decisions are one node (the
tree is a graph). Every state is itself a complete plan: stopping there is always possible, and its value is at least
its own reward. Selection is PUCT; the prior of a decision is what it was worth at the root and in all plans that held
it (as in AMAF statistics). A roll-out appends decisions, each time the best of a few drawn from the prior, and then
climbs: since appended decisions always come last in priority, edits inside the plan are what a roll-out alone cannot do
(see `climb`). Its value is the best plan on the way. Every other simulation starts from one of the best plans so far
instead, shaken by a few random edits, as in iterated local search; on meshes of many axes the edits are at times those
of a coarse grain (see `grains`). Plans given to start from, such as experts', are looked at before all else, the best
of them also with something handed over in loops.

Sources: Kocsis & Szepesvari 2006 (UCT); Rosin 2011 (PUCT); Gelly & Silver 2011 (AMAF); automap (arXiv:2112.02958) and
TOAST (arXiv:2508.15010) for MCTS over sharding decisions; Lourenco, Martin, Stutzle 2003 (iterated local search).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

import numpy as np

from toast_cli.plan.decisions import Decision, Plan
from toast_cli.plan.problem import Problem
from toast_cli.search.climb import Promise, climb, climb_around
from toast_cli.search.edits import Edit, Move, results
from toast_cli.search.grains import Grain, grains, middle_grain
from toast_cli.search.model import Budget, Evaluate, Incumbent, OutOfBudget, SearchProgress, SearchResult
from toast_cli.search.moves import Moves

EXPLORATION = 0.7  # PUCT constant, for rewards scaled to [0, 1]
ROLLOUT_DRAWS = 3  # decisions tried at each step of a roll-out
ROLLOUT_DEPTH = 10
TEMPERATURE = 0.25  # of the prior, in units of reward (nats of speed-up)
PATIENCE = 20  # edits in a row that may fail in a climb, but for the last one
NEAR = 0.02  # how close a plan is to the best that is remembered for variation, in units of reward
TOPS = 6  # plans kept for variation
STARTS = 3  # plans given to start from that are climbed from
HANDED_SHARE = 0.1  # of the budget, at most, for what is handed over in loops in each of those
SHAKES = 3  # random edits in one variation, at most
POLISH_SHARE = 0.1  # of the budget, kept for climbing from the best plan in the end
COARSE_SHARE = 0.3  # of the budget on meshes of four and more axes: as if they had two
PLATEAU = 30  # rounds of simulation and variation without a better plan that end the search


@dataclass(slots=True)
class _TreeNode:
    plan: Plan
    moves: list[Move]
    visits: int = 0
    best: float = float("-inf")  # best reward at or below this node
    children: dict[int, Plan] = field(default_factory=dict)  # place in `moves` -> child state


class _Tree:
    def __init__(self, incumbent: Incumbent, rng: np.random.Generator, grain: Grain | None = None) -> None:
        self.problem, self.incumbent, self.rng = incumbent.problem, incumbent, rng
        self.moves = Moves(self.problem, grain)
        self.coarse = [] if grain else [Moves(self.problem, part) for part in grains(self.problem)]
        self.nodes: dict[Plan, _TreeNode] = {}
        self.worth: dict[Decision, float] = {}  # best reward of a plan that holds the decision, smoothed
        self.promise: Promise = {}
        self.tops: list[tuple[float, Plan]] = []  # the best plans that no edit makes better, and their rewards
        self.low = self.high = 0.0

    def node(self, plan: Plan) -> _TreeNode:
        found = self.nodes.get(plan)
        if found is None:
            found = self.nodes[plan] = _TreeNode(plan, self.moves.after(plan))
        return found

    def reward(self, plan: Plan) -> float:
        reward = self.incumbent.reward(plan, self.incumbent.look(plan))
        self.low, self.high = min(self.low, reward), max(self.high, reward)
        worth = self.worth
        for decision in plan:
            old = worth.get(decision, reward)
            worth[decision] = reward if reward >= old else old + 0.05 * (reward - old)
        return reward

    def prior(self, moves: list[Move]) -> np.ndarray:
        worth = np.array([max(self.worth.get(d, self.low) for d in move) for move in moves])
        weight = np.exp((worth - worth.max(initial=-np.inf)) / TEMPERATURE) + 0.02
        return np.asarray(weight / weight.sum())

    def look_around(self) -> None:
        """What each move is worth alone."""
        root = self.problem.fixed
        for move in self.moves.after(root):
            self.promise[Edit((), move)] = self.reward(self.incumbent.extend(root, move))

    def best_of(self, plans: Sequence[Plan]) -> list[Plan]:
        """The best of plans to start from; all are looked at."""
        found = {plan: self.reward(plan) for plan in plans}
        return sorted(found, key=lambda plan: -found[plan])[:STARTS]

    def handed_over(self, plan: Plan) -> Plan:
        """The best of the plans in which something is handed over that loops read; the plan itself where there is
        none, or none but worse ones."""
        until = self.incumbent.used + HANDED_SHARE
        best, found = self.reward(plan), plan
        for edit in self.moves.handed_over_in_loops(plan):
            for to in results(self.problem, plan, edit):
                if self.incumbent.used >= until:
                    return found
                if (reward := self.reward(to)) > best:
                    best, found = reward, to
        return found

    def simulate(self) -> None:
        """Descends the tree, rolls out and climbs."""
        path = self.descend()
        plan, best = self.roll_out(path[-1].plan)
        best = max(best, self.climb_from(plan))
        for node in path:
            node.visits += 1
            node.best = max(node.best, best)

    def vary(self) -> None:
        """Climbs from one of the best plans, shaken; on meshes of many axes mostly in a coarse grain."""
        _, plan = self.tops[int(self.rng.integers(len(self.tops)))]
        moves = (self.moves, *self.coarse)[int(self.rng.integers(1 + len(self.coarse)))]
        self.climb_from(self.shake(plan, moves), moves)

    def climb_from(self, plan: Plan, moves: Moves | None = None) -> float:
        """Reward of the plan reached. The best few of these plans are remembered."""
        if moves is not None and moves is not self.moves:
            plan = climb(moves, self.reward, plan, self.promise, PATIENCE)
        plan = climb(self.moves, self.reward, plan, self.promise, PATIENCE)
        reward = self.reward(plan)
        if reward > self.high - NEAR or not self.tops:
            found = {top: known for known, top in self.tops} | {plan: reward}
            self.tops = sorted(((r, top) for top, r in found.items()), key=lambda t: (-t[0], repr(t[1])))[:TOPS]
        return reward

    def polish(self) -> None:
        """Tries every edit of the best plan, until none makes it better."""
        climb(self.moves, self.reward, self.incumbent.best, self.promise)

    def shake(self, plan: Plan, moves: Moves) -> Plan:
        """A few decisions dropped at random, a few drawn from the prior put in anywhere."""
        fixed = self.problem.fixed
        free = list(plan[len(fixed) :])
        for _ in range(int(self.rng.integers(1, SHAKES + 1))):
            if free and self.rng.random() < 0.6:
                held = moves.held((*fixed, *free))
                dropped = held[int(self.rng.integers(len(held)))] if held else ()
                free = [decision for decision in free if decision not in dropped]
            possible = moves.after((*fixed, *free))
            if possible and self.rng.random() < 0.7:
                place = int(self.rng.integers(len(free) + 1))
                free[place:place] = possible[int(self.rng.choice(len(possible), p=self.prior(possible)))]
        return self.problem.canonical((*fixed, *free))

    def descend(self) -> list[_TreeNode]:
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

    def _select(self, node: _TreeNode) -> int:
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
            moves = self.moves.after(plan)
            if not moves or idle > 1:
                break
            draws = self.rng.choice(len(moves), size=min(ROLLOUT_DRAWS, len(moves)), replace=False, p=self.prior(moves))
            reward, k = max((self.reward(self.incumbent.extend(plan, moves[k])), k) for k in draws)
            plan = self.incumbent.extend(plan, moves[k])
            idle = 0 if reward > best else idle + 1
            if reward > best:
                best, found = reward, plan
        return found, best


def mcts(
    problem: Problem,
    evaluate: Evaluate,
    budget: Budget,
    rng: np.random.Generator,
    progress: SearchProgress | None = None,
    starts: Sequence[Plan] = (),
) -> SearchResult:
    """Monte Carlo Tree Search, then polishing of the best plan; see the module docstring."""
    incumbent = Incumbent(problem, evaluate, budget, progress, starts)
    stopped = "plateau"
    try:
        grain = middle_grain(problem)
        if grain is not None:
            grow(incumbent, rng, grain=grain, until=COARSE_SHARE)
            climb_around(Moves(problem, grain), incumbent.worth, incumbent.best)
        grow(incumbent, rng)
    except OutOfBudget as why:
        stopped = str(why)
    except KeyboardInterrupt:
        stopped = "interrupted"
    return incumbent.result(stopped)


def grow(
    incumbent: Incumbent,
    rng: np.random.Generator,
    evaluations: float = inf,
    grain: Grain | None = None,
    until: float = 1.0 - POLISH_SHARE,
) -> None:
    """Improves the incumbent until a plateau, or about so many evaluations; raises OutOfBudget when its own budget
    ends before.

    Args:
        grain: what is decided about together, see `grains`. until: so much of the budget is used.
    """
    root = incumbent.problem.fixed
    tree = _Tree(incumbent, rng, grain)
    starts = tree.best_of(incumbent.starts)
    tree.look_around()
    for plan in dict.fromkeys((root, *starts, *map(tree.handed_over, starts))):
        tree.climb_from(plan)
    for moves in tree.coarse:
        tree.climb_from(root, moves)
    idle = 0
    while idle < PLATEAU and incumbent.used < until and tree.node(root).moves:
        if len(incumbent.seen) >= evaluations:
            break
        before = incumbent.best
        tree.simulate()
        tree.vary()
        idle = 0 if incumbent.best != before else idle + 1
    tree.polish()
