"""How an op spends mesh axes, decision after decision: who gets which axis, and where partial results go.

For every op and every mesh axis, the first decision whose group has an eligible slot in that op wins the axis there. Eligible:
the shards divide every extent, the op does not need the slot whole, it lies on the chosen side of its conflict, and every
slot that is major to it in some dimension is already fully split. Results of an op that spent an axis on a reduction are
partial; they are reduce-scattered where a decision wants that axis on one of their own dimensions, all-reduced otherwise.

`Replicate` frees axes that other decisions would take, so all `Replicate`s of a plan come before the others here; then nothing is ever taken
back, and what an op has made of the first decisions of a plan is all that has to be known of them.

Enters: an `OpPattern` and a plan, or one decision after the other. Leaves: a `Choice`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from toast_cli.dimensions.model import Form, SlotKind
from toast_cli.plan.decisions import NOWHERE, Decision, Plan, Replicate, Shard
from toast_cli.plan.iteration import Choice, Iteration, OpPattern, SlotAxes, Space, lay_out, partial_axes


class Spent(NamedTuple):
    """What an op has made of some decisions, as far as those to come can tell: equal ones have the same future.

    Attributes:
        slot_axes: [slots] mesh axes that split each.
        gone: axes that no further decision can have, because they are spent or not to be.
        waiting: decisions that may yet have a partial result scattered, axis after axis, those about one axis in order.
    """

    slot_axes: SlotAxes
    gone: frozenset[int]
    waiting: tuple[Shard, ...]


def iterate(pattern: OpPattern, plan: Plan, resolutions: dict[int, int], sizes: tuple[int, ...]) -> Iteration:
    """Lowers one op.

    Args:
        plan: decisions in order of priority. resolutions: resolution group -> its place in its group's `Shard.sides`.
        sizes: [axes] of the mesh.
    """
    return lay_out(pattern, choose(pattern, plan, resolutions, sizes))


def choose(pattern: OpPattern, plan: Plan, resolutions: dict[int, int], sizes: tuple[int, ...]) -> Choice:
    """Who gets which axis in one op; arguments as for `iterate`."""
    spent = unspent(pattern)
    for decision in replicates_first(plan):
        spent = spend(pattern, spent, decision, resolutions, sizes)
    return settle(pattern, spent, resolutions, sizes)


def replicates_first(plan: Plan) -> Plan:
    """The plan in the order in which it is to be spent."""
    return tuple(sorted(plan, key=_is_shard))


def _is_shard(decision: Decision) -> bool:
    return isinstance(decision, Shard)


def unspent(pattern: OpPattern) -> Spent:
    """Nothing decided yet."""
    return Spent(((),) * len(pattern.groups), frozenset(), ())


def spend(
    pattern: OpPattern, spent: Spent, decision: Decision, resolutions: dict[int, int], sizes: tuple[int, ...]
) -> Spent:
    """The same after one more decision; `Replicate`s come before all others."""
    if isinstance(decision, Replicate):
        return spent if decision.role != pattern.role else spent._replace(gone=spent.gone | {decision.axis})
    if decision.group not in pattern.groups or decision.unless in pattern.groups:
        return spent
    slot_axes, gone, waiting = spent
    candidates, axis = _candidates(pattern, decision, resolutions), decision.axis
    if axis not in gone:
        taken = _eligible(pattern, slot_axes, candidates, sizes, sizes[axis])
        if taken != NOWHERE:
            slot_axes = (*slot_axes[:taken], (*slot_axes[taken], axis), *slot_axes[taken + 1 :])
            gone = gone | {axis}
    if not pattern.scatters.isdisjoint(candidates):
        waiting = tuple(sorted((*waiting, decision), key=_axis))
    if waiting and axis in gone and axis not in partial_axes(pattern.form, slot_axes):
        waiting = tuple([d for d in waiting if d.axis != axis])
    return Spent(slot_axes, gone, waiting)


def _axis(decision: Shard) -> int:
    return decision.axis


def _eligible(
    pattern: OpPattern, slot_axes: SlotAxes, candidates: Iterable[int], sizes: tuple[int, ...], more: int
) -> int:
    """The first of these slots that can be split `more` times further; NOWHERE if none."""
    form = pattern.form
    for slot in candidates:
        if form.kinds[slot] is SlotKind.BLOCKED or not _divides(
            _count(slot_axes[slot], sizes) * more, form.extents[slot]
        ):
            continue
        if all(_count(slot_axes[major], sizes) == form.sizes[major] for major in form.majors[slot]):
            return slot
    return NOWHERE


def settle(pattern: OpPattern, spent: Spent, resolutions: dict[int, int], sizes: tuple[int, ...]) -> Choice:
    """The choice where no more decisions come."""
    slot_axes = spent.slot_axes if pattern.space is None else _space_left(pattern.space, spent.slot_axes, sizes)
    partial = partial_axes(pattern.form, slot_axes)
    if not partial:
        return slot_axes, ()
    wanted: list[tuple[int, ...]] = []
    for dims in pattern.form.results:
        own = {slot: slot_axes[slot] for slots in dims for slot in slots}
        places: list[int] = []
        for axis in partial:
            slot = _wants(pattern, spent.waiting, resolutions, sizes, axis, own, dims)
            places.append(slot)
            if slot != NOWHERE:
                own[slot] = (*own[slot], axis)
        wanted.append(tuple(places))
    return slot_axes, tuple(wanted)


def _candidates(pattern: OpPattern, decision: Shard, resolutions: dict[int, int]) -> tuple[int, ...]:
    """Slots of the decision's group, the chosen side of a conflict first."""
    key = decision.group, decision.sides
    found = pattern.candidates.get(key)
    if found is None:
        found = pattern.candidates[key] = _by_side(pattern, decision, resolutions)
    return found


