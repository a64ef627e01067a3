"""Assigns mesh axes to the factors of one op, decision by decision, and decides where its partial results are
scattered.

For every op and every mesh axis, the first decision whose group has an eligible factor in that op wins the axis there.
Eligible: the shards divide every extent, the op does not need the factor whole, and every factor that is major to it
in some dimension is already fully split. Where a conflict gives the group several factors, those on the preferred side
are tried first. If an axis splits a reduced factor, the op's results are partial over it; they are reduce-scattered
where a decision wants that axis on one of their own dimensions, and all-reduced otherwise.

`Replicate` closes an axis to the ops it names, so it is applied before all `Shard`s. An assignment is then never
undone, and the state of an op after the first decisions of a plan is all that later ones depend on. There are few
states, however many plans there are: most decisions find their axis taken, and equivalent orders lead to the same
state. Ops whose factors can be split alike share states, whatever the names and sizes of their arrays, so each state
is computed once.
"""

from __future__ import annotations

from math import gcd, prod
from typing import NamedTuple

from toast_cli.dimensions.model import FactorKind, Form
from toast_cli.plan.decisions import ASIDE, LOOK_UPS, NONE, SUMMED, Decision, Plan, Replicate, Shard
from toast_cli.plan.sharding import Choice, FactorAxes, OpPattern, Space

SUMS = (FactorKind.REDUCTION, FactorKind.SUMMED_LATER)
START = 0  # the state in which nothing is decided


def without_split_space(space: Space, factor_axes: FactorAxes, sizes: tuple[int, ...]) -> FactorAxes:
    """The axes of a convolution's factors without those that split space where XLA's partitioner computes a wrong
    result.

    Where image and kernel are both split, and space is, it splits the kernel in space as well and sums over all
    devices. Devices that hold the same pieces, because an axis does not split the summed dimensions, then count several
    times: a gradient comes out doubled (jaxlib 0.10.1 and 0.10.2, by tests/test_halo.py and benchmarks.fidelity).
    """

    def spent(factors: frozenset[int]) -> set[int]:
        return {axis for factor in factors for axis in factor_axes[factor]}

    away: frozenset[int] = frozenset()
    if spent(space.tiled) and (spent(space.kernel) or spent(space.summed)):
        away = space.tiled
    if spent(space.summed):
        added_up = spent(space.summed | space.contracted)
        if away or any(size > 1 and axis not in added_up for axis, size in enumerate(sizes)):
            away |= space.summed
    return tuple([() if factor in away else axes for factor, axes in enumerate(factor_axes)])


class AxisClaim(NamedTuple):
    """The effect of a decision on one op. factors: those that the axis may split, in order of preference; empty if no
    decision may use the axis."""

    axis: int
    factors: tuple[int, ...]


