"""`Problem`: one program on one mesh, arranged so that a plan can be evaluated on patterns instead of on ops.

Ops that are split alike under every plan share one `OpPattern`; a Gemma-2B training step of 11k ops has a few hundred.
In: program, dimensions, mesh. Out: `Problem`.

A worked example: the docstring of `toast_cli.plan`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from toast_cli.dimensions.model import Dimensions, FactorKind, Form
from toast_cli.hardware.model import Mesh
from toast_cli.plan.accumulation import Accumulation
from toast_cli.plan.axis_assignment import (
    ALL,
    START,
    AxisAssigner,
    AxisAssigners,
    Workarounds,
    assigned_order,
    claim_of,
    rules_of,
)
from toast_cli.plan.decision_space import DecisionSpace
from toast_cli.plan.decisions import Decision, Plan, Replicate, Shard, canonical
from toast_cli.plan.goal import FASTEST, Goal
from toast_cli.plan.one_device import not_reduced
from toast_cli.plan.op_sharding import (
    Choice,
    OpPattern,
    OpSharding,
    Space,
    decisive,
    lay_out,
)
from toast_cli.program.model import Program
from toast_cli.program.roles import WEIGHTS
from toast_cli.program.sums import Sum, SumStep, adds_up, find_sums

CANONICAL_KEPT = 50_000  # plans whose canonical order is memoised


@dataclass(frozen=True)
class Problem:
    """A program on a mesh.

    Attributes:
        patterns: the different ways ops can be split. op_pattern: [ops] number of each op's pattern.
        roles: names of the argument groups (`weights`, `state`, `inputs`), then of kinds of arguments with the same
            dimensions, and last `ACCUMULATORS` if there are loop-carried sums and `LOOP_READS` if loops read
            loop-invariant arrays in each trip. argument_role, argument_kind: [arguments] numbers in `roles`; where a
            role has one kind, both are the role's.
        free: [values] derived from constants alone, so made in any sharding without communication.
        resolution_place: resolution group -> its place in `Shard.sides` of its class group.
        fixed: decisions every plan starts with. notices: messages about stated shardings that this mesh cannot hold.
        workarounds: partitioner bugs that plans avoid.
        goal: what the search minimises, and its bounds. closed: mesh axes it may not decide about. mirrored: the
        problem this one was derived from, if any, which decides all layers alike, and the groups split off each of its
        groups (see `mirrors`).
        accumulations: the loop-carried sums, see `plan.accumulation`.
        axis_assigners: memo of axis assignments, shared with problems derived from this one.
    """

    program: Program
    dimensions: Dimensions
    mesh: Mesh
    patterns: tuple[OpPattern, ...]
    op_pattern: tuple[int, ...]
    roles: tuple[str, ...]
    argument_role: tuple[int, ...]
    free: tuple[bool, ...]
    resolution_place: dict[int, int]
    fixed: Plan = ()
    notices: tuple[str, ...] = ()
    goal: Goal = FASTEST
    workarounds: Workarounds = ALL
    closed: frozenset[int] = frozenset()
    mirrored: tuple[Problem, dict[int, tuple[int, ...]]] | None = None
    argument_kind: tuple[int, ...] = ()
    accumulations: tuple[Accumulation, ...] = ()
    axis_assigners: AxisAssigners = field(default_factory=AxisAssigners, repr=False, compare=False)

    def op_sharding(self, pattern: int, plan: Plan) -> OpSharding:
        """The shardings of ops of one pattern under `plan`."""
        return lay_out(self.patterns[pattern], self.choice(pattern, plan))

    def choice(self, pattern: int, plan: Plan) -> Choice:
        """The axis assignment of ops of one pattern under `plan`."""
        groups = self.pattern_groups[pattern]
        key = pattern, tuple([d for d in plan if not isinstance(d, Shard) or d.group in groups])
        found = self._choices.get(key)
        if found is None:
            found = self._choices[key] = self._choose(*key)
        return found

    def _choose(self, pattern: int, plan: Plan) -> Choice:
        assigner, state = self.assigners[pattern], START
        for decision in assigned_order(plan):
            claim = claim_of(self.patterns[pattern], decision, self.resolution_place)
            if claim is not None:
                state = assigner.after(state, claim)
        return assigner.choices[assigner.choice(state)]

    @cached_property
    def _choices(self) -> dict[tuple[int, Plan], Choice]:
        return {}

    @cached_property
    def assigners(self) -> tuple[AxisAssigner, ...]:
        """[patterns] axis assigner of each."""
        sizes = self.mesh.sizes
        known: dict[tuple[Form, Space | None, frozenset[int]], AxisAssigner] = {}
        for pattern in self.patterns:
            key = pattern.form, pattern.space, pattern.closed
            if key not in known:
                known[key] = self.axis_assigners.of(rules_of(pattern.form, pattern.space, sizes, pattern.closed), sizes)
        return tuple(known[pattern.form, pattern.space, pattern.closed] for pattern in self.patterns)

    def left_to(self, decision: Decision, to: Decision) -> frozenset[int]:
        """Other groups of the look-ups and arithmetic ops that `decision` splits and `to`, about the same group, does
        not: candidates for the axis there."""
        key = decision._replace(axis=0), to._replace(axis=0)
        if key not in self._left_to:
            self._left_to[key] = frozenset(
                group
                for number in (*self.decisions.working, *self._look_ups)
                if claim_of(self.patterns[number], decision, self.resolution_place)
                and not claim_of(self.patterns[number], to, self.resolution_place)
                for group in self.patterns[number].groups
                if group != decision[0]
            )
        return self._left_to[key]

    @cached_property
    def not_reduced(self) -> frozenset[int]:
        """See `one_device.not_reduced`."""
        return not_reduced(self.program)

    @cached_property
    def _look_ups(self) -> tuple[int, ...]:
        """Patterns of look-ups in tables and their gradients."""
        return tuple(number for number, pattern in enumerate(self.patterns) if pattern.looked_up)

    @cached_property
    def _left_to(self) -> dict[tuple[Decision, Decision], frozenset[int]]:
        return {}

    @cached_property
    def chosen_by(self) -> tuple[tuple[object, ...], ...]:
        """[patterns] key of each pattern's choices: patterns with equal keys choose alike under every plan."""
        return tuple(
            (p.groups, p.strands, p.role, p.kind, p.loop_role, p.looked_up, s.rules)
            for p, s in zip(self.patterns, self.assigners, strict=True)
        )

    @cached_property
    def unlike_patterns(self) -> dict[int, list[int]]:
        """Group -> patterns that have it, one of each set that chooses alike under every plan."""
        found: dict[int, dict[object, int]] = defaultdict(dict)
        for number, pattern in enumerate(self.patterns):
            for group in set(pattern.groups):
                found[group].setdefault(decisive(pattern), number)
        return defaultdict(list, {group: list(alike.values()) for group, alike in found.items()})

    @cached_property
    def reach(self) -> float:
        """Average number of unlike patterns that a `Shard` affects."""
        reached = [len(self.unlike_patterns[d.group]) for d in self.decisions.choices if isinstance(d, Shard)]
        return sum(reached) / len(reached) if reached else 0.0

    @cached_property
    def pattern_groups(self) -> tuple[frozenset[int], ...]:
        """[patterns] class groups of each."""
        return tuple(frozenset(p.groups) for p in self.patterns)

    def commute(self, a: Shard, b: Shard) -> bool:
        """Whether the order of the two decisions makes no difference to any op of this program."""
        pair = (a.group, b.group)
        return pair not in self._meeting or (a.axis != b.axis and a.group != b.group and pair not in self._nested)

    def canonical(self, plan: Plan) -> Plan:
        """The canonical order among the equivalent ones of a plan; fixed decisions stay in front."""
        return self._canonical(plan)

    @cached_property
    def _canonical(self) -> Callable[[Plan], Plan]:
        """Memoised `canonical`: searches come back to the same plans."""

        @lru_cache(maxsize=CANONICAL_KEPT)
        def ordered(plan: Plan) -> Plan:
            start = len(self.fixed) if plan[: len(self.fixed)] == self.fixed else 0
            return (*plan[:start], *canonical(plan[start:], self.commute))

        return ordered

    @cached_property
    def _meeting(self) -> frozenset[tuple[int, int]]:
        """Pairs of groups, in both orders, that some op has both of; each group with itself."""
        together = {frozenset(p.groups) for p in self.patterns}
        return frozenset((a, b) for groups in together for a in groups for b in groups)

    @cached_property
    def _nested(self) -> frozenset[tuple[int, int]]:
        """Pairs of groups, in both orders, one of which is major to the other in some dimension of some op: a minor
        factor may be split only once its majors are."""
        found: set[tuple[int, int]] = set()
        for pattern in self.patterns:
            for minor, majors in enumerate(pattern.form.majors):
                for major in majors:
                    found.add((pattern.groups[major], pattern.groups[minor]))
        return frozenset(found | {(b, a) for a, b in found})

    @cached_property
    def sums(self) -> tuple[Sum, ...]:
        """The program's sums of values that may be partial, including single terms: every unpinned result of an op with
        a reduction and one result."""
        ops, partial = self.program.ops, [self._can_be_partial(number) for number in range(len(self.program.ops))]
        terms = [can and adds_up(op) for can, op in zip(partial, ops, strict=True)]
        others = [number for number, can in enumerate(partial) if can and not terms[number]]
        for one in self.accumulations:
            terms[one.carry] = True
        alone = [Sum((SumStep("term", number),), ops[number].results[0]) for number in others]
        return (*find_sums(self.program, terms), *alone)

    @cached_property
    def terms(self) -> frozenset[int]:
        """Ops whose results are terms of `sums`."""
        return frozenset(number for found in self.sums for number in found.terms)

    def _can_be_partial(self, number: int) -> bool:
        pattern = self.patterns[self.op_pattern[number]]
        one_result = len(self.program.ops[number].results) == 1
        return one_result and FactorKind.REDUCTION in pattern.form.kinds and not pattern.result_pins

    @cached_property
    def weight_bytes(self) -> dict[int, int]:
        """Group -> bytes of the weights that have it."""
        covered: dict[int, int] = defaultdict(int)
        for number, argument in enumerate(self.program.arguments):
            if self.roles[self.argument_role[number]] == WEIGHTS:
                for group in set(self.patterns[self.op_pattern[number]].groups):
                    covered[group] += self.program.values[argument.value].bytes
        return covered

    def work_along(self, ways: int) -> dict[int, float]:
        """Group -> flops of the ops that can be split along it into `ways` shards."""
        work: dict[int, float] = defaultdict(float)
        for number, flops in self.pattern_work.items():
            groups, form = self.patterns[number].groups, self.patterns[number].form
            for group in {
                group
                for factor, group in enumerate(groups)
                if form.kinds[factor] != FactorKind.BLOCKED and form.sizes[factor] % ways == 0
            }:
                work[group] += flops
        return work

    @cached_property
    def pattern_work(self) -> dict[int, float]:
        """Pattern -> flops of its ops in one run."""
        work: dict[int, float] = defaultdict(float)
        for op, number in zip(self.program.ops, self.op_pattern, strict=True):
            if op.flops:
                work[number] += op.flops * op.trips
        return work

    @cached_property
    def names_axes(self) -> bool:
        """Whether the program or the user refers to single mesh axes: pins, goals, fixed decisions, manual regions.
        Equal axes are not interchangeable then."""
        restricted = self.fixed or self.closed or self.goal.axes
        return bool(restricted) or any(p.closed or any(p.result_pins) or any(p.operand_pins) for p in self.patterns)

    @cached_property
    def decisions(self) -> DecisionSpace:
        """The decisions a search may take."""
        return DecisionSpace(
            self.program,
            self.dimensions,
            self.mesh,
            self.patterns,
            self.op_pattern,
            self.roles,
            self.argument_role,
            self.argument_kind,
            self.closed,
            tuple(sorted(self.pattern_work)),
            self._taking_back(),
        )

    def _taking_back(self) -> frozenset[Replicate]:
        """`Replicate` decisions that would undo a split of arguments by `fixed`."""
        found: set[Replicate] = set()
        for argument in range(len(self.program.arguments)) if self.fixed else ():
            pattern = self.op_pattern[argument]
            for role in {self.argument_role[argument], self.argument_kind[argument]}:
                for axis in range(len(self.mesh.sizes)):
                    whole = Replicate(role, axis)
                    if self.choice(pattern, self.fixed) != self.choice(pattern, (*self.fixed, whole)):
                        found.add(whole)
        return frozenset(found)
