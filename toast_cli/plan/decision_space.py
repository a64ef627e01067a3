"""The decisions that a search may take: initial ones, those that differ from a given one in a single respect, and
decisions to replicate one kind of arguments.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from toast_cli.dimensions.model import FactorKind
from toast_cli.plan.axis_assignment import claim_of, is_looked_up_by
from toast_cli.plan.decisions import ASIDE, LOOK_UPS, NONE, SUMMED, Decision, Replicate, Shard
from toast_cli.plan.loops import ACCUMULATORS, LOOP_READS
from toast_cli.plan.problem import Problem
from toast_cli.program.model import once
from toast_cli.program.ops import ARGUMENT, DOT_GENERAL
from toast_cli.program.roles import INPUTS, WEIGHTS, views


@once
def decision_space(problem: Problem) -> DecisionSpace:
    return DecisionSpace(problem)


@dataclass(frozen=True)
class DecisionSpace:
    """The decisions that a search may take for a problem."""

    problem: Problem

    @cached_property
    def choices(self) -> tuple[Decision, ...]:
        """Decisions by which a search may extend a plan, in canonical order: every group over every axis that can split
        it, with a few choices of sides. `variants` leads to the rest of the space."""
        problem, useful, meets = self.problem, self._useful_groups(), self.met_elsewhere
        decisions: list[Decision] = []
        for axis, size in enumerate(problem.mesh.sizes):
            if size == 1 or axis in problem.closed:
                continue
            for number, group in enumerate(problem.dimensions.groups):
                if number in useful and any(problem.dimensions.class_sizes[c] % size == 0 for c in group.classes):
                    decisions.extend(Shard(number, axis, sides) for sides in self._sides(number))
                    decisions.extend(
                        Shard(number, axis, (0,) * len(group.resolutions), other) for other in meets.get(number, ())
                    )
            decisions += [Replicate(r, axis) for r in sorted(set(problem.argument_role)) if problem.roles[r] != INPUTS]
            decisions += [
                Replicate(problem.roles.index(r), axis) for r in (ACCUMULATORS, LOOP_READS) if r in problem.roles
            ]
        return tuple(decision for decision in decisions if decision not in self._taking_back)

    def _useful_groups(self) -> set[int]:
        """Groups that some op which does real work can be split along."""
        problem = self.problem
        ops = zip(problem.program.ops, problem.op_pattern, strict=True)
        working = {pattern for op, pattern in ops if op.flops or op.name == ARGUMENT}
        return {
            group
            for pattern in (problem.patterns[number] for number in working)
            for group, kind in zip(pattern.groups, pattern.form.kinds, strict=True)
            if kind is not FactorKind.BLOCKED
        }

    @cached_property
    def met_elsewhere(self) -> dict[int, list[int]]:
        """Group that is a batch dimension of contractions with weights (experts) -> groups that occur with it in other
        contractions, but in none of those."""
        problem = self.problem
        origin = views(problem.program)
        roles = {value for value, k in origin.items() if problem.roles[problem.argument_role[k]] == WEIGHTS}
        with_weights: dict[int, set[int]] = defaultdict(set)
        elsewhere: dict[int, set[int]] = defaultdict(set)
        for op, number in zip(problem.program.ops, problem.op_pattern, strict=True):
            if op.name != DOT_GENERAL:
                continue
            form, groups = problem.patterns[number].form, problem.patterns[number].groups
            left, right, out = ({s for factors in dims for s in factors} for dims in (*form.operands, form.results[0]))
            batching = {groups[s] for s in left & right & out}
            for group in {groups[s] for s in left | right}:
                if group in batching and any(v in roles for v in op.operands):
                    with_weights[group].update(groups)
                else:
                    elsewhere[group].update(groups)
        return {g: sorted(elsewhere[g] - met) for g, met in with_weights.items()}

    def _sides(self, group: int) -> list[tuple[int, ...]]:
        """Initial choices of sides: all resolution groups of the group on side k, or all `ASIDE`. `variants` lists the
        others."""
        counts = self._side_counts(group)
        if not counts:
            return [()]
        uniform = [tuple(min(side, n - 1) for n in counts) for side in range(max(counts))]
        return list(dict.fromkeys([*uniform, (ASIDE,) * len(counts)]))

    def _side_counts(self, group: int) -> list[int]:
        """[resolution groups of the group] number of sides of each."""
        return [self.problem.dimensions.resolutions[r].sides for r in self.problem.dimensions.groups[group].resolutions]

    def variants(self, decision: Decision) -> list[Decision]:
        """Decisions that differ in the side of one conflict, or in `unless`. `parts` lists those with `only`."""
        if not isinstance(decision, Shard):
            return []
        decisions: list[Decision] = []
        for place, count in enumerate(self._side_counts(decision.group)):
            before, after = decision.sides[:place], decision.sides[place + 1 :]
            decisions += [decision._replace(sides=(*before, side, *after)) for side in range(ASIDE, count)]
        decisions += [decision._replace(unless=scope, only=NONE) for scope in self._scopes(decision.group)]
        return [d for d in decisions if d != decision]

    def parts(self, decision: Decision) -> list[Decision]:
        """The same decision restricted to a part of the program (`Shard.only`), once for each possible part."""
        if not isinstance(decision, Shard):
            return []
        restricted = [decision._replace(unless=NONE, only=scope) for scope in self._within(decision.group)]
        return [d for d in restricted if d != decision]

    def offers(self, decision: Decision) -> bool:
        """Whether a search may take a decision: `choices`, `rests`, and all that `variants` and `parts` lead to."""
        if isinstance(decision, Replicate):
            return decision in self._offered or decision in self.rests
        if decision in self._offered:
            return True
        counts = self._side_counts(decision.group)
        return (
            decision._replace(sides=(0,) * len(counts), unless=NONE, only=NONE) in self._offered
            and len(decision.sides) == len(counts)
            and all(ASIDE <= side < count for side, count in zip(decision.sides, counts, strict=True))
            and (
                decision.unless in self._scopes(decision.group)
                if decision.only == NONE
                else decision.unless == NONE and decision.only in self._within(decision.group)
            )
        )

    @cached_property
    def rests(self) -> dict[Replicate, frozenset[int]]:
        """Decisions to replicate one kind of arguments that `choices` lacks -> groups of those arguments that could be
        split over the axis."""
        problem = self.problem
        splittable: dict[Replicate, set[int]] = defaultdict(set)
        shards = {d[:2] for d in self.choices if isinstance(d, Shard)}
        for number, kind in enumerate(problem.argument_kind):
            for group in problem.patterns[problem.op_pattern[number]].groups:
                for axis in range(len(problem.mesh.sizes)):
                    if (group, axis) in shards and Replicate(kind, axis) not in self._offered:
                        splittable[Replicate(kind, axis)].add(group)
        return {
            decision: frozenset(groups)
            for decision, groups in sorted(splittable.items())
            if decision not in self._taking_back
        }

    @cached_property
    def _offered(self) -> frozenset[Decision]:
        return frozenset(self.choices)

    def _scopes(self, group: int) -> tuple[int, ...]:
        """Possible values of `Shard.unless` for a group."""
        scopes = (*self.met_elsewhere.get(group, ()), *self._parts_of_work.get(group, ()))
        return (NONE, *dict.fromkeys(scopes), *((LOOK_UPS,) if group in self._looked_up else ()))

    @cached_property
    def _looked_up(self) -> frozenset[int]:
        """Groups that the indices of some look-up have and its table does not."""
        return frozenset(
            group
            for pattern in self.problem.patterns
            for group in set(pattern.groups)
            if is_looked_up_by(pattern, group)
        )

    def _within(self, group: int) -> tuple[int, ...]:
        """Possible values of `Shard.only` for a group."""
        return tuple(scope for scope in self._parts_of_work.get(group, ()) if scope != SUMMED)

    @cached_property
    def _parts_of_work(self) -> dict[int, list[int]]:
        """Group -> scopes that separate the working ops that have it: groups that only some of these ops have, and
        `SUMMED` if only some sum over the group. Of scopes that separate the ops alike, only the first is listed."""
        problem = self.problem
        products: dict[int, list[int]] = defaultdict(list)
        for number in problem.pattern_work:
            for group in set(problem.patterns[number].groups):
                products[group].append(number)
        scopes: dict[int, list[int]] = {}
        for group, numbers in products.items():
            left: dict[frozenset[int], int] = {}
            for other in sorted({g for n in numbers for g in problem.patterns[n].groups} - {group}):
                left.setdefault(frozenset(n for n in numbers if other in problem.patterns[n].groups), other)
            left.setdefault(frozenset(n for n in numbers if self._sums_over(n, group)), SUMMED)
            scopes[group] = [scope for without, scope in left.items() if 0 < len(without) < len(numbers)]
        return scopes

    def _sums_over(self, number: int, group: int) -> bool:
        pattern = self.problem.patterns[number]
        return any(
            other == group and kind is FactorKind.REDUCTION
            for other, kind in zip(pattern.groups, pattern.form.kinds, strict=True)
        )

    def left_to(self, decision: Decision, to: Decision) -> frozenset[int]:
        """Other groups of the look-ups and arithmetic ops that `decision` splits and `to`, about the same group, does
        not: candidates for the axis there."""
        problem = self.problem
        key = decision._replace(axis=0), to._replace(axis=0)
        if key not in self._left_to:
            self._left_to[key] = frozenset(
                group
                for number, pattern in enumerate(problem.patterns)
                if (number in problem.pattern_work or pattern.looked_up)
                and claim_of(pattern, decision, problem.resolution_place)
                and not claim_of(pattern, to, problem.resolution_place)
                for group in pattern.groups
                if group != decision[0]
            )
        return self._left_to[key]

    @cached_property
    def _left_to(self) -> dict[tuple[Decision, Decision], frozenset[int]]:
        return {}

    @cached_property
    def _taking_back(self) -> frozenset[Replicate]:
        """`Replicate` decisions that would undo a split of arguments by `fixed`."""
        problem = self.problem
        undoing: set[Replicate] = set()
        for argument in range(len(problem.program.arguments)) if problem.fixed else ():
            pattern = problem.op_pattern[argument]
            for role in {problem.argument_role[argument], problem.argument_kind[argument]}:
                for axis in range(len(problem.mesh.sizes)):
                    replicate = Replicate(role, axis)
                    if problem.choice(pattern, problem.fixed) != problem.choice(pattern, (*problem.fixed, replicate)):
                        undoing.add(replicate)
        return frozenset(undoing)
