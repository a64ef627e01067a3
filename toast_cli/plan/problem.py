"""`Problem`: one program on one mesh, arranged so that a plan can be evaluated on patterns instead of on ops.

Ops that are split alike under every plan share one `OpPattern`; a Gemma-2B training step of 11k ops has a few hundred.
A worked example: the docstring of `toast_cli.plan`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from toast_cli.dimensions.model import Dimensions, FactorKind, Form, Strand
from toast_cli.hardware.model import Mesh
from toast_cli.plan.axis_assignment import (
    START,
    SUMS,
    AxisAssigner,
    AxisAssigners,
    assigned_order,
    claim_of,
    rules_of,
)
from toast_cli.plan.decisions import FASTEST, NONE, Goal, Plan, Shard, canonical
from toast_cli.plan.loops import (
    ACCUMULATORS,
    LOOP_READS,
    Accumulation,
    find_accumulations,
    ops_of,
    read_in_trips,
    weight_views,
)
from toast_cli.plan.reshard import not_reduced
from toast_cli.plan.sharding import (
    NO_ROLE,
    Choice,
    OpPattern,
    OpSharding,
    PinnedSharding,
    Space,
    lay_out,
    number_pins,
    unused_pins,
)
from toast_cli.program.model import Op, Program
from toast_cli.program.names import NO_PINS, Pins
from toast_cli.program.ops import CONVOLUTION, GATHER, RESULT, SCATTER
from toast_cli.program.roles import INPUTS, WEIGHTS, argument_roles, carried_results, views
from toast_cli.program.values import Sum, SumStep, adds_up, find_sums, remade_values

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
        goal: what the search minimises, and its bounds. closed: mesh axes it may not decide about. mirrored: the
        problem this one was derived from, if any, which decides all layers alike, and the groups split off each of its
        groups (see `saved`).
        accumulations: the loop-carried sums, see `plan.loops`.
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
        if key not in self._choices:
            self._choices[key] = self._choose(*key)
        return self._choices[key]

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
        return tuple(self.axis_assigners.of(rules_of(p.form, p.space, sizes, p.closed), sizes) for p in self.patterns)

    @cached_property
    def not_reduced(self) -> frozenset[int]:
        """See `reshard.not_reduced`."""
        return not_reduced(self.program)

    @cached_property
    def chosen_by(self) -> tuple[tuple[object, ...], ...]:
        """[patterns] key of each pattern's choices: patterns with equal keys choose alike under every plan."""
        keys = []
        for pattern, assigner in zip(self.patterns, self.assigners, strict=True):
            roles, sums = (
                (pattern.role, pattern.kind, pattern.loop_role),
                tuple([k in SUMS for k in pattern.form.kinds]),
            )
            keys.append((pattern.groups, pattern.strands, roles, pattern.looked_up, sums, assigner.rules))
        return tuple(keys)

    @cached_property
    def unlike_patterns(self) -> dict[int, list[int]]:
        """Group -> patterns that have it, one of each set that chooses alike under every plan."""
        unlike: dict[int, dict[object, int]] = defaultdict(dict)
        for number, pattern in enumerate(self.patterns):
            for group in set(pattern.groups):
                unlike[group].setdefault(self.chosen_by[number], number)
        return defaultdict(list, {group: list(alike.values()) for group, alike in unlike.items()})

    @cached_property
    def pattern_groups(self) -> tuple[frozenset[int], ...]:
        """[patterns] class groups of each."""
        return tuple(frozenset(p.groups) for p in self.patterns)

    def commute(self, a: Shard, b: Shard) -> bool:
        """Whether the order of the two decisions makes no difference to any op of this program."""
        pair = (a.group, b.group)
        return pair not in self._meeting or (a.axis != b.axis and a.group != b.group and pair not in self._nested)

    @cached_property
    def canonical(self) -> Callable[[Plan], Plan]:
        """Puts a plan in the canonical order among the equivalent ones; fixed decisions stay in front. Memoised, since
        searches come back to the same plans."""

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
        nested: set[tuple[int, int]] = set()
        for pattern in self.patterns:
            for minor, majors in enumerate(pattern.form.majors):
                for major in majors:
                    nested.add((pattern.groups[major], pattern.groups[minor]))
        return frozenset(nested | {(b, a) for a, b in nested})

    @cached_property
    def sums(self) -> tuple[Sum, ...]:
        """The program's sums of values that may be partial, including single terms: every unpinned result of an op with
        a reduction and one result."""
        ops, patterns = self.program.ops, [self.patterns[pattern] for pattern in self.op_pattern]
        partial = [
            len(op.results) == 1 and FactorKind.REDUCTION in pattern.form.kinds and not pattern.result_pins
            for op, pattern in zip(ops, patterns, strict=True)
        ]
        terms = [can and adds_up(op) for can, op in zip(partial, ops, strict=True)]
        others = [number for number, can in enumerate(partial) if can and not terms[number]]
        for accumulation in self.accumulations:
            terms[accumulation.carry] = True
        alone = [Sum((SumStep("term", number),), ops[number].results[0]) for number in others]
        return (*find_sums(self.program, terms), *alone)

    @cached_property
    def terms(self) -> frozenset[int]:
        """Ops whose results are terms of `sums`."""
        return frozenset(number for each in self.sums for number in each.terms)

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


