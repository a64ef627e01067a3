"""Moves between plans: which decisions may follow a plan, and the plans one edit away from it.

Of a coarse grain (see `grains`) several axes are decided about together, as if they were one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, permutations
from typing import Any

from toast_cli.evaluate.evaluator import GroupSeconds
from toast_cli.plan.accumulation import ACCUMULATORS
from toast_cli.plan.decisions import NOWHERE, Decision, Plan, Replicate, Shard
from toast_cli.plan.loop_reads import LOOP_READS
from toast_cli.plan.problem import Problem
from toast_cli.search.edits import Edit, Move, Shards, like
from toast_cli.search.grains import Grain

SecondsOf = Callable[[Plan], GroupSeconds]  # see `Evaluator.seconds_between`

# Of the seconds where the group is that most are spent where it is: a part with less is not tried.
LEAST_STAKE = 2e-3


class Moves:
    """The moves of one problem.

    Attributes:
        units: what is decided at once: a group or role over all axes of one part of the grain. macros: units that often
            pay only together: one group everywhere; a family of groups, or every group of the weights, over one part
            (the largest first).
        local: whether decisions may come to hold in a part of the program only (`Shard.only`).

    Args:
        seconds: where a plan's time goes, by groups; what is added that does not hold everywhere is tried first where
            most is.
    """

    def __init__(
        self, problem: Problem, grain: Grain | None = None, *, local: bool = False, seconds: SecondsOf | None = None
    ) -> None:
        self.problem, self.local, self._seconds = problem, local, seconds
        parts = grain or tuple((axis,) for axis in range(len(problem.mesh.sizes)))
        part_of = {axis: number for number, axes in enumerate(parts) for axis in axes}
        self._parts, self._part_of = parts, part_of
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
        self.units: list[Move] = self._together(problem.decisions.choices)
        self._about = [tuple(d[:2] for d in unit if isinstance(d, Shard)) for unit in self.units]  # empty: of a role
        self.macros = self._make_macros(part_of)

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
            *self.about_axes(plan),
            *self.families(plan),
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
            if len({self._part_of[d.axis] for d in unit}) > 1:
                into = (like(to, unit) for decision in unit for to in variants(decision))
                found += [Edit(unit, other) for other in dict.fromkeys(into)]
        return found

    def families(self, plan: Plan) -> list[Edit]:
        """Everything that changes where all decisions about one family of groups hold that are about the same axes, or
        moves them to other axes: layers that are alike have groups of their own, and what helps one of them may help
        only where it is done in all."""
        groups = self.problem.dimensions.groups
        alike: dict[tuple[int, int], list[Shards]] = defaultdict(list)
        for unit in self.held(plan):
            if shards := tuple(d for d in unit if isinstance(d, Shard)):
                alike[groups[shards[0].group].family, self._part_of[shards[0].axis]].append(shards)
        taken = {d[:2] for d in plan if isinstance(d, Shard)}
        found: list[Edit] = []
        for (_, part), units in alike.items():
            if len(units) > 1:
                found += [*self._in_other_scopes(units), *self._on_other_axes(units, part, taken)]
        return found

    def _in_other_scopes(self, units: list[Shards]) -> Iterator[Edit]:
        """Edits by which all of these units come to leave the same ops, as far as each may."""
        changed: dict[tuple[int, int], list[tuple[Shards, Move]]] = defaultdict(list)
        for unit in units:
            for to in self.problem.decisions.variants(unit[0]):
                if isinstance(to, Shard) and to.sides == unit[0].sides:
                    changed[to.unless, to.only].append((unit, like(to, unit)))
        for changes in changed.values():
            if len(changes) > 1:
                yield Edit(tuple(d for out, _ in changes for d in out), tuple(d for _, into in changes for d in into))

    def _on_other_axes(self, units: list[Shards], part: int, taken: set[tuple[int, int]]) -> Iterator[Edit]:
        """Edits by which these units come to be about the axes of another part of the grain, as far as they may and are
        not `taken`."""
        offers = self.problem.decisions.offers
        for other, axes in enumerate(self._parts):
            if other == part or len(axes) != len(self._parts[part]):
                continue
            place = self._places(part, other)
            moved = [(d, d._replace(axis=place[d.axis])) for unit in units for d in unit]
            moved = [(d, to) for d, to in moved if offers(to) and to[:2] not in taken]
            if len(moved) > 1:
                yield Edit(tuple(d for d, _ in moved), tuple(to for _, to in moved))

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

    def about_axes(self, plan: Plan) -> list[Edit]:
        """Edits of all decisions about an axis together, which may become those about another axis, and of all about
        two, of those of what is split over both, or of each group that is. Of a coarse grain, parts stand for axes.
        """
        decisions, part_of, offers = plan[len(self.problem.fixed) :], self._part_of, self.problem.decisions.offers
        parts = sorted({part_of[d.axis] for d in decisions})
        if len(parts) < 2:
            return []
        found = [Edit(move, move) for move in (tuple(d for d in decisions if part_of[d.axis] == p) for p in parts)]
        alike = [
            (one, other) for one, other in permutations(parts, 2) if len(self._parts[one]) == len(self._parts[other])
        ]
        for one, other in alike:
            if one > other:
                continue
            place = self._places(one, other) | self._places(other, one)
            either = tuple(d for d in decisions if d.axis in place)
            of_groups = Counter(about for about, *_ in {(d[0], type(d), part_of[d.axis]) for d in either})
            both = tuple(d for d in either if of_groups[d[0]] > 1)
            for moved in dict.fromkeys((either, both)):
                into = tuple(d._replace(axis=place[d.axis]) for d in moved)
                if into and all(map(offers, into)):
                    found.append(Edit(moved, into))
            units = [
                shards for unit in self._together(both) if (shards := tuple(d for d in unit if isinstance(d, Shard)))
            ]
            pairs = (pair for pair in combinations(units, 2) if pair[0][0].group == pair[1][0].group)
            found += [edit for pair in pairs for edit in _crosswise(*pair) if all(map(offers, edit.into))]
        for one, other in alike:
            place = self._places(one, other)
            out = tuple(d for d in decisions if part_of[d.axis] == other)
            into = tuple(filter(offers, (d._replace(axis=place[d.axis]) for d in decisions if d.axis in place)))
            if into and into != out:
                found.append(Edit(out, into))
        return found

    def _places(self, one: int, other: int) -> dict[int, int]:
        """Axis of one part -> the axis of another part that stands at its place."""
        return dict(zip(self._parts[one], self._parts[other], strict=True))

    def held(self, plan: Plan) -> list[Move]:
        """What a plan has of each unit, in the order of the plan."""
        return self._together(plan[len(self.problem.fixed) :])

    def _together(self, decisions: Iterable[Decision]) -> list[Move]:
        """Decisions that differ in the axis only, within one part of the grain, together; in the order of the first
        of each.
        """
        found: dict[tuple[object, ...], list[Decision]] = defaultdict(list)
        for decision in decisions:
            found[(*decision._replace(axis=self._part_of[decision.axis]), type(decision))].append(decision)
        return [tuple(unit) for unit in found.values()]

    def _make_macros(self, part_of: dict[int, int]) -> list[Move]:
        weights, groups = self.problem.weight_bytes, self.problem.dimensions.groups
        everywhere: dict[int, list[Decision]] = defaultdict(list)
        together: dict[tuple[str, int, int], list[Move]] = defaultdict(list)
        for unit in self.units:
            first = unit[0]
            if isinstance(first, Shard) and not any(first.sides) and first.unless == NOWHERE:
                everywhere[first.group] += unit
                together["family", groups[first.group].family, part_of[first.axis]].append(unit)
                if first.group in weights:
                    together["weights", 0, part_of[first.axis]].append(unit)
        found: list[Move] = [tuple(decisions) for decisions in everywhere.values()]
        for units in together.values():
            units.sort(key=lambda unit: -max(weights.get(d.group, 0) for d in unit if isinstance(d, Shard)))
            found.append(tuple(decision for unit in units for decision in unit))
        known = set(self.units)
        return [move for move in dict.fromkeys(found) if len(move) > 1 and move not in known]


def _crosswise(one: Shards, other: Shards) -> list[Edit]:
    """Edits of two units about one group that exchange where they hold, their sides, or their axes."""
    pair = (*one, *other)
    scopes = (
        *_with(one, unless=other[0].unless, only=other[0].only),
        *_with(other, unless=one[0].unless, only=one[0].only),
    )
    sides = *_with(one, sides=other[0].sides), *_with(other, sides=one[0].sides)
    found = [scopes, sides]
    if len(one) == len(other):
        swapped = zip(pair, (*other, *one), strict=True)
        found.append(tuple(d._replace(axis=to.axis) for d, to in swapped))
    return [Edit(pair, into) for into in dict.fromkeys(found) if into != pair]


def _with(unit: Shards, **fields: Any) -> Shards:
    return tuple(d._replace(**fields) for d in unit)


def _alike(one: Decision, other: Decision) -> bool:
    """Whether two decisions are of one kind and about the same axis, or about the same group or role."""
    return type(one) is type(other) and (one.axis == other.axis or one[0] == other[0])