def _by_side(pattern: OpPattern, decision: Shard, resolutions: dict[int, int]) -> tuple[int, ...]:
    slots = tuple(slot for slot, other in enumerate(pattern.groups) if other == decision.group)

    def place(slot: int) -> tuple[bool, int]:
        strand = pattern.strands[slot]
        at = resolutions.get(strand.resolution, NOWHERE) if strand else NOWHERE
        chosen = decision.sides[at] if 0 <= at < len(decision.sides) else 0
        side = strand.side if strand else chosen
        return side < chosen, side

    return tuple(sorted(slots, key=place)) if pattern.strands and len(slots) > 1 else slots


def _space_left(space: Space, slot_axes: SlotAxes, sizes: tuple[int, ...]) -> SlotAxes:
    """Without the axes that split space where XLA's partitioner would not go along.

    Where image and kernel are both split, and space is, it splits the kernel in space as well and adds up over all devices: those that hold the
    same pieces, because an axis does not split what is added up, count several times (jaxlib 0.10.2; a gradient comes out doubled).
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


def _wants(
    pattern: OpPattern,
    waiting: tuple[Shard, ...],
    resolutions: dict[int, int],
    sizes: tuple[int, ...],
    axis: int,
    own: dict[int, tuple[int, ...]],
    dims: tuple[tuple[int, ...], ...],
) -> int:
    """The slot of a result on which the first interested decision wants `axis`, which the result is partial over, or NOWHERE."""
    form = pattern.form
    for decision in waiting:
        if decision.axis != axis:
            continue
        for slot in _candidates(pattern, decision, resolutions):
            if slot in own and _room(form, slot, own, dims, sizes, sizes[axis]):
                return slot
    return NOWHERE


def _room(
    form: Form,
    slot: int,
    own: dict[int, tuple[int, ...]],
    dims: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
    more: int,
) -> bool:
    """Whether `slot` of a result can be split `more` times further: it divides, and majors in its dimension are used up."""

    if not _divides(_count(own[slot], sizes) * more, form.extents[slot]):
        return False
    slots = next(slots for slots in dims if slot in slots)
    return all(_count(own[major], sizes) == form.sizes[major] for major in slots[: slots.index(slot)])


def _divides(count: int, extents: tuple[int, ...]) -> bool:
    for extent in extents:  # noqa: SIM110 - called millions of times, and a generator costs more than the loop
        if extent % count:
            return False
    return True


def _count(axes: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    count = 1
    for axis in axes:
        count *= sizes[axis]
    return count