# ---------------------------------------------------------------- patterns
Dims = tuple[tuple[int, ...], ...]  # [dimensions] factors, major to minor


def make_problem(
    program: Program,
    dimensions: Dimensions,
    mesh: Mesh,
    user_pins: tuple[str, ...] = (),
    program_pins: Pins = NO_PINS,
) -> Problem:
    """The problem of partitioning `program` over `mesh`.

    Args:
        user_pins: the user's `PATTERN=data,None` pins for arguments and results. program_pins: shardings that the
            program itself states.
    """
    free = remade_values(program)
    dimensions = split_as_read(program, dimensions, free)
    roles, argument_role = argument_roles(program)
    value_pins, use_pins = number_pins(program, mesh, user_pins, program_pins)
    kinds, argument_kind = _kinds_of_arguments(program, dimensions, roles, argument_role, value_pins)
    argument_of_value = {
        value: k for value, k in views(program).items() if _lies_as(program, value, k, roles[argument_role[k]])
    }
    taken_over = {result: k for k, result in enumerate(carried_results(program)) if result >= 0}
    accumulations = _accumulations(program, dimensions, value_pins)
    accumulators, accumulating = len(roles) + len(kinds), ops_of(accumulations)
    weight_role = roles.index(WEIGHTS)
    weights = [argument.value for k, argument in enumerate(program.arguments) if argument_role[k] == weight_role]
    seen_in_loops = weight_views(program, weights)
    reads = bool(seen_in_loops) or any(True for _ in read_in_trips(program, free))
    loop_reads = accumulators + bool(accumulations)
    patterns: list[OpPattern] = []
    numbers: dict[tuple[object, ...], int] = {}
    op_pattern: list[int] = []
    class_group = dimensions.class_group
    groups_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    results_seen = 0
    for number, op in enumerate(program.ops):
        classes = dimensions.factor_classes[number]
        groups = groups_of.get(classes)
        if groups is None:
            groups = groups_of[classes] = tuple(class_group[c] for c in classes)
        argument = argument_of_value.get(op.results[0], NONE) if op.results else NONE
        if op.name == RESULT:
            argument = taken_over.get(results_seen, NONE)
            results_seen += 1
        role, kind = (argument_role[argument], argument_kind[argument]) if argument != NONE else (NO_ROLE, NO_ROLE)
        if number in accumulating:
            role = kind = accumulators
        loop_role = loop_reads if number in seen_in_loops else NO_ROLE
        strands: tuple[Strand | None, ...] = dimensions.strands.get(number, ())
        result_pins = tuple(value_pins.get(v) for v in op.results) if any(v in value_pins for v in op.results) else ()
        operand_pins = _operand_pins(op, number, use_pins)
        form = dimensions.forms[number]
        space = _space(op, form)
        closed = _closed_axes(op, mesh, operand_pins + result_pins)
        looked_up = _looked_up(op, form)
        key = (form, groups, strands, role, kind, operand_pins, result_pins, space, closed, loop_role, looked_up)
        pattern = numbers.get(key)
        if pattern is None:
            pattern = numbers[key] = len(patterns)
            patterns.append(OpPattern(*key))
        op_pattern.append(pattern)
    places = {r: k for group in dimensions.groups for k, r in enumerate(group.resolutions)}
    return Problem(
        program,
        dimensions,
        mesh,
        tuple(patterns),
        tuple(op_pattern),
        (*roles, *kinds, *((ACCUMULATORS,) if accumulations else ()), *((LOOP_READS,) if reads else ())),
        argument_role,
        free,
        places,
        notices=(*program_pins.notices, *unused_pins(program, user_pins)),
        argument_kind=argument_kind,
        accumulations=accumulations,
    )