class SplitRules(NamedTuple):
    """The properties of an op that decide which factors an axis may split.

    Attributes:
        limits: [factors] number that the shards must divide. full: [factors] shards that split it fully; 0 where none
            do.
        majors: [factors] factors that must be fully split first. need_replication: factors that cannot be split.
        summed: factors over which results are partial. results: factors of each result's dimensions; none where nothing
            is summed.
        space: factors of a windowed convolution. closed: axes that no decision may use.
    """

    limits: tuple[int, ...]
    full: tuple[int, ...]
    majors: tuple[tuple[int, ...], ...]
    need_replication: frozenset[int]
    summed: tuple[int, ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    space: Space | None
    closed: frozenset[int] = frozenset()


class AssignmentState(NamedTuple):
    """State of an op after some decisions; equal states behave alike under all further decisions.

    Attributes:
        factor_axes: [factors] mesh axes that split each.
        gone: axes that no further decision can use, because they are assigned or excluded.
        waiting: claims by which a partial result may still be reduce-scattered, sorted by axis, then by priority.
    """

    factor_axes: FactorAxes
    gone: frozenset[int]
    waiting: tuple[AxisClaim, ...]


class AxisAssigner:
    """Assigns axes in ops with the same rules, on a mesh with these axis sizes. Numbers states and choices as it meets
    them."""

    def __init__(self, rules: SplitRules, sizes: tuple[int, ...]) -> None:
        self.rules, self._sizes = rules, sizes
        self._scatters = frozenset(factor for dims in rules.results for factors in dims for factor in factors)
        self._states: list[AssignmentState] = []
        self._number: dict[AssignmentState, int] = {}
        self._after: list[dict[AxisClaim, int]] = []
        self._chosen: dict[int, int] = {}
        self._choice_number: dict[Choice, int] = {}
        self.choices: list[Choice] = []
        self._enter(AssignmentState(((),) * len(rules.limits), rules.closed, ()))

    def after(self, state: int, claim: AxisClaim) -> int:
        """The state after one more claim."""
        reached = self._after[state].get(claim)
        if reached is None:
            reached = self._after[state][claim] = self._enter(self._claim(self._states[state], claim))
        return reached

    def choice(self, state: int) -> int:
        """Number of the choice in this state, without further decisions."""
        number = self._chosen.get(state)
        if number is None:
            choice = self._settle(self._states[state])
            number = self._chosen[state] = self._choice_number.setdefault(choice, len(self.choices))
            if number == len(self.choices):
                self.choices.append(choice)
        return number

    def _enter(self, assigned: AssignmentState) -> int:
        number = self._number.setdefault(assigned, len(self._states))
        if number == len(self._states):
            self._states.append(assigned)
            self._after.append({})
        return number

    def _claim(self, assigned: AssignmentState, claim: AxisClaim) -> AssignmentState:
        factor_axes, gone, waiting = assigned
        axis, factors = claim
        if not factors:
            return AssignmentState(factor_axes, gone | {axis}, waiting)
        factor = NONE if axis in gone else self._eligible(factor_axes, claim)
        if factor != NONE:
            factor_axes = (*factor_axes[:factor], (*factor_axes[factor], axis), *factor_axes[factor + 1 :])
            gone = gone | {axis}
        if axis in gone and axis not in self._partial(factor_axes):
            waiting = tuple([other for other in waiting if other.axis != axis])
        elif scatter := tuple([f for f in factors if f in self._scatters]):
            waiting = tuple(sorted((*waiting, AxisClaim(axis, scatter)), key=_axis))
        return AssignmentState(factor_axes, gone, waiting)

    def _eligible(self, factor_axes: FactorAxes, claim: AxisClaim) -> int:
        """The first factor that can be split further by the axis; NONE if none."""
        rules, sizes = self.rules, self._sizes
        for factor in claim.factors:
            if factor in rules.need_replication or rules.limits[factor] % (
                _count(factor_axes[factor], sizes) * sizes[claim.axis]
            ):
                continue
            if all(_count(factor_axes[major], sizes) == rules.full[major] for major in rules.majors[factor]):
                return factor
        return NONE

    def _partial(self, factor_axes: FactorAxes) -> list[int]:
        return [axis for factor in self.rules.summed for axis in factor_axes[factor]]

    def _settle(self, assigned: AssignmentState) -> Choice:
        space, factor_axes = self.rules.space, assigned.factor_axes
        if space is not None:
            factor_axes = without_split_space(space, factor_axes, self._sizes)
        partial = self._partial(factor_axes)
        if not partial:
            return factor_axes, ()
        wanted: list[tuple[int, ...]] = []
        for dims in self.rules.results:
            own = {factor: factor_axes[factor] for factors in dims for factor in factors}
            places: list[int] = []
            for axis in partial:
                factor = self._wants(assigned.waiting, axis, own, dims)
                places.append(factor)
                if factor != NONE:
                    own[factor] = (*own[factor], axis)
            wanted.append(tuple(places))
        return factor_axes, tuple(wanted)

    def _wants(
        self,
        waiting: tuple[AxisClaim, ...],
        axis: int,
        own: dict[int, tuple[int, ...]],
        dims: tuple[tuple[int, ...], ...],
    ) -> int:
        """The factor along which a result that is partial over `axis` is reduce-scattered, by the first claim that can;
        else NONE."""
        for factor in (factor for claim in waiting if claim.axis == axis for factor in claim.factors):
            if factor in own and self._room(factor, own, dims, self._sizes[axis]):
                return factor
        return NONE

    def _room(self, factor: int, own: dict[int, tuple[int, ...]], dims: tuple[tuple[int, ...], ...], more: int) -> bool:
        """Whether `factor` of a result can be split into `more` times as many shards: they divide it, and the factors
        major to it are fully split."""
        rules, sizes = self.rules, self._sizes
        if rules.limits[factor] % (_count(own[factor], sizes) * more):
            return False
        factors = next(factors for factors in dims if factor in factors)
        return all(_count(own[major], sizes) == rules.full[major] for major in factors[: factors.index(factor)])


class AxisAssigners:
    """Memo of assigners by rules and axis sizes, shared by a problem and all problems derived from it."""

    def __init__(self) -> None:
        self._assigners: dict[tuple[SplitRules, tuple[int, ...]], AxisAssigner] = {}

    def of(self, rules: SplitRules, sizes: tuple[int, ...]) -> AxisAssigner:
        assigner = self._assigners.get((rules, sizes))
        if assigner is None:
            assigner = self._assigners[rules, sizes] = AxisAssigner(rules, sizes)
        return assigner


def rules_of(
    form: Form, space: Space | None, sizes: tuple[int, ...], closed: frozenset[int] = frozenset()
) -> SplitRules:
    """The split rules of a form on a mesh with these axis sizes, whose products are the possible shard counts."""
    devices = prod(sizes)
    summed = tuple([factor for factor, kind in enumerate(form.kinds) if kind is FactorKind.REDUCTION])
    return SplitRules(
        tuple([gcd(devices, *extents) for extents in form.extents]),
        tuple([size if devices % size == 0 else 0 for size in form.sizes]),
        form.majors,
        frozenset(factor for factor, kind in enumerate(form.kinds) if kind is FactorKind.BLOCKED),
        summed,
        form.results if summed else (),
        space,
        closed,
    )


def assigned_order(plan: Plan) -> Plan:
    """The plan in the order in which its decisions are applied."""
    return tuple(sorted(plan, key=_turn))


def claim_of(pattern: OpPattern, decision: Decision, resolutions: dict[int, int]) -> AxisClaim | None:
    """The claim of a decision on ops of a pattern; None if it does not affect them. resolutions: resolution group ->
    its place in `Shard.sides`."""
    if isinstance(decision, Replicate):
        roles = pattern.role, pattern.kind, pattern.loop_role
        return AxisClaim(decision.axis, ()) if decision.role in roles else None
    if decision.group not in pattern.groups or decision.unless in pattern.groups:
        return None
    if decision.only != NONE and decision.only not in pattern.groups:
        return None
    key = decision.group, decision.sides, min(decision.unless, NONE)
    factors = pattern.candidates.get(key)
    if factors is None:
        factors = pattern.candidates[key] = _by_side(pattern, decision, resolutions)
    return AxisClaim(decision.axis, factors) if factors else None


def _by_side(pattern: OpPattern, decision: Shard, resolutions: dict[int, int]) -> tuple[int, ...]:
    """Factors of the decision's group, the preferred side of a conflict first; none where the decision leaves the op
    alone."""
    factors = tuple(factor for factor, other in enumerate(pattern.groups) if other == decision.group)
    if decision.unless == SUMMED and any(pattern.form.kinds[factor] in SUMS for factor in factors):
        return ()
    if decision.unless == LOOK_UPS and is_looked_up_by(pattern, decision.group):
        return ()
    if not pattern.strands:
        return factors

    def chosen(factor: int) -> int:
        strand = pattern.strands[factor]
        conflict = resolutions.get(strand.resolution, NONE) if strand else NONE
        return decision.sides[conflict] if 0 <= conflict < len(decision.sides) else 0

    def place(factor: int) -> tuple[bool, int]:
        strand, wanted = pattern.strands[factor], chosen(factor)
        side = strand.side if strand else wanted
        return side < wanted, side

    return () if any(chosen(factor) == ASIDE for factor in factors) else tuple(sorted(factors, key=place))


def is_looked_up_by(pattern: OpPattern, group: int) -> bool:
    """Whether ops of a pattern gather rows of a table, or scatter into it, by indices that have this group while the
    table does not."""
    factors = [factor for factor, other in enumerate(pattern.groups) if other == group]
    return bool(factors) and pattern.looked_up.issuperset(factors)


def _count(axes: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    count = 1
    for axis in axes:
        count *= sizes[axis]
    return count


def _axis(claim: AxisClaim) -> int:
    return claim.axis


def _turn(decision: Decision) -> int:
    return 2 if isinstance(decision, Shard) else int(isinstance(decision, Replicate))
