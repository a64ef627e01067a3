"""What a search decides at once: units, and macros of several that often pay only together.

Of a coarse grain (see `grains`) several axes are decided about together, as if they were one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from toast_cli.plan.decisions import NOWHERE, Decision, Plan, Shard
from toast_cli.plan.problem import Problem
from toast_cli.search.edits import Move
from toast_cli.search.grains import Grain


class Units:
    """The units of one problem.

    Attributes:
        parts: of the grain, the axes of each. part_of: axis -> its part.
        units: what is decided at once: a group or role over all axes of one part of the grain. macros: units that often
            pay only together: one group everywhere; a family of groups, or every group of the weights, over one part
            (the largest first).
    """

    def __init__(self, problem: Problem, grain: Grain | None = None) -> None:
        self.problem = problem
        self.parts = grain or tuple((axis,) for axis in range(len(problem.mesh.sizes)))
        self.part_of = {axis: number for number, axes in enumerate(self.parts) for axis in axes}
        self.units: list[Move] = self.together(problem.decisions.choices)
        self.macros = self._make_macros()

    def held(self, plan: Plan) -> list[Move]:
        """What a plan has of each unit, in the order of the plan."""
        return self.together(plan[len(self.problem.fixed) :])

    def together(self, decisions: Iterable[Decision]) -> list[Move]:
        """Decisions that differ in the axis only, within one part of the grain, together; in the order of the first
        of each.
        """
        found: dict[tuple[object, ...], list[Decision]] = defaultdict(list)
        for decision in decisions:
            found[(*decision._replace(axis=self.part_of[decision.axis]), type(decision))].append(decision)
        return [tuple(unit) for unit in found.values()]

    def places(self, one: int, other: int) -> dict[int, int]:
        """Axis of one part -> the axis of another part that stands at its place."""
        return dict(zip(self.parts[one], self.parts[other], strict=True))

    def _make_macros(self) -> list[Move]:
        weights, groups = self.problem.weight_bytes, self.problem.dimensions.groups
        everywhere: dict[int, list[Decision]] = defaultdict(list)
        together: dict[tuple[str, int, int], list[Move]] = defaultdict(list)
        for unit in self.units:
            first = unit[0]
            if isinstance(first, Shard) and not any(first.sides) and first.unless == NOWHERE:
                everywhere[first.group] += unit
                together["family", groups[first.group].family, self.part_of[first.axis]].append(unit)
                if first.group in weights:
                    together["weights", 0, self.part_of[first.axis]].append(unit)
        found: list[Move] = [tuple(decisions) for decisions in everywhere.values()]
        for units in together.values():
            units.sort(key=lambda unit: -max(weights.get(d.group, 0) for d in unit if isinstance(d, Shard)))
            found.append(tuple(decision for unit in units for decision in unit))
        known = set(self.units)
        return [move for move in dict.fromkeys(found) if len(move) > 1 and move not in known]
