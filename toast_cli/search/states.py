"""What a plan has made of every op so far, as far as decisions still to come can tell: plans in the same state have the same future.

For an op the state is the axes its slots have taken, the slots its partial results are scattered on, and, for axes on which a
reduction has been or may still be spent, which decisions would have the result scattered and in what order. `Replicate` frees axes
that other decisions have taken; so it has to come before all others, and then nothing is ever taken back.

Enters: decisions in order, the `Replicate`s first. Leaves: a number per view (see `cost.rows`); equal numbers, equal states.
"""

from __future__ import annotations

from toast_cli.cost.rows import Rows, touch
from toast_cli.dimensions.model import SlotKind
from toast_cli.plan.decisions import Decision, Plan, Replicate, Shard
from toast_cli.plan.iteration import OpPattern
from toast_cli.plan.problem import Problem


class States:
    """States of the views of one problem."""

    def __init__(self, problem: Problem, rows: Rows) -> None:
        self._problem, self._rows = problem, rows
        self._memo: list[dict[Plan, tuple[int, int]]] = [{} for _ in rows.views]
        self._numbers: list[dict[object, int]] = [{} for _ in rows.views]
        self.touches = [view.touches for view in rows.views]

    def touched(self, decision: Decision) -> list[int]:
        """Views whose state a decision can change."""
        return self._rows.of_touch.get(touch(decision), [])

    def state(self, view: int, plan: Plan) -> int:
        """The view's state after `plan`."""
        touches = self.touches[view]
        return self.reached(view, tuple([d for d in plan if touch(d) in touches]))[0]

    def reached(self, view: int, relevant: Plan) -> tuple[int, int]:
        """The view's state, and its row, after decisions that all matter to it."""
        found = self._memo[view].get(relevant)
        if found is None:
            at = self._rows.views[view]
            row = self._rows.row(at, [(touch(d), d) for d in relevant])
            key = (row, tuple(d for d in relevant if isinstance(d, Replicate)), self._waiting(view, row, relevant))
            numbers = self._numbers[view]
            found = self._memo[view][relevant] = (numbers.setdefault(key, len(numbers)), row)
        return found

    def _waiting(self, view: int, row: int, plan: Plan) -> tuple[object, ...]:
        """What could still have partial results scattered, for each pattern that has a reduction."""
        patterns = self._problem.patterns
        found: list[object] = []
        for alike in self._rows.views[view].patterns:
            pattern = patterns[alike[0]]
            if SlotKind.REDUCTION in pattern.form.kinds:
                slot_axes = self._rows.iteration(alike[0], {view: row}).slot_axes
                found.append(_waiting(pattern, slot_axes, plan, len(self._problem.mesh.sizes)))
        return tuple(found)


def _waiting(
    pattern: OpPattern, slot_axes: tuple[tuple[int, ...], ...], plan: Plan, axes: int
) -> tuple[tuple[Decision, ...], ...]:
    """[axes] decisions that may yet have a partial result scattered over the axis, in order."""
    kinds = pattern.form.kinds
    settled = {a for kind, taken in zip(kinds, slot_axes, strict=True) if kind is not SlotKind.REDUCTION for a in taken}
    results = {pattern.groups[slot] for dims in pattern.form.results for slots in dims for slot in slots}
    return tuple(
        tuple(d for d in plan if isinstance(d, Shard) and d.axis == axis and d.group in results)
        if axis not in settled
        else ()
        for axis in range(axes)
    )