def on_mesh(problem: Problem, mesh: Mesh) -> Problem | None:
    """The problem on another mesh of as many devices, with the same patterns; None if some name mesh axes."""
    named = any(p.operand_pins or p.result_pins or p.closed for p in problem.patterns) or problem.notices
    return None if named or mesh.devices != problem.mesh.devices else replace(problem, mesh=mesh)


def _looked_up(op: Op, form: Form) -> frozenset[int]:
    """Factors of a look-up in a table, or of a scatter into one, that are no dimensions of the table."""
    if op.name not in (GATHER, SCATTER):
        return frozenset()
    return frozenset(range(len(form.sizes))).difference(*form.operands[0])


def _closed_axes(op: Op, mesh: Mesh, pins: tuple[PinnedSharding | None, ...]) -> frozenset[int]:
    """Mesh axes of an op's manual region and those its boundary names. The mesh may lack axes of size 1."""
    if op.region is None:
        return frozenset()
    pinned = {axis for pin in pins for axes in pin or () for axis in axes or ()}
    return frozenset(mesh.names.index(name) for name in op.region.axes if name in mesh.names) | pinned


def _lies_as(program: Program, value: int, argument: int, role: str) -> bool:
    """Whether a view of an argument has the sharding in which the argument is stored.

    A view of a weight has it, unless it is larger (a bias that is broadcast over a batch). A view of an input with
    another shape or type does not, so that a replicated input is sliced first: XLA lays out and converts all of it
    before it takes a slice.
    """
    view, stored = program.values[value], program.values[program.arguments[argument].value]
    return view == stored if role == INPUTS else view.elements <= stored.elements


def _accumulations(
    program: Program, dimensions: Dimensions, pins: Mapping[int, PinnedSharding]
) -> tuple[Accumulation, ...]:
    """The loop-carried sums that no pin binds."""
    if not program.loops:
        return ()
    accumulations = find_accumulations(
        program,
        [
            FactorKind.REDUCTION in form.kinds and len(op.results) == 1 and adds_up(op) and op.results[0] not in pins
            for op, form in zip(program.ops, dimensions.forms, strict=True)
        ],
    )
    return tuple(each for each in accumulations if program.ops[each.carry].results[0] not in pins)


def _kinds_of_arguments(
    program: Program,
    dimensions: Dimensions,
    roles: tuple[str, ...],
    argument_role: tuple[int, ...],
    pins: Mapping[int, PinnedSharding],
) -> tuple[list[str], tuple[int, ...]]:
    """(names of the kinds of arguments that are not all of their role, [arguments] number of each one's kind, after
    those of the roles). Arguments of one kind have the same dimensions, such as one weight in every layer."""
    members: dict[object, list[int]] = defaultdict(list)
    for number, argument in enumerate(program.arguments):
        groups = tuple(dimensions.class_group[c] for c in dimensions.factor_classes[number])
        form, strands = dimensions.forms[number], dimensions.strands.get(number, ())
        members[argument_role[number], form, groups, strands, pins.get(argument.value)].append(number)
    names: list[str] = []
    argument_kind = list(argument_role)
    for alike in members.values():
        if len(alike) == argument_role.count(argument_role[alike[0]]):
            continue
        for number in alike:
            argument_kind[number] = len(roles) + len(names)
        name = program.arguments[alike[0]].label or f"argument {alike[0]}"
        rest = f" and {len(alike) - 1} alike" if len(alike) > 1 else ""
        names.append(f"argument {name}{rest}" if name in roles else f"{name}{rest}")
    return names, tuple(argument_kind)


