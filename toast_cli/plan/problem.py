"""`Problem`: one program on one mesh, arranged so that a plan can be evaluated on patterns instead of on ops.

Ops that are split alike under every plan share one `OpPattern`; a Gemma-2B training step of 11k ops has a few hundred.
Enters: program, dimensions, mesh. Leaves: `Problem`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from toast_cli.dimensions.model import Dimensions, Form, SlotKind, Strand
from toast_cli.hardware.model import Mesh
from toast_cli.plan.axis_assignment import START, Spender, Spenders, bid_of, replicates_first, rules_of
from toast_cli.plan.decisions import ASIDE, NOWHERE, SUMMED, Decision, Plan, Replicate, Shard, canonical
from toast_cli.plan.goal import FASTEST, Goal
from toast_cli.plan.iteration import (
    NO_ROLE,
    Choice,
    Iteration,
    OpPattern,
    PinnedSharding,
    Space,
    decisive,
    lay_out,
)
from toast_cli.plan.partials import Sum, SumStep, adds_up, find_sums
from toast_cli.plan.pins import number_pins, unused_pins
from toast_cli.plan.workarounds import ALL, Workarounds
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ARGUMENT, CARRY, CONVOLUTION, DOT_GENERAL, RESULT
from toast_cli.program.pins import NO_PINS, Pins
from toast_cli.program.rematerialised import remade_values
from toast_cli.program.roles import INPUTS, WEIGHTS, argument_roles, carried_results, views

CANONICAL_KEPT = 50_000  # plans of which it is remembered what stands for them


@dataclass(frozen=True)
class Problem:
    """A program on a mesh.

    Attributes:
        patterns: the different ways ops can be split. op_pattern: [ops] number of each op's pattern.
        roles: names of the argument groups (`weights`, `state`, `inputs`), and behind them of kinds of arguments with
            the same dimensions. argument_role, argument_kind: [arguments] numbers in `roles`; where a role has one
            kind, both are the role's.
        free: [values] derived from constants alone, so made in any sharding without communication.
        resolution_place: resolution group -> its place in `Shard.sides` of its class group.
        fixed: decisions every plan starts with. notices: what the program stated that this mesh cannot hold.
        workarounds: what plans keep away from because the partitioner gets it wrong.
        goal: what the search is to minimise, within what bounds. closed: mesh axes it may not decide anything about.
        mirrored: the problem with every layer decided alike that this one was made from, if it was, and the groups that
            each of its groups has become (see `mirrors`).
        spending: what is known of how ops spend axes; problems made from this one know it too.
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
    spending: Spenders = field(default_factory=Spenders, repr=False, compare=False)

    def iterate(self, pattern: int, plan: Plan) -> Iteration:
        """What ops of one pattern compute on under `plan`."""
        return lay_out(self.patterns[pattern], self.choice(pattern, plan))

    def choice(self, pattern: int, plan: Plan) -> Choice:
        """Who gets which axis in ops of one pattern under `plan`."""
        groups = self.pattern_groups[pattern]
        key = pattern, tuple([d for d in plan if isinstance(d, Replicate) or d.group in groups])
        found = self._choices.get(key)
        if found is None:
            found = self._choices[key] = self._choose(*key)
        return found

    def _choose(self, pattern: int, plan: Plan) -> Choice:
        spender, state = self.spenders[pattern], START
        for decision in replicates_first(plan):
            bid = bid_of(self.patterns[pattern], decision, self.resolution_place)
            if bid is not None:
                state = spender.after(state, bid)
        return spender.choices[spender.choice(state)]

    @cached_property
    def _choices(self) -> dict[tuple[int, Plan], Choice]:
        return {}

    @cached_property
    def spenders(self) -> tuple[Spender, ...]:
        """[patterns] what says who gets which axis in their ops."""
        sizes = self.mesh.sizes
        known: dict[tuple[Form, Space | None], Spender] = {}
        for pattern in self.patterns:
            key = pattern.form, pattern.space
            if key not in known:
                known[key] = self.spending.of(rules_of(pattern.form, pattern.space, sizes), sizes)
        return tuple(known[pattern.form, pattern.space] for pattern in self.patterns)

    @cached_property
    def chosen_by(self) -> tuple[tuple[object, ...], ...]:
        """[patterns] what says how each chooses: equal ones choose alike under every plan."""
        return tuple(
            (p.groups, p.strands, p.role, p.kind, s.rules) for p, s in zip(self.patterns, self.spenders, strict=True)
        )

    @cached_property
    def unlike_patterns(self) -> dict[int, list[int]]:
        """Group -> patterns that have it, of those that make the same of every plan only one."""
        found: dict[int, dict[object, int]] = defaultdict(dict)
        for number, pattern in enumerate(self.patterns):
            for group in set(pattern.groups):
                found[group].setdefault(decisive(pattern), number)
        return defaultdict(list, {group: list(alike.values()) for group, alike in found.items()})

    @cached_property
    def reach(self) -> float:
        """Unlike patterns that a decision to split something matters to, on average."""
        reached = [len(self.unlike_patterns[d.group]) for d in self.choices if isinstance(d, Shard)]
        return sum(reached) / len(reached) if reached else 0.0

    @cached_property
    def pattern_groups(self) -> tuple[frozenset[int], ...]:
        """[patterns] class groups that matter to each."""
        return tuple(frozenset(p.groups) for p in self.patterns)

    def commute(self, a: Shard, b: Shard) -> bool:
        """Whether no op of this program can tell which of the two decisions came first."""
        pair = (a.group, b.group)
        return pair not in self._meeting or (a.axis != b.axis and a.group != b.group and pair not in self._nested)

    def canonical(self, plan: Plan) -> Plan:
        """The one order that stands for all that mean the same here; decisions every plan starts with stay in front."""
        return self._canonical(plan)

    @cached_property
    def _canonical(self) -> Callable[[Plan], Plan]:
        """Searches come back to the same plans, so that answers are remembered."""

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
        name may be split only once its majors are."""
        found: set[tuple[int, int]] = set()
        for pattern in self.patterns:
            for minor, majors in enumerate(pattern.form.majors):
                for major in majors:
                    found.add((pattern.groups[major], pattern.groups[minor]))
        return frozenset(found | {(b, a) for a, b in found})

    @cached_property
    def sums(self) -> tuple[Sum, ...]:
        """The program's sums of what may be partial, those of one term too: of every op that leaves one result, which
        no pin binds."""
        ops, partial = self.program.ops, [self._can_be_partial(number) for number in range(len(self.program.ops))]
        terms = [can and adds_up(op) for can, op in zip(partial, ops, strict=True)]
        others = (number for number, can in enumerate(partial) if can and not terms[number])
        alone = [Sum((SumStep("term", number),), ops[number].results[0]) for number in others]
        return (*find_sums(self.program, terms), *alone)

    @cached_property
    def terms(self) -> frozenset[int]:
        """Ops whose results are terms of `sums`."""
        return frozenset(number for found in self.sums for number in found.terms)

    def _can_be_partial(self, number: int) -> bool:
        pattern = self.patterns[self.op_pattern[number]]
        one_result = len(self.program.ops[number].results) == 1
        return one_result and SlotKind.REDUCTION in pattern.form.kinds and not pattern.result_pins

    def edge_trips(self, op: int, position: int) -> float:
        """How often operand `position` of an op is read in one run: a loop reads what it starts with once."""
        it = self.program.ops[op]
        return it.trips / max(1, self.program.loops[it.loop].trips) if it.name == CARRY and position == 0 else it.trips

    def edge_loop(self, op: int, position: int) -> int:
        """The loop in which operand `position` of an op is read, -1 outside loops."""
        it = self.program.ops[op]
        return self.program.loops[it.loop].parent if it.name == CARRY and position == 0 else it.loop

    @cached_property
    def choices(self) -> tuple[Decision, ...]:
        """What a plan may be extended by, in canonical order: every group over every axis that could do something
        there, each on few sides. `variants` lead to the rest of the space."""
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
        return tuple(found)

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
        """Group -> arithmetic of the ops that can be split along it `ways` ways."""
        work: dict[int, float] = defaultdict(float)
        for number, flops in self._pattern_work.items():
            groups, form = self.patterns[number].groups, self.patterns[number].form
            for group in {
                group
                for slot, group in enumerate(groups)
                if form.kinds[slot] != SlotKind.BLOCKED and form.sizes[slot] % ways == 0
            }:
                work[group] += flops
        return work

    @cached_property
    def _pattern_work(self) -> dict[int, float]:
        """Pattern -> arithmetic of its ops."""
        work: dict[int, float] = defaultdict(float)
        for op, number in zip(self.program.ops, self.op_pattern, strict=True):
            if op.flops:
                work[number] += op.flops * op.trips
        return work

    def _useful_groups(self) -> set[int]:
        """Groups that some op which does real work can be split along."""
        ops = zip(self.program.ops, self.op_pattern, strict=True)
        working = {pattern for op, pattern in ops if op.flops or op.name == ARGUMENT}
        return {
            group
            for pattern in (self.patterns[number] for number in working)
            for group, kind in zip(pattern.groups, pattern.form.kinds, strict=True)
            if kind is not SlotKind.BLOCKED
        }

    @cached_property
    def met_elsewhere(self) -> dict[int, list[int]]:
        """For groups that are a batch dimension of products with weights (experts): groups that other products have
        together with them, but none of those does."""
        origin = views(self.program)
        roles = {value for value, k in origin.items() if self.roles[self.argument_role[k]] == WEIGHTS}
        with_weights: dict[int, set[int]] = defaultdict(set)
        elsewhere: dict[int, set[int]] = defaultdict(set)
        for op, number in zip(self.program.ops, self.op_pattern, strict=True):
            if op.name != DOT_GENERAL:
                continue
            form, groups = self.patterns[number].form, self.patterns[number].groups
            left, right, out = ({s for slots in dims for s in slots} for dims in (*form.operands, form.results[0]))
            batching = {groups[s] for s in left & right & out}
            for group in {groups[s] for s in left | right}:
                if group in batching and any(v in roles for v in op.operands):
                    with_weights[group].update(groups)
                else:
                    elsewhere[group].update(groups)
        return {g: sorted(elsewhere[g] - met) for g, met in with_weights.items()}

    def _sides(self, group: int) -> list[tuple[int, ...]]:
        """Choices of sides to begin with: all resolution groups of the group on side k, or all left alone. `variants`
        are the others."""
        counts = self._side_counts(group)
        if not counts:
            return [()]
        found = [tuple(min(side, n - 1) for n in counts) for side in range(max(counts))]
        return list(dict.fromkeys([*found, (ASIDE,) * len(counts)]))

    def _side_counts(self, group: int) -> list[int]:
        """[resolution groups of the group] sides of each."""
        return [self.dimensions.resolutions[r].sides for r in self.dimensions.groups[group].resolutions]

    def variants(self, decision: Decision) -> list[Decision]:
        """Decisions that differ in one thing only: the side of one conflict, or where the decision holds."""
        if isinstance(decision, Replicate):
            return []
        found: list[Decision] = []
        for place, count in enumerate(self._side_counts(decision.group)):
            before, after = decision.sides[:place], decision.sides[place + 1 :]
            found += [decision._replace(sides=(*before, side, *after)) for side in range(ASIDE, count)]
        found += [decision._replace(unless=scope) for scope in self._scopes(decision.group)]
        return [d for d in found if d != decision]

    def offers(self, decision: Decision) -> bool:
        """Whether a search may decide so: `choices`, and all that a chain of `variants` leads to from them."""
        if isinstance(decision, Replicate):
            return decision in self._offered or decision in self.rests
        if decision in self._offered:
            return True
        counts = self._side_counts(decision.group)
        return (
            decision._replace(sides=(0,) * len(counts), unless=NOWHERE) in self._offered
            and len(decision.sides) == len(counts)
            and all(ASIDE <= side < count for side, count in zip(decision.sides, counts, strict=True))
            and decision.unless in self._scopes(decision.group)
        )

    @cached_property
    def rests(self) -> dict[Replicate, frozenset[int]]:
        """Decisions to keep one kind of arguments whole that are in no `choices` -> groups those have that could
        be split over the axis."""
        found: dict[Replicate, set[int]] = defaultdict(set)
        shards = {d[:2] for d in self.choices if isinstance(d, Shard)}
        for number, kind in enumerate(self.argument_kind):
            for group in self.patterns[self.op_pattern[number]].groups:
                for axis in range(len(self.mesh.sizes)):
                    if (group, axis) in shards and Replicate(kind, axis) not in self._offered:
                        found[Replicate(kind, axis)].add(group)
        return {decision: frozenset(groups) for decision, groups in sorted(found.items())}

    @cached_property
    def _offered(self) -> frozenset[Decision]:
        return frozenset(self.choices)

    def _scopes(self, group: int) -> tuple[int, ...]:
        """What `Shard.unless` can be for a group."""
        return (NOWHERE, *dict.fromkeys((*self.met_elsewhere.get(group, ()), *self._parts_of_work.get(group, ()))))

    @cached_property
    def _parts_of_work(self) -> dict[int, list[int]]:
        """Group -> what takes its products and convolutions apart: groups that some of them have and others do
        not, and `SUMMED` where some sum over it and others do not. Of those that leave the same ones the first
        stands for all."""
        products: dict[int, list[int]] = defaultdict(list)
        for number in sorted(self._pattern_work):
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
            other == group and kind is SlotKind.REDUCTION
            for other, kind in zip(pattern.groups, pattern.form.kinds, strict=True)
        )


def make_problem(
    program: Program,
    dimensions: Dimensions,
    mesh: Mesh,
    wishes: tuple[str, ...] = (),
    stated: Pins = NO_PINS,
    workarounds: Workarounds = ALL,
) -> Problem:
    """Gathers ops into patterns.

    Args:
        wishes: the user's `PATTERN=data,None` pins for arguments and results. stated: what the program itself insists
            on.
    """
    roles, argument_role = argument_roles(program)
    value_pins, use_pins = number_pins(program, mesh, wishes, stated)
    kinds, argument_kind = _kinds_of_arguments(program, dimensions, roles, argument_role, value_pins)
    argument_of_value = {
        value: k
        for value, k in views(program).items()
        if program.values[value].elements
        <= program.values[program.arguments[k].value].elements  # a bias spread over a batch is none
    }
    taken_over = {result: k for k, result in enumerate(carried_results(program)) if result >= 0}
    patterns: list[OpPattern] = []
    numbers: dict[tuple[object, ...], int] = {}
    op_pattern: list[int] = []
    class_group = dimensions.class_group
    groups_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    results_seen = 0
    for number, op in enumerate(program.ops):
        classes = dimensions.slot_classes[number]
        groups = groups_of.get(classes)
        if groups is None:
            groups = groups_of[classes] = tuple(class_group[c] for c in classes)
        argument = argument_of_value.get(op.results[0], NOWHERE) if op.results else NOWHERE
        if op.name == RESULT:
            argument = taken_over.get(results_seen, NOWHERE)
            results_seen += 1
        role, kind = (argument_role[argument], argument_kind[argument]) if argument != NOWHERE else (NO_ROLE, NO_ROLE)
        strands: tuple[Strand | None, ...] = dimensions.strands.get(number, ())
        result_pins = tuple(value_pins.get(v) for v in op.results) if any(v in value_pins for v in op.results) else ()
        operand_pins = _operand_pins(op, number, use_pins)
        form = dimensions.forms[number]
        space = _space(op, form) if workarounds.split_space else None
        key = (form, groups, strands, role, kind, operand_pins, result_pins, space)
        at = numbers.get(key)
        if at is None:
            at = numbers[key] = len(patterns)
            patterns.append(OpPattern(form, groups, strands, role, kind, operand_pins, result_pins, space))
        op_pattern.append(at)
    places = {r: k for group in dimensions.groups for k, r in enumerate(group.resolutions)}
    return Problem(
        program,
        dimensions,
        mesh,
        tuple(patterns),
        tuple(op_pattern),
        (*roles, *kinds),
        argument_role,
        tuple(remade_values(program)),
        places,
        notices=(*stated.notices, *unused_pins(program, wishes)),
        workarounds=workarounds,
        argument_kind=argument_kind,
    )


def _kinds_of_arguments(
    program: Program,
    dimensions: Dimensions,
    roles: tuple[str, ...],
    argument_role: tuple[int, ...],
    pins: Mapping[int, PinnedSharding],
) -> tuple[list[str], tuple[int, ...]]:
    """(names of the kinds of arguments that are not all of their role, [arguments] number of each one's kind,
    behind those of the roles). Arguments of one kind have the same dimensions: that weight of every layer."""
    members: dict[object, list[int]] = defaultdict(list)
    for number, argument in enumerate(program.arguments):
        groups = tuple(dimensions.class_group[c] for c in dimensions.slot_classes[number])
        form, strands = dimensions.forms[number], dimensions.strands.get(number, ())
        members[argument_role[number], form, groups, strands, pins.get(argument.value)].append(number)
    names: list[str] = []
    found = list(argument_role)
    for alike in members.values():
        if len(alike) == argument_role.count(argument_role[alike[0]]):
            continue
        for number in alike:
            found[number] = len(roles) + len(names)
        name = program.arguments[alike[0]].path or f"argument {alike[0]}"
        rest = f" and {len(alike) - 1} alike" if len(alike) > 1 else ""
        names.append(f"argument {name}{rest}" if name in roles else f"{name}{rest}")
    return names, tuple(found)


def _space(op: Op, form: Form) -> Space | None:
    """What a convolution's windows reach over; None for anything else."""
    if op.name != CONVOLUTION or not op.windows:
        return None
    image, kernel, result = ({s for slots in dims for s in slots} for dims in (*form.operands, form.results[0]))
    windowed = {slot for w in op.windows for slot in form.operands[0][w.operand_dim]}
    sets = (
        windowed & result - kernel,
        windowed & kernel,
        image & kernel - windowed,
        kernel - windowed,
    )
    return Space(*map(frozenset, sets))


def _operand_pins(
    op: Op, number: int, use_pins: dict[tuple[int, int], PinnedSharding]
) -> tuple[PinnedSharding | None, ...]:
    if not use_pins:
        return ()
    pins = tuple(use_pins.get((number, k)) for k in range(len(op.operands)))
    return pins if any(p is not None for p in pins) else ()
