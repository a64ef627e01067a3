"""`DecisionSpace`: the decisions a search may take for one program on one mesh.

It lists initial decisions (`choices`), those that differ from a given one in a single respect (`variants`), and
decisions to replicate one kind of arguments (`rests`). It does not interpret plans.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from toast_cli.dimensions.model import Dimensions, FactorKind
from toast_cli.hardware.model import Mesh
from toast_cli.plan.accumulation import ACCUMULATORS
from toast_cli.plan.axis_assignment import is_looked_up_by
from toast_cli.plan.decisions import ASIDE, LOOK_UPS, NONE, SUMMED, Decision, Replicate, Shard
from toast_cli.plan.loop_reads import LOOP_READS
from toast_cli.plan.op_sharding import OpPattern
from toast_cli.program.model import Program
from toast_cli.program.ops import ARGUMENT, DOT_GENERAL
from toast_cli.program.roles import INPUTS, WEIGHTS, views


@dataclass(frozen=True)
class DecisionSpace:
    """Decisions for a problem.

    Attributes:
        patterns: the different ways ops can be split. op_pattern: [ops] number of each op's pattern.
        roles: names of the argument groups and of kinds of arguments. argument_role, argument_kind: [arguments] numbers
            in `roles`.
        closed: mesh axes about which nothing may be decided.
        working: patterns whose ops do arithmetic, in ascending order.
        taking_back: decisions that would undo one of the problem's fixed decisions.
    """

    program: Program
    dimensions: Dimensions
    mesh: Mesh
    patterns: tuple[OpPattern, ...]
    op_pattern: tuple[int, ...]
    roles: tuple[str, ...]
    argument_role: tuple[int, ...]
    argument_kind: tuple[int, ...]
    closed: frozenset[int]
    working: tuple[int, ...]
    taking_back: frozenset[Replicate] = frozenset()

    @cached_property
    def choices(self) -> tuple[Decision, ...]:
        """Decisions by which a search may extend a plan, in canonical order: every group over every axis that can split
        it, with a few choices of sides. `variants` leads to the rest of the space."""
        found: list[Decision] = []
        useful, meets = self._useful_groups(), self.met_elsewhere
        for axis, size in enumerate(self.mesh.sizes):
            if size == 1 or axis in self.closed:
                continue
            for number, group in enumerate(self.dimensions.groups):
                if number in useful and any(self.dimensions.class_sizes[c] % size == 0 for c in group.classes):
                    found.extend(Shard(number, axis, sides) for sides in self._sides(number))
                    found.extend(
                        Shard(number, axis, (0,) * len(group.resolutions), other) for other in meets.get(number, ())
                    )
            found += [Replicate(r, axis) for r in sorted(set(self.argument_role)) if self.roles[r] != INPUTS]
            found += [Replicate(self.roles.index(r), axis) for r in (ACCUMULATORS, LOOP_READS) if r in self.roles]
        return tuple(decision for decision in found if decision not in self.taking_back)

    def _useful_groups(self) -> set[int]:
        """Groups that some op which does real work can be split along."""
        ops = zip(self.program.ops, self.op_pattern, strict=True)
        working = {pattern for op, pattern in ops if op.flops or op.name == ARGUMENT}
        return {
            group
            for pattern in (self.patterns[number] for number in working)
            for group, kind in zip(pattern.groups, pattern.form.kinds, strict=True)
            if kind is not FactorKind.BLOCKED
        }

    @cached_property
    def met_elsewhere(self) -> dict[int, list[int]]:
        """Group that is a batch dimension of contractions with weights (experts) -> groups that occur with it in other
        contractions, but in none of those."""
        origin = views(self.program)
        roles = {value for value, k in origin.items() if self.roles[self.argument_role[k]] == WEIGHTS}
        with_weights: dict[int, set[int]] = defaultdict(set)
        elsewhere: dict[int, set[int]] = defaultdict(set)
        for op, number in zip(self.program.ops, self.op_pattern, strict=True):
            if op.name != DOT_GENERAL:
                continue
            form, groups = self.patterns[number].form, self.patterns[number].groups
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
        found = [tuple(min(side, n - 1) for n in counts) for side in range(max(counts))]
        return list(dict.fromkeys([*found, (ASIDE,) * len(counts)]))

    def _side_counts(self, group: int) -> list[int]:
        """[resolution groups of the group] number of sides of each."""
        return [self.dimensions.resolutions[r].sides for r in self.dimensions.groups[group].resolutions]

    def variants(self, decision: Decision) -> list[Decision]:
        """Decisions that differ in the side of one conflict, or in `unless`. `parts` lists those with `only`."""
        if not isinstance(decision, Shard):
            return []
        found: list[Decision] = []
        for place, count in enumerate(self._side_counts(decision.group)):
            before, after = decision.sides[:place], decision.sides[place + 1 :]
            found += [decision._replace(sides=(*before, side, *after)) for side in range(ASIDE, count)]
        found += [decision._replace(unless=scope, only=NONE) for scope in self._scopes(decision.group)]
        return [d for d in found if d != decision]

    def parts(self, decision: Decision) -> list[Decision]:
        """The same decision restricted to a part of the program (`Shard.only`), once for each possible part."""
        if not isinstance(decision, Shard):
            return []
        found = [decision._replace(unless=NONE, only=scope) for scope in self._within(decision.group)]
        return [d for d in found if d != decision]

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
        found: dict[Replicate, set[int]] = defaultdict(set)
        shards = {d[:2] for d in self.choices if isinstance(d, Shard)}
        for number, kind in enumerate(self.argument_kind):
            for group in self.patterns[self.op_pattern[number]].groups:
                for axis in range(len(self.mesh.sizes)):
                    if (group, axis) in shards and Replicate(kind, axis) not in self._offered:
                        found[Replicate(kind, axis)].add(group)
        return {
            decision: frozenset(groups)
            for decision, groups in sorted(found.items())
            if decision not in self.taking_back
        }

    @cached_property
    def _offered(self) -> frozenset[Decision]:
        return frozenset(self.choices)

    def _scopes(self, group: int) -> tuple[int, ...]:
        """Possible values of `Shard.unless` for a group."""
        found = (*self.met_elsewhere.get(group, ()), *self._parts_of_work.get(group, ()))
        return (NONE, *dict.fromkeys(found), *((LOOK_UPS,) if group in self._looked_up else ()))

    @cached_property
    def _looked_up(self) -> frozenset[int]:
        """Groups that the indices of some look-up have and its table does not."""
        return frozenset(
            group for pattern in self.patterns for group in set(pattern.groups) if is_looked_up_by(pattern, group)
        )

    def _within(self, group: int) -> tuple[int, ...]:
        """Possible values of `Shard.only` for a group."""
        return tuple(scope for scope in self._parts_of_work.get(group, ()) if scope != SUMMED)

    @cached_property
    def _parts_of_work(self) -> dict[int, list[int]]:
        """Group -> scopes that separate the working ops that have it: groups that only some of these ops have, and
        `SUMMED` if only some sum over the group. Of scopes that separate the ops alike, only the first is listed."""
        products: dict[int, list[int]] = defaultdict(list)
        for number in self.working:
            for group in set(self.patterns[number].groups):
                products[group].append(number)
        found: dict[int, list[int]] = {}
        for group, numbers in products.items():
            left: dict[frozenset[int], int] = {}
            for other in sorted({g for n in numbers for g in self.patterns[n].groups} - {group}):
                left.setdefault(frozenset(n for n in numbers if other in self.patterns[n].groups), other)
            left.setdefault(frozenset(n for n in numbers if self._sums_over(n, group)), SUMMED)
            found[group] = [scope for without, scope in left.items() if 0 < len(without) < len(numbers)]
        return found

    def _sums_over(self, number: int, group: int) -> bool:
        pattern = self.patterns[number]
        return any(
            other == group and kind is FactorKind.REDUCTION
            for other, kind in zip(pattern.groups, pattern.form.kinds, strict=True)
        )
