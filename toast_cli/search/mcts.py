"""Local search and tree search over plans (automap, arXiv:2112.02958; TOAST, arXiv:2508.15010)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

import numpy as np

from toast_cli.plan.decisions import Decision, Plan
from toast_cli.search.incumbent import LONG_PLATEAU, PLATEAU, Incumbent, OutOfBudget, SearchResult
from toast_cli.search.moves import NEIGHBOURHOODS, DecisionSequence, Edit, Moves, results

# ---------------------------------------------------------------- tree search
# The known strategies are evaluated first. Local search improves the best two of them, then the best plan so far, and
# restarts from good ones, until a plateau: this much every search does (`BRIEF`). With a larger budget a tree then
# grows, the other strategies are improved, and local search goes on until a longer plateau. The budget only decides
# where the search ends, so a larger one never leads to a worse plan.
#
# A node is a plan in canonical order, so plans that are reached by different orders of equivalent decisions are one
# node. Every node is a complete plan; an edge appends a move. A simulation selects (PUCT, Rosin 2011), expands, rolls
# out, and backs up the best reward on its way. A roll-out appends moves, each the best of a few drawn from the prior,
# and ends in a short local search: appended decisions come last in priority, so only edits can change the inside of a
# plan.
#
# The prior of a move is the best reward of a plan that held its decisions (as in AMAF, Gelly & Silver 2011). At first
# every single move is tried at the root, which initialises the priors.

BRIEF = 2000  # evaluations after which only a larger budget goes on
TREE = 500  # evaluations of the tree
IDLE_SIMULATIONS = 30  # simulations in a row that lead to known plans only: the space is exhausted
EXPLORATION = 0.7  # PUCT constant, for rewards scaled to [0, 1]
DRAWS, DEPTH = 3, 10  # moves drawn at each step of a roll-out, and its steps at most
IMPROVE = 60  # evaluations of the local search at the end of a roll-out
TEMPERATURE = 0.25  # of the prior, in units of reward (nats of step time)
LONGEST = 32  # moves from the root to a leaf


@dataclass(slots=True)
class _Node:
    plan: Plan
    moves: list[DecisionSequence]
    visits: int = 0
    best: float = -inf  # best reward at or below this node
    children: dict[int, Plan] = field(default_factory=dict)  # number in `moves` -> child


def mcts(incumbent: Incumbent, rng: np.random.Generator) -> SearchResult:
    """Improves the incumbent until a plateau or the end of its budget; see above."""
    stopped = "plateau"
    try:
        _explore(incumbent, rng)
    except OutOfBudget as why:
        stopped = str(why)
    except KeyboardInterrupt:
        stopped = "interrupted"
    return incumbent.result(stopped)


def _explore(incumbent: Incumbent, rng: np.random.Generator) -> None:
    """Improves the incumbent until a plateau; raises OutOfBudget when its budget ends before."""
    moves = Moves(incumbent.problem, incumbent.evaluator.seconds_between)
    local = LocalSearch(incumbent, moves, rng)
    starts = sorted(incumbent.starts, key=lambda plan: (-incumbent.worth(plan), repr(plan)))
    local.improve_each(starts[:FIRST])
    local.run(PLATEAU, BRIEF)
    if not incumbent.allows(BRIEF):
        return
    tree, idle, last = TreeSearch(incumbent, moves, local, rng), 0, len(incumbent.seen) + TREE
    while len(incumbent.seen) < last and idle < IDLE_SIMULATIONS:
        before = len(incumbent.seen)
        tree.simulate()
        idle = 0 if len(incumbent.seen) > before else idle + 1
    local.improve_each(starts[FIRST:])
    local.run(LONG_PLATEAU)


class TreeSearch:
    """The search tree of one problem."""

    def __init__(self, incumbent: Incumbent, moves: Moves, local: LocalSearch, rng: np.random.Generator) -> None:
        self._incumbent, self._moves, self._local, self._rng = incumbent, moves, local, rng
        self._nodes: dict[Plan, _Node] = {}
        self._worth: dict[Decision, float] = {}  # best reward of a plan that holds the decision
        self._low = self._high = 0.0
        root = incumbent.problem.fixed
        for plan in (*incumbent.starts, *(incumbent.extend(root, move) for move in moves.after(root))):
            self._reward(plan)

    def simulate(self) -> None:
        """One simulation: selects, expands, rolls out and backs up."""
        path = self._descend()
        best = self._roll_out(path[-1].plan)
        for node in path:
            node.visits += 1
            node.best = max(node.best, best)

    def _reward(self, plan: Plan) -> float:
        reward = self._incumbent.worth(plan)
        self._low, self._high = min(self._low, reward), max(self._high, reward)
        for decision in plan:
            self._worth[decision] = max(reward, self._worth.get(decision, -inf))
        return reward

    def _prior(self, moves: list[DecisionSequence]) -> np.ndarray:
        """[moves] the probability of each."""
        worth = [sum(self._worth.get(d, self._low) for d in move) / len(move) for move in moves]
        scaled = (np.array(worth) - max(worth)) / TEMPERATURE
        weights = np.exp(np.maximum(scaled, -20.0))
        probabilities: np.ndarray = weights / weights.sum()
        return probabilities

    def _node(self, plan: Plan) -> _Node:
        node = self._nodes.get(plan)
        if node is None:
            node = self._nodes[plan] = _Node(plan, self._moves.after(plan))
        return node

    def _descend(self) -> list[_Node]:
        """The path from the root to a node that has not been visited."""
        path = [self._node(self._incumbent.problem.fixed)]
        while path[-1].moves and len(path) < LONGEST:
            node = path[-1]
            choice = self._select(node)
            if choice not in node.children:
                node.children[choice] = self._incumbent.extend(node.plan, node.moves[choice])
            path.append(self._node(node.children[choice]))
            if not path[-1].visits:
                break
        return path

    def _select(self, node: _Node) -> int:
        """The move with the highest upper confidence bound; a child counts as good as its parent until visited."""
        span = max(self._high - self._low, 1e-9)
        scores = EXPLORATION * self._prior(node.moves) * sqrt(node.visits + 1)
        for choice in range(len(node.moves)):
            child = self._nodes.get(node.children[choice]) if choice in node.children else None
            visits, best = (child.visits, child.best) if child else (0, -inf)
            value = best if visits else max(node.best, self._low)
            scores[choice] = (value - self._low) / span + scores[choice] / (1 + visits)
        return int(scores.argmax())

    def _roll_out(self, plan: Plan) -> float:
        """The best reward of a roll-out, including the local search at its end."""
        best, best_plan, idle = self._reward(plan), plan, 0
        for _ in range(DEPTH):
            moves = self._moves.after(plan)
            if not moves or idle > 1:
                break
            draws = self._rng.choice(len(moves), min(DRAWS, len(moves)), replace=False, p=self._prior(moves))
            plans = [self._incumbent.extend(plan, moves[k]) for k in draws]
            plan = max(plans, key=self._reward)
            reward, idle = self._reward(plan), idle + 1
            if reward > best:
                best, best_plan, idle = reward, plan, 0
        return max(best, self._reward(self._local.improve(best_plan, IMPROVE)))


# ---------------------------------------------------------------- local search
# Local search: improves a plan by edits from a table of neighbourhoods, then restarts from perturbed good plans.
#
# The neighbourhoods take turns: once each has had one, the next is the one whose last turns gained most per evaluated
# plan (Ropke, Pisinger 2006). In its turn it tries its edits, first those that gained most when they were last tried
# (Minoux 1978); of edits that remove the same decisions it applies the best, if that improves the plan. A plan that no
# neighbourhood improves is a local optimum. A restart, which takes turns as well, changes one of the best local optima
# by a few random edits and improves that: iterated local search (Lourenco, Martin, Stutzle 2003).

LEAST_GAIN = 1e-9  # of reward (nats of step time): less is rounding
FIRST = 2  # start plans that are improved first
DESCENT = 150  # evaluations to improve each start plan
TURN = 150  # evaluations of a neighbourhood in one turn
TRIAL = 100  # evaluations after a restart
KICKS = 3  # random edits of a restart, at most
POOL = 4  # local optima that restarts begin from
IDLE_TURNS = 30  # turns in a row that lead to known plans only: the space is exhausted
RESTART = "restart"


class LocalSearch:
    """Improves plans of one problem. Statistics about edits are shared by all plans."""

    def __init__(self, incumbent: Incumbent, moves: Moves, rng: np.random.Generator) -> None:
        self._incumbent, self._moves, self._rng = incumbent, moves, rng
        self._rates = _unknown()
        self._promise: dict[Edit, float] = {}  # gain of an edit when it was last tried
        self._optima: dict[Plan, float] = {}  # plans that a descent ended at -> reward

    def improve_each(self, starts: Sequence[Plan]) -> None:
        """Improves each start plan a little."""
        for start in starts:
            self._rates = _unknown()
            reached = self.improve(start, DESCENT)
            self._optima[reached] = self._incumbent.worth(reached)

    def run(self, plateau: int, evaluations: float = inf) -> None:
        """Improves the incumbent until a plateau (see `Incumbent.is_flat`), or until so many evaluations in all."""
        stuck, idle, begun = set[str](), 0, len(self._incumbent.seen)
        while not self._incumbent.is_flat(begun, plateau) and idle < IDLE_TURNS:
            plan, looked = self._incumbent.best, len(self._incumbent.seen)
            if looked >= evaluations:
                break
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
        pool = sorted(self._optima, key=lambda optimum: (-self._optima[optimum], repr(optimum)))[:POOL]
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
                rewards = {result: self._incumbent.worth(result) for result in results(self._moves.problem, plan, edit)}
                if rewards:
                    most = max(rewards, key=rewards.__getitem__)
                    self._promise[edit] = rewards[most] - reward
                    if rewards[most] > best:
                        best, better = rewards[most], most
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
        plans = list(results(self._moves.problem, plan, edits[int(self._rng.integers(len(edits)))]))
        return plans[int(self._rng.integers(len(plans)))] if plans else plan


def _unknown() -> dict[str, float]:
    """Initial rates: neighbourhood -> recent reward per evaluation, infinite so that each gets a turn."""
    return dict.fromkeys((*NEIGHBOURHOODS, RESTART), inf)
