"""What the op patterns of a program iterate over, one plan after another.

Patterns that the same decisions can touch form one *view*. What all patterns of a view iterate over under some plan is one
*row* of it; equal rows have one number, so that whoever needs iterations can tell by a number whether anything has changed.
Enters: a `Problem`. Leaves: row numbers per plan, and the iterations of a row.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from toast_cli.plan.decisions import Decision, Plan, Shard
from toast_cli.plan.iteration import NO_ROLE, Choice, Iteration, choose, decisive, lay_out
from toast_cli.plan.problem import Problem

Row = tuple[Iteration, ...]  # [patterns of the view]
RowNumbers = list[int] | dict[int, int]  # of the views; of all of them, or of those at hand


@dataclass(slots=True)
class View:
    """touches: of the decisions that matter, see `touch`. patterns: numbers of those that always choose alike, together."""

    touches: frozenset[int]
    patterns: list[list[int]]
    rows: list[Row] = field(default_factory=list)
    number: dict[tuple[Choice, ...], int] = field(default_factory=dict)  # [lists of patterns] choices -> row number
    memo: dict[Plan, int] = field(default_factory=dict)  # the decisions that matter -> row number


def touch(decision: Decision) -> int:
    """What a decision reaches: its group's number, or below -1 the argument role."""
    return decision.group if isinstance(decision, Shard) else _role(decision.role)


def _role(role: int) -> int:
    return -2 - role


class Rows:
    """Rows of one problem. `size` counts the plans remembered, over all views."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._sizes = problem.mesh.sizes
        self.size = 0
        self.place: list[tuple[int, int]] = [(0, 0)] * len(
            problem.patterns
        )  # [patterns] number of its view, place in it
        self.of_touch: dict[int, list[int]] = defaultdict(list)  # touch -> views
        self._iterations: list[dict[Choice, Iteration]] = [{} for _ in problem.patterns]
        self.views = self._make_views()

    def _make_views(self) -> list[View]:
        found: dict[frozenset[int], dict[tuple[object, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
        for number, pattern in enumerate(self._problem.patterns):
            role = [] if pattern.role == NO_ROLE else [_role(pattern.role)]
            found[frozenset([*pattern.groups, *role])][decisive(pattern)].append(number)
        views = [View(touches, list(alike.values())) for touches, alike in found.items()]
        for at, view in enumerate(views):
            for what in view.touches:
                self.of_touch[what].append(at)
            for place, number in enumerate(number for alike in view.patterns for number in alike):
                self.place[number] = at, place
        return views

    def row(self, view: View, touched: list[tuple[int, Decision]]) -> int:
        """Number of the view's row under a plan, given as pairs of `touch` and decision."""
        touches = view.touches
        key = tuple([decision for what, decision in touched if what in touches])
        found = view.memo.get(key)
        if found is None:
            found = view.memo[key] = self._make_row(view, key)
            self.size += 1
        return found

    def _make_row(self, view: View, plan: Plan) -> int:
        problem = self._problem
        choices = tuple(
            choose(problem.patterns[alike[0]], plan, problem.resolution_place, self._sizes) for alike in view.patterns
        )
        found = view.number.setdefault(choices, len(view.rows))
        if found == len(view.rows):
            view.rows.append(
                tuple(
                    self._lay_out(number, choice)
                    for alike, choice in zip(view.patterns, choices, strict=True)
                    for number in alike
                )
            )
        return found

    def _lay_out(self, pattern: int, choice: Choice) -> Iteration:
        """Equal choices give one object, so that items can be remembered by identity."""
        known = self._iterations[pattern]
        found = known.get(choice)
        if found is None:
            found = known[choice] = lay_out(self._problem.patterns[pattern], choice)
        return found

    def iteration(self, pattern: int, rows: RowNumbers) -> Iteration:
        """What a pattern iterates over; `rows` [views]."""
        view, place = self.place[pattern]
        return self.views[view].rows[rows[view]][place]

    def forget(self) -> None:
        """Forgets plans; rows keep their numbers."""
        for view in self.views:
            view.memo.clear()
        self.size = 0

    def changed(self, old: Plan, new: Plan) -> tuple[float, set[int]]:
        """How much may differ between two plans: (views, counted once per decision; touches).

        A decision that both plans hold in the same order among all those they share changes nothing; the most far-reaching
        such decisions are found as a longest common subsequence, weighted by the views a decision reaches.
        """
        first, last_old, last_new = 0, len(old), len(new)
        while first < min(last_old, last_new) and old[first] == new[first]:
            first += 1
        while first < min(last_old, last_new) and old[last_old - 1] == new[last_new - 1]:
            last_old, last_new = last_old - 1, last_new - 1
        moved = self._not_shared(old[first:last_old], new[first:last_new])
        touches = [touch(decision) for decision in moved]
        return float(sum(len(self.of_touch[what]) for what in touches)), set(touches)

    def _not_shared(self, old: Plan, new: Plan) -> list[Decision]:
        if not old or not new:
            return [*old, *new]
        weights = [len(self.of_touch[touch(decision)]) + 1 for decision in old]
        # best[i][j]: weight of what old[i:] and new[j:] can share
        best = [[0] * (len(new) + 1) for _ in range(len(old) + 1)]
        for i in range(len(old) - 1, -1, -1):
            row, below, it, weight = best[i], best[i + 1], old[i], weights[i]
            for j in range(len(new) - 1, -1, -1):
                row[j] = below[j + 1] + weight if it == new[j] else max(below[j], row[j + 1])
        moved: list[Decision] = []
        i = j = 0
        while i < len(old) and j < len(new):
            if old[i] == new[j]:
                i, j = i + 1, j + 1
            elif best[i + 1][j] >= best[i][j + 1]:
                moved.append(old[i])
                i += 1
            else:
                moved.append(new[j])
                j += 1
        return [*moved, *old[i:], *new[j:]]
