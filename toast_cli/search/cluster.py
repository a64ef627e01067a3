"""A part of a program that sees few dimension groups, and the best that any completion of a plan can make of it.

All completions are looked at, each state of the ops once (see `states`). Enters: buckets of an evaluator, and decisions. Leaves:
`Least` per plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.evaluate.iteration_memo import touch
from toast_cli.plan.decisions import Decision, Plan, Replicate, Shard
from toast_cli.plan.problem import Problem
from toast_cli.search.states import States

Vector = NDArray[np.float64]


class Least(NamedTuple):
    """Of all completions: the least seconds, and the least bytes alive at each of the moments looked at."""

    seconds: float
    alive: Vector


class TooMany(Exception):  # noqa: N818 - not an error: the cluster is given up
    """There are more states than are to be looked at."""


class _Node(NamedTuple):
    """relevant: [views] the decisions that matter to each. states, rows: [views] where these have led."""

    relevant: tuple[Plan, ...]
    states: tuple[int, ...]
    rows: tuple[int, ...]


class Cluster:
    """Buckets whose groups and roles are all among `touches`."""

    def __init__(
        self, evaluator: Evaluator, states: States, touches: frozenset[int], buckets: Sequence[int], most: int
    ) -> None:
        """most: states to look at; more raise `TooMany`."""
        self.touches, self.buckets = touches, list(buckets)
        self._evaluator, self._states, self._most = evaluator, states, most
        self._problem: Problem = evaluator.problem
        self._views = sorted({view for bucket in buckets for view in evaluator.views_of(bucket)})
        place = {view: k for k, view in enumerate(self._views)}
        self._places = [[place[view] for view in evaluator.views_of(bucket)] for bucket in buckets]
        self._of_touch = {
            what: [k for k, view in enumerate(self._views) if what in states.touches[view]] for what in touches
        }
        self._decisions = [d for d in self._problem.space if self._of_touch.get(touch(d))]
        self._memo: dict[tuple[tuple[int, ...], frozenset[object]], Least] = {}
        self._of_plan: dict[Plan, Least] = {}
        self._shares: list[dict[tuple[int, ...], Least]] = [{} for _ in buckets]

    @property
    def size(self) -> int:
        """States looked at."""
        return len(self._memo)

    def least(self, plan: Plan, ended: Callable[[], bool]) -> Least:
        """Over all plans that begin with `plan`. Raises `TooMany`, also when `ended` says that time is up."""
        relevant = tuple([d for d in plan if touch(d) in self.touches])
        found = self._of_plan.get(relevant)
        if found is None:
            found = self._of_plan[relevant] = self._search(self._start(relevant), relevant, decided(relevant), ended)
        return found

    def forget(self) -> None:
        """Drops all that was found; for clusters that are given up."""
        self._memo.clear()
        self._of_plan.clear()
        for shares in self._shares:
            shares.clear()

    def _search(self, node: _Node, plan: Plan, done: frozenset[object], ended: Callable[[], bool]) -> Least:
        key = (node.states, done)
        found = self._memo.get(key)
        if found is not None:
            return found
        if len(self._memo) >= self._most or ended():
            raise TooMany
        seconds, alive = self._cost(node.rows)
        for decision in following(self._decisions, plan, self._problem.fixed):
            child = self._extend(node, decision)
            if child.states != node.states:
                what = decision[:2] if isinstance(decision, Shard) else decision
                least = self._search(child, (*plan, decision), done | {what}, ended)
                seconds, alive = min(seconds, least.seconds), np.minimum(alive, least.alive)
        found = self._memo[key] = Least(seconds, alive)
        return found

    def _start(self, plan: Plan) -> _Node:
        relevant = tuple(tuple(d for d in plan if touch(d) in self._states.touches[view]) for view in self._views)
        reached = [self._states.reached(view, sub) for view, sub in zip(self._views, relevant, strict=True)]
        return _Node(relevant, tuple(s for s, _ in reached), tuple(r for _, r in reached))

    def _extend(self, node: _Node, decision: Decision) -> _Node:
        relevant, states, rows = list(node.relevant), list(node.states), list(node.rows)
        for k in self._of_touch[touch(decision)]:
            relevant[k] = (*relevant[k], decision)
            states[k], rows[k] = self._states.reached(self._views[k], relevant[k])
        return _Node(tuple(relevant), tuple(states), tuple(rows))

    def _cost(self, rows: tuple[int, ...]) -> Least:
        """What the buckets add under exactly this plan."""
        seconds, alive = 0.0, self._evaluator.timeline.nothing()
        for bucket, places, shares in zip(self.buckets, self._places, self._shares, strict=True):
            key = tuple([rows[k] for k in places])
            share = shares.get(key)
            if share is None:
                numbers = {self._views[k]: rows[k] for k in places}
                share = shares[key] = Least(*self._evaluator.part_cost(bucket, numbers))
            seconds += share.seconds
            if len(alive):
                alive = alive + share.alive
        return Least(seconds, alive)


def following(decisions: Iterable[Decision], plan: Plan, fixed: Plan = ()) -> list[Decision]:
    """Decisions that may be appended: each group takes each axis once, and `Replicate`s come before all others that are not
    `fixed`, in order."""
    taken = {(d.group, d.axis) for d in plan if isinstance(d, Shard)}
    chosen = [d for d in plan if d not in fixed]
    last = next((d for d in reversed(chosen) if isinstance(d, Replicate)), None)
    late = any(isinstance(d, Shard) for d in chosen)
    return [
        d for d in decisions
        if ((d.group, d.axis) not in taken if isinstance(d, Shard) else not late and d not in plan and (last is None or d > last))
    ]  # fmt: skip


def decided(plan: Plan) -> frozenset[object]:
    """What has been decided, in whatever order and with whatever sides."""
    return frozenset([(Shard, d.group, d.axis) if isinstance(d, Shard) else d for d in plan])