def _space(op: Op, form: Form) -> Space | None:
    """The factors of a windowed convolution; None for other ops."""
    if op.name != CONVOLUTION or not op.windows:
        return None
    image, kernel, result = ({s for factors in dims for s in factors} for dims in (*form.operands, form.results[0]))
    windowed = {factor for w in op.windows for factor in form.operands[0][w.operand_dim]}
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


def split_as_read(program: Program, dimensions: Dimensions, free: Sequence[bool]) -> Dimensions:
    """Dimensions in which ops that only enlarge an array (repeat it, or convert it to a wider type) are split as the
    first product that reads it, so that the small array is resharded. free: [values] made from constants alone."""
    forms, factor_classes, strands = list(dimensions.forms), list(dimensions.factor_classes), dict(dimensions.strands)
    for number, op in enumerate(program.ops):
        if not op.kind.view_or_convert or free[op.results[0]]:
            continue
        operand, result = program.values[op.operands[0]], program.values[op.results[0]]
        if operand.elements <= 1 or result.bytes <= operand.bytes:
            continue
        way, product, position = _way_to_product(program, number)
        if product is None:
            continue
        for step, form in _along(way, dimensions.forms, dimensions.forms[product], position):
            forms[step], factor_classes[step] = form, dimensions.factor_classes[product]
            strands.pop(step, None)
            if product in dimensions.strands:
                strands[step] = dimensions.strands[product]
    return replace(dimensions, forms=tuple(forms), factor_classes=tuple(factor_classes), strands=strands)


def _way_to_product(program: Program, number: int) -> tuple[list[int], int | None, int]:
    """(ops from this one on that only change an array's shape or type, first contraction that reads their result,
    operand position)."""
    way = [number]
    while uses := program.users[program.ops[way[-1]].results[0]]:
        reader, position = min(uses)
        if program.ops[reader].kind.contraction:
            return way, reader, position
        if len(uses) > 1 or not program.ops[reader].kind.view_or_convert:
            break
        way.append(reader)
    return way, None, 0


def _along(way: list[int], forms: Sequence[Form], product: Form, position: int) -> list[tuple[int, Form]]:
    """(op, its form in the factors of the contraction) for each op of a path; empty where dimensions do not line up."""
    path_forms: list[tuple[int, Form]] = []
    kinds = tuple([FactorKind.SUMMED_LATER if kind is FactorKind.REDUCTION else kind for kind in product.kinds])
    read: Dims = product.operands[position]
    for step in reversed(way):
        form = forms[step]
        factors = _same_factors(form, form.results[0], product, read)
        if factors is None or any(factor not in factors for dim in form.operands[0] for factor in dim):
            return []
        result, read = read, tuple([tuple([factors[factor] for factor in dim]) for dim in form.operands[0]])
        path_forms.append((step, replace(product, kinds=kinds, operands=(read,), results=(result,))))
    return path_forms


def _same_factors(form: Form, dims: Dims, product: Form, read: Dims) -> dict[int, int] | None:
    """Factor of an op's result -> factor of the product that is the same dimension."""
    same: dict[int, int] = {}
    for own, other in zip(dims, read, strict=True):
        if [form.sizes[factor] for factor in own] != [product.sizes[factor] for factor in other]:
            return None
        same.update(zip(own, other, strict=True))
    return same


def samples_of(problem: Problem) -> int:
    """Elements along the batch, the largest of the inputs' dimensions of that role; 0 if there is none."""
    groups = problem.dimensions.groups
    inputs = [n for n in range(len(problem.program.arguments)) if problem.roles[problem.argument_role[n]] == INPUTS]
    named = {group for n in inputs for group in problem.patterns[problem.op_pattern[n]].groups}
    return max((groups[group].size for group in named if groups[group].role == "batch"), default=0)
