"""Assigns mesh axes to the slots of one op, decision by decision, and decides where its partial results are scattered.

For every op and every mesh axis, the first decision whose group has an eligible slot in that op wins the axis there.
Eligible: the shards divide every extent, the op does not need the slot whole, and every slot that is major to it in
some dimension is already fully split. Where a conflict gives the group several slots, those on the preferred side are
tried first. If an axis splits a reduced slot, the op's results are partial over it; they are reduce-scattered where a
decision wants that axis on one of their own dimensions, and all-reduced otherwise.

`Replicate` closes an axis to the ops it names, so it is applied before all `Shard`s. An assignment is then
never undone, and the state of an op after the first decisions of a plan is all that later ones depend on. There are few
states, however many plans there are: most decisions find their axis taken, and equivalent orders lead to the same
state. Ops whose slots can be split alike share states, whatever the names and sizes of their arrays, so each state is
computed once.

In: an `OpPattern` and a plan. Out: a `Choice`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

from toast_cli.dimensions.model import Form, SlotKind
from toast_cli.plan.decisions import ASIDE, LOOK_UPS, NOWHERE, SUMMED, Decision, Plan, Replicate, Shard
from toast_cli.plan.op_sharding import Choice, OpPattern, SlotAxes, Space

SUMS = (SlotKind.REDUCTION, SlotKind.SUMMED_LATER)
START = 0  # the state in which nothing is decided


@dataclass(frozen=True, slots=True)
class Workarounds:
    """Shardings that plans avoid because the partitioner computes wrong results for them; `compiler.partitioner` says
    which a version needs. split_space: see `without_split_space`."""

    split_space: bool = True


ALL = Workarounds()


def without_split_space(space: Space, slot_axes: SlotAxes, sizes: tuple[int, ...]) -> SlotAxes:
    """The axes of a convolution's slots without those that split space where XLA's partitioner computes a wrong result.

    Where image and kernel are both split, and space is, it splits the kernel in space as well and sums over all
    devices. Devices that hold the same pieces, because an axis does not split the summed dimensions, then count several
    times: a gradient comes out doubled (jaxlib 0.10.2).
    """

    def spent(slots: frozenset[int]) -> set[int]:
        return {axis for slot in slots for axis in slot_axes[slot]}

    away: frozenset[int] = frozenset()
    if spent(space.tiled) and (spent(space.kernel) or spent(space.summed)):
        away = space.tiled
    if spent(space.summed):
        added_up = spent(space.summed | space.contracted)
        if away or any(size > 1 and axis not in added_up for axis, size in enumerate(sizes)):
            away |= space.summed
    return tuple([() if slot in away else axes for slot, axes in enumerate(slot_axes)])


class AxisClaim(NamedTuple):
    """The effect of a decision on one op. slots: those that the axis may split, in order of preference; empty if no
    decision may use the axis."""

    axis: int
    slots: tuple[int, ...]


class SplitRules(NamedTuple):
    """The properties of an op that decide which slots an axis may split.

    Attributes:
        limits: [slots] number that the shards must divide. full: [slots] shards that split it fully; 0 where none do.
        majors: [slots] slots that must be fully split first. whole: slots that the op needs whole.
        summed: slots over which results are partial. results: slots of each result's dimensions; none where nothing is
            summed.
        space: slots of a windowed convolution. closed: axes that no decision may use.
    """

    limits: tuple[int, ...]
    full: tuple[int, ...]
    majors: tuple[tuple[int, ...], ...]
    whole: frozenset[int]
    summed: tuple[int, ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    space: Space | None
    closed: frozenset[int] = frozenset()


class AssignmentState(NamedTuple):
    """State of an op after some decisions; equal states behave alike under all further decisions.

    Attributes:
        slot_axes: [slots] mesh axes that split each.
        gone: axes that no further decision can use, because they are assigned or excluded.
        waiting: claims by which a partial result may still be reduce-scattered, sorted by axis, then by priority.
    """

    slot_axes: SlotAxes
    gone: frozenset[int]
    waiting: tuple[AxisClaim, ...]


class AxisAssigner:
    """Assigns axes in ops with the same rules, on a mesh with these axis sizes. Numbers states and choices as it meets
    them."""

    def __init__(self, rules: SplitRules, sizes: tuple[int, ...]) -> None:
        self.rules, self._sizes = rules, sizes
        self._scatters = frozenset(slot for dims in rules.results for slots in dims for slot in slots)
        self._states: list[AssignmentState] = []
        self._number: dict[AssignmentState, int] = {}
        self._after: list[dict[AxisClaim, int]] = []
        self._chosen: dict[int, int] = {}
        self._choice_number: dict[Choice, int] = {}
        self.choices: list[Choice] = []
        self._enter(AssignmentState(((),) * len(rules.limits), rules.closed, ()))

    def after(self, state: int, claim: AxisClaim) -> int:
        """The state after one more claim."""
        found = self._after[state].get(claim)
        if found is None:
            found = self._after[state][claim] = self._enter(self._claim(self._states[state], claim))
        return found

    def choice(self, state: int) -> int:
        """Number of the choice in this state, without further decisions."""
        found = self._chosen.get(state)
        if found is None:
            choice = self._settle(self._states[state])
            found = self._chosen[state] = self._choice_number.setdefault(choice, len(self.choices))
            if found == len(self.choices):
                self.choices.append(choice)
        return found

    def _enter(self, assigned: AssignmentState) -> int:
        found = self._number.setdefault(assigned, len(self._states))
        if found == len(self._states):
            self._states.append(assigned)
            self._after.append({})
        return found

    def _claim(self, assigned: AssignmentState, claim: AxisClaim) -> AssignmentState:
        slot_axes, gone, waiting = assigned
        axis, slots = claim
        if not slots:
            return AssignmentState(slot_axes, gone | {axis}, waiting)
        taken = NOWHERE if axis in gone else self._eligible(slot_axes, claim)
        if taken != NOWHERE:
            slot_axes = (*slot_axes[:taken], (*slot_axes[taken], axis), *slot_axes[taken + 1 :])
            gone = gone | {axis}
        if axis in gone and axis not in self._partial(slot_axes):
            waiting = tuple([other for other in waiting if other.axis != axis])
        elif scatter := tuple([slot for slot in slots if slot in self._scatters]):
            waiting = tuple(sorted((*waiting, AxisClaim(axis, scatter)), key=_axis))
        return AssignmentState(slot_axes, gone, waiting)

    def _eligible(self, slot_axes: SlotAxes, claim: AxisClaim) -> int:
        """The first slot that can be split further by the axis; NOWHERE if none."""
        rules, sizes = self.rules, self._sizes
        for slot in claim.slots:
            if slot in rules.whole or rules.limits[slot] % (_count(slot_axes[slot], sizes) * sizes[claim.axis]):
                continue
            if all(_count(slot_axes[major], sizes) == rules.full[major] for major in rules.majors[slot]):
                return slot
        return NOWHERE

    def _partial(self, slot_axes: SlotAxes) -> list[int]:
        return [axis for slot in self.rules.summed for axis in slot_axes[slot]]

    def _settle(self, assigned: AssignmentState) -> Choice:
        space, slot_axes = self.rules.space, assigned.slot_axes
        if space is not None:
            slot_axes = without_split_space(space, slot_axes, self._sizes)
        partial = self._partial(slot_axes)
        if not partial:
            return slot_axes, ()
        wanted: list[tuple[int, ...]] = []
        for dims in self.rules.results:
            own = {slot: slot_axes[slot] for slots in dims for slot in slots}
            places: list[int] = []
            for axis in partial:
                slot = self._wants(assigned.waiting, axis, own, dims)
                places.append(slot)
                if slot != NOWHERE:
                    own[slot] = (*own[slot], axis)
            wanted.append(tuple(places))
        return slot_axes, tuple(wanted)

    def _wants(
        self,
        waiting: tuple[AxisClaim, ...],
        axis: int,
        own: dict[int, tuple[int, ...]],
        dims: tuple[tuple[int, ...], ...],
    ) -> int:
        """The slot along which a result that is partial over `axis` is reduce-scattered, by the first claim that can;
        else NOWHERE."""
        for slot in (slot for claim in waiting if claim.axis == axis for slot in claim.slots):
            if slot in own and self._room(slot, own, dims, self._sizes[axis]):
                return slot
        return NOWHERE

    def _room(self, slot: int, own: dict[int, tuple[int, ...]], dims: tuple[tuple[int, ...], ...], more: int) -> bool:
        """Whether `slot` of a result can be split into `more` times as many shards: they divide it, and the slots major
        to it are fully split."""
        rules, sizes = self.rules, self._sizes
        if rules.limits[slot] % (_count(own[slot], sizes) * more):
            return False
        slots = next(slots for slots in dims if slot in slots)
        return all(_count(own[major], sizes) == rules.full[major] for major in slots[: slots.index(slot)])


class AxisAssigners:
    """Memo of assigners by rules and axis sizes, shared by a problem and all problems derived from it."""

    def __init__(self) -> None:
        self._known: dict[tuple[SplitRules, tuple[int, ...]], AxisAssigner] = {}

    def of(self, rules: SplitRules, sizes: tuple[int, ...]) -> AxisAssigner:
        found = self._known.get((rules, sizes))
        if found is None:
            found = self._known[rules, sizes] = AxisAssigner(rules, sizes)
        return found


def rules_of(
    form: Form, space: Space | None, sizes: tuple[int, ...], closed: frozenset[int] = frozenset()
) -> SplitRules:
    """The split rules of a form on a mesh with these axis sizes, whose products are the possible shard counts."""
    devices = prod(sizes)
    summed = tuple([slot for slot, kind in enumerate(form.kinds) if kind is SlotKind.REDUCTION])
    return SplitRules(
        tuple([gcd(devices, *extents) for extents in form.extents]),
        tuple([size if devices % size == 0 else 0 for size in form.sizes]),
        form.majors,
        frozenset(slot for slot, kind in enumerate(form.kinds) if kind is SlotKind.BLOCKED),
        summed,
        _scattered(form) if summed else (),
        space,
        closed,
    )


def _scattered(form: Form) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Slots of each result's dimensions; none for dimensions along which a sum cannot be scattered."""
    return tuple(tuple(() if form.uneven.intersection(slots) else slots for slots in dims) for dims in form.results)


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
    if decision.only != NOWHERE and decision.only not in pattern.groups:
        return None
    key = decision.group, decision.sides, min(decision.unless, NOWHERE)
    slots = pattern.candidates.get(key)
    if slots is None:
        slots = pattern.candidates[key] = _by_side(pattern, decision, resolutions)
    return AxisClaim(decision.axis, slots) if slots else None


