"""What a plan has made of every op so far, as far as decisions still to come can tell: plans in the same state have the same future.

`Replicate` frees axes that other decisions have taken; so it has to come before all others, and then nothing is ever taken back
(see `plan.spending`).

Enters: decisions in order, the `Replicate`s first. Leaves: a number per view (see `evaluate.iteration_memo`); equal numbers, equal states.
"""

from __future__ import annotations

from toast_cli.evaluate.iteration_memo import IterationMemo, touch
from toast_cli.plan.decisions import Decision, Plan


class States:
    """States of the views of one problem; `rows` must not forget."""

    def __init__(self, rows: IterationMemo) -> None:
        self._rows = rows
        self.touches = [view.touches for view in rows.views]

    def touched(self, decision: Decision) -> list[int]:
        """Views whose state a decision can change."""
        return self._rows.of_touch.get(touch(decision), [])

    def state(self, view: int, plan: Plan) -> int:
        """The view's state after `plan`."""
        return self.reached(view, plan)[0]

    def reached(self, view: int, plan: Plan) -> tuple[int, int]:
        """The view's state, and its row, after `plan`."""
        steps, at = self._rows.steps(plan), self._rows.views[view]
        return self._rows.state(at, steps), self._rows.row(at, steps)
