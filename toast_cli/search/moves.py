"""Moves between plans: which decisions may follow a plan, and the plans one edit away from it.

Of a coarse grain (see `grains`) several axes are decided about together, as if they were one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import permutations

from toast_cli.evaluate.evaluator import GroupSeconds
from toast_cli.plan.accumulation import ACCUMULATORS
from toast_cli.plan.decisions import NOWHERE, Decision, Plan, Replicate, Shard
from toast_cli.plan.loop_reads import LOOP_READS
from toast_cli.plan.problem import Problem
from toast_cli.search.edits import Edit, Move, like
from toast_cli.search.grains import Grain
from toast_cli.search.units import Units
from toast_cli.search.wide_edits import about_axes, families

SecondsOf = Callable[[Plan], GroupSeconds]  # see `Evaluator.seconds_between`

# Of the seconds where the group is that most are spent where it is: a part with less is not tried.
LEAST_STAKE = 2e-3


class Moves(Units):
    """The moves of one problem.

    Attributes:
        local: whether decisions may come to hold in a part of the program only (`Shard.only`).

    Args:
        seconds: where a plan's time goes, by groups; what is added that does not hold everywhere is tried first where
            most is.
    """

    def __init__(
        self, problem: Problem, grain: Grain | None = None, *, local: bool = False, seconds: SecondsOf | None = None
    ) -> None:
        super().__init__(problem, grain)
        self.local, self._seconds = local, seconds
        self._loop_reads = problem.roles.index(LOOP_READS) if LOOP_READS in problem.roles else NOWHERE
        self._loop_edges = [
            d
            for d in problem.decisions.choices
            if isinstance(d, Replicate) and problem.roles[d.role] in (ACCUMULATORS, LOOP_READS)
        ]
        # Group and axis -> decisions by which arguments rest whole that would be split.
        self._resting: dict[tuple[int, int], list[Replicate]] = defaultdict(list)
        for kept, groups in problem.decisions.rests.items():
            for group in groups:
                self._resting[group, kept.axis].append(kept)
        self._about = [tuple(d[:2] for d in unit if isinstance(d, Shard)) for unit in self.units]  # empty: of a role

    def after(self, plan: Plan) -> list[Move]:
        """What may be appended: each group takes each axis once; `Replicate` needs something split over its axes. What
        loops read may be gathered before them over all of these axes at once: what is split over several in one
        dimension is gathered over all of them together."""
        taken = {d[:2] for d in plan if isinstance(d, Shard)}
        axes = {axis for _, axis in taken}
        held = set(plan)
        found = [
            unit
            for unit, about in zip(self.units, self._about, strict=True)
            if (taken.isdisjoint(about) if about else all(d.axis in axes and d not in held for d in unit))
        ]
        allowed = {d for unit in found for d in unit}
        reads = tuple(sorted(d for d in allowed if isinstance(d, Replicate) and d.role == self._loop_reads))
        together = [reads] if len(reads) > 1 and reads not in found else []
        return [*found, *(move for move in self.macros if allowed.issuperset(move)), *together]

    def small_edits(self, plan: Plan) -> list[Edit]:
        """Everything that takes out, moves or adds; decisions every plan starts with stay."""
        held = self.held(plan)
        return [
            *(Edit(unit, ()) for unit in held),
            *(Edit(unit, unit) for unit in held if isinstance(unit[0], Shard)),
            *(Edit((), move) for move in self.after(plan)),
        ]

    def exchanges(self, plan: Plan) -> list[Edit]:
        """Everything that lets two axes change places, moves all that is decided about one axis, changes one side or
        the scope of a decision, or puts one unit in place of another of its kind: on the same axes, or of the same
        group or role.
        """
        present = set(plan)
        absent = [unit for unit in self.units if present.isdisjoint(unit)]
        return [
            *about_axes(self, plan),
            *families(self, plan),
            *self.variations(plan),
            *self.variations_everywhere(plan),
            *self.rests(plan),
            *self.at_work_only(plan),
            *self.outside_loops(plan),
            *(Edit(out, into) for out in self.held(plan) for into in absent if _alike(out[0], into[0])),
        ]

    def variations(self, plan: Plan) -> list[Edit]:
        """Everything that changes one side of one decision, or where it holds; of decisions about several axes of a
        part in all of them.
        """
        variants = self.problem.decisions.variants
        return [Edit(unit, like(to, unit)) for unit in self.held(plan) for to in variants(unit[0])]

    def variations_everywhere(self, plan: Plan) -> list[Edit]:
        """The same of all decisions about one group at once, whatever their axes: a side may pay only where nothing of
        the group is on the other."""
        variants, about = self.problem.decisions.variants, defaultdict[int, list[Shard]](list)
        for decision in plan[len(self.problem.fixed) :]:
            if isinstance(decision, Shard):
                about[decision.group].append(decision)
        found: list[Edit] = []
        for unit in map(tuple, about.values()):
            if len({self.part_of[d.axis] for d in unit}) > 1:
                into = (like(to, unit) for decision in unit for to in variants(decision))
                found += [Edit(unit, other) for other in dict.fromkeys(into)]
        return found

    def local_edits(self, plan: Plan) -> list[Edit]:
        """Everything that lets a decision hold in a part of the program only, or takes out another about the same group
        besides: the batch is split over one axis in attention, where it was split over two everywhere."""
        if not self.local:
            return []
        parts, held = self.problem.decisions.parts, self.held(plan)
        about = [
            (unit, other)
            for unit, other in permutations(held, 2)
            if isinstance(unit[0], Shard) and isinstance(other[0], Shard) and unit[0].group == other[0].group
        ]
        return [
            *(Edit(unit, like(to, unit)) for unit in held for to in parts(unit[0])),
            *(Edit((*unit, *other), like(to, unit)) for unit, other in about for to in parts(unit[0])),
        ]

    def local_additions(self, plan: Plan) -> list[Edit]:
        """Everything that splits a part of the program along a group that the plan does not split over these axes,
        first where most of a step's time is."""
        if not self.local:
            return []
        parts = self.problem.decisions.parts
        return self._worth_trying(plan, (like(to, unit) for unit in self._absent(plan) for to in parts(unit[0])))

    def varied_additions(self, plan: Plan) -> list[Edit]:
        """Everything that splits along a group that the plan does not split over these axes, but leaves some ops alone
        or takes another side of a conflict than the units do; first where most of a step's time is. Split everywhere
        it may lose what no variation of it can win back."""
        variants, known = self.problem.decisions.variants, set(self.units)
        moves = (like(to, unit) for unit in self._absent(plan) for to in variants(unit[0]))
        return self._worth_trying(plan, (move for move in moves if move not in known))

    def _absent(self, plan: Plan) -> list[Move]:
        """The first unit about each group and each part of the grain that the plan does not split it over."""
        taken = {d[:2] for d in plan if isinstance(d, Shard)}
        absent: dict[tuple[tuple[int, int], ...], Move] = {}
        for unit, about in zip(self.units, self._about, strict=True):
            if about and taken.isdisjoint(about):
                absent.setdefault(about, unit)
        return list(absent.values())

    def _worth_trying(self, plan: Plan, moves: Iterable[Move]) -> list[Edit]:
        """Edits that add one of these moves: those with most seconds at stake first, those with next to none left
        out."""
        found = [Edit((), move) for move in moves]
        if self._seconds is None:
            return found
        seconds = self._seconds(plan)
        least = LEAST_STAKE * max(seconds.values(), default=0.0)

        def stake(edit: Edit) -> float:
            first = edit.into[0]
            if not isinstance(first, Shard):
                return 0.0
            if first.only != NOWHERE:
                return seconds.get((first.group, first.only), 0.0)
            return seconds.get((first.group, first.group), 0.0) - seconds.get((first.group, first.unless), 0.0)

        return sorted((edit for edit in found if stake(edit) > least), key=lambda edit: -stake(edit))

    def rests(self, plan: Plan) -> list[Edit]:
        """Everything that keeps one kind of arguments whole over an axis that the plan splits them over, or over all of
        them.
        """
        split = {d[:2] for d in plan if isinstance(d, Shard)}
        held = {d for d in plan if not isinstance(d, Shard)}
        kept: dict[int, list[Decision]] = defaultdict(list)
        for decision, groups in self.problem.decisions.rests.items():
            if decision not in held and any((group, decision.axis) in split for group in groups):
                kept[decision.role].append(decision)
        alone = [Edit((), (decision,)) for decisions in kept.values() for decision in decisions]
        return alone + [Edit((), tuple(decisions)) for decisions in kept.values() if len(decisions) > 1]

    def at_work_only(self, plan: Plan) -> list[Edit]:
        """Everything that splits what is computed and keeps all arguments whole that would rest split by it: a unit
        more, or another scope of one held.
        """
        held = set(plan)
        edits = [*(Edit((), unit) for unit in self.after(plan)), *self.variations(plan)]
        found = []
        for out, into in edits:
            resting = {d for about in into if isinstance(about, Shard) for d in self._resting.get(about[:2], ())}
            if kept := tuple(sorted(resting - held)):
                found.append(Edit(out, (*into, *kept)))
        return found

    def outside_loops(self, plan: Plan) -> list[Edit]:
        """Everything that splits something more or in another way, with what loops read gathered before them and what
        they add up summed behind them, over all axes: where loops communicate in every trip either alone gains nothing.
        """
        if not self._loop_edges:
            return []
        held = set(plan)
        edits = [
            *(Edit((), unit) for unit in self.units if isinstance(unit[0], Shard)),
            *self.variations(plan),
            *self.variations_everywhere(plan),
        ]
        found = []
        for out, into in edits:
            axes = {d.axis for d in (*plan, *into) if isinstance(d, Shard)}
            if edges := tuple(d for d in self._loop_edges if d.axis in axes and d not in held):
                found.append(Edit(out, (*into, *edges)))
        return found

    def handed_over(self, plan: Plan, to: Iterable[Move] | None = None) -> list[Edit]:
        """Everything that leaves a part of the ops that a decision splits to another group, on the same axes: the
        sequence is split but in attention, and there the heads are (Ulysses). Either alone gains nothing.

        Args:
            to: what may have that part, where that is not any unit.
        """
        taken = {d[:2] for d in plan if isinstance(d, Shard)}
        found = []
        for unit in self.held(plan):
            first = unit[0]
            if not isinstance(first, Shard):
                continue
            axes = {d.axis for d in unit}
            others = [
                other
                for other in (self.units if to is None else to)
                if isinstance(other[0], Shard)
                and {d.axis for d in other} == axes
                and taken.isdisjoint(d[:2] for d in other)
            ]
            for variant in self.problem.decisions.variants(first):
                left = self.problem.left_to(first, variant)
                kept = like(variant, unit)
                found += [Edit(unit, (*kept, *other)) for other in others if any(d[0] in left for d in other)]
        return found

    def handed_over_in_loops(self, plan: Plan) -> list[Edit]:
        """The same, to whole families of groups too, with what loops read gathered before them over those axes, where
        else loops would communicate in every trip: the batch is split but where gradients of weights are summed over
        it, and there the weights are."""
        if self._loop_reads == NOWHERE:
            return []
        held = set(plan)
        found = []
        for out, into in self.handed_over(plan, [*self.units, *self.macros]):
            axes = {d.axis for d in into}
            reads = [d for d in self._loop_edges if d.role == self._loop_reads and d.axis in axes and d not in held]
            if reads:
                found.append(Edit(out, (*into, *reads)))
        return found


def _alike(one: Decision, other: Decision) -> bool:
    """Whether two decisions are of one kind and about the same axis, or about the same group or role."""
    return type(one) is type(other) and (one.axis == other.axis or one[0] == other[0])