def _by_side(pattern: OpPattern, decision: Shard, resolutions: dict[int, int]) -> tuple[int, ...]:
    """Slots of the decision's group, the preferred side of a conflict first; none where the decision leaves the op
    alone."""
    slots = tuple(slot for slot, other in enumerate(pattern.groups) if other == decision.group)
    if decision.unless == SUMMED and any(pattern.form.kinds[slot] in SUMS for slot in slots):
        return ()
    if decision.unless == LOOK_UPS and is_looked_up_by(pattern, decision.group):
        return ()
    if not pattern.strands:
        return slots

    def chosen(slot: int) -> int:
        strand = pattern.strands[slot]
        at = resolutions.get(strand.resolution, NOWHERE) if strand else NOWHERE
        return decision.sides[at] if 0 <= at < len(decision.sides) else 0

    def place(slot: int) -> tuple[bool, int]:
        strand, wanted = pattern.strands[slot], chosen(slot)
        side = strand.side if strand else wanted
        return side < wanted, side

    return () if any(chosen(slot) == ASIDE for slot in slots) else tuple(sorted(slots, key=place))


def is_looked_up_by(pattern: OpPattern, group: int) -> bool:
    """Whether ops of a pattern gather rows of a table, or scatter into it, by indices that have this group while the
    table does not."""
    slots = [slot for slot, other in enumerate(pattern.groups) if other == group]
    return bool(slots) and pattern.looked_up.issuperset(slots)


def _count(axes: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    count = 1
    for axis in axes:
        count *= sizes[axis]
    return count


def _axis(claim: AxisClaim) -> int:
    return claim.axis


def _turn(decision: Decision) -> int:
    return 2 if isinstance(decision, Shard) else int(isinstance(decision, Replicate))
