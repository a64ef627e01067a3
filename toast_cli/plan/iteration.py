"""What one op computes on under a plan: the heart of the plan semantics.

For every op and every mesh axis, the first decision whose group has an eligible slot in that op wins the axis there. Eligible:
the shards divide every extent, the op does not need the slot whole, it lies on the chosen side of its conflict, and every
slot that is major to it in some dimension is already fully split. Results of an op that spent an axis on a reduction are
partial; they are reduce-scattered where a decision wants that axis on one of their own dimensions, all-reduced otherwise.

Enters: an `OpPattern` and a plan. Leaves: an `Iteration`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from toast_cli.dimensions.model import Form, SlotKind, Strand
from toast_cli.plan.decisions import NOWHERE, Plan, Replicate, Shard
from toast_cli.plan.layout import Layout

NO_ROLE = -1
PinnedLayout = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """Slots of a convolution that has windows. tiled: of its image and its result, reached over by windows; summed: of its image and its
    kernel, likewise; contracted: what else both have; kernel: of the kernel, all but windows."""

    tiled: frozenset[int]
    summed: frozenset[int]
    contracted: frozenset[int]
    kernel: frozenset[int]


@dataclass(frozen=True, slots=True)
class OpPattern:
    """All that decides an op's layouts; ops with equal patterns are split alike under every plan.

    groups: [slots] class group. strands: [slots] place in a conflict, or None; empty when no slot has one.
    role: argument group when the op is an argument at rest, a plain view of one, or a result that takes over its buffer.
    result_pins, operand_pins: layouts insisted on, per array, or None. space: of a convolution with windows.
    """

    form: Form
    groups: tuple[int, ...]
    strands: tuple[Strand | None, ...]
    role: int = NO_ROLE
    operand_pins: tuple[PinnedLayout | None, ...] = ()
    result_pins: tuple[PinnedLayout | None, ...] = ()
    space: Space | None = None
    # (group, sides) -> slots in the order in which they are tried, as far as asked for: plans ask for the same few again and again.
    candidates: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )


@dataclass(frozen=True, slots=True)
class Iteration:
    """One op under one plan.

    Attributes:
        slot_axes: [slots] mesh axes that split each.
        operands: [operands] layout each must have.
        computed: [results] layout the op computes each in. reduced_to: [results] layout once reductions are resolved. layouts: [results]
            the same, but as pinned where a result is.
        reduced: axes each result was partial on and is all-reduced over. scattered: axes it is reduce-scattered over.
    """

    slot_axes: tuple[tuple[int, ...], ...]
    operands: tuple[Layout, ...]
    computed: tuple[Layout, ...]
    reduced_to: tuple[Layout, ...]
    layouts: tuple[Layout, ...]
    reduced: tuple[int, ...]
    scattered: tuple[tuple[int, ...], ...]


# What an op makes of a plan, all else follows from it: [slots] the axes that split each, and per result, for each axis it is
# partial over, the slot to scatter it on (NOWHERE: all-reduce it).
Choice = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]


def iterate(pattern: OpPattern, plan: Plan, resolutions: dict[int, int], sizes: tuple[int, ...]) -> Iteration:
    """Lowers one op.

    Args:
        plan: decisions in order of priority. resolutions: resolution group -> its place in its group's `Shard.sides`.
        sizes: [axes] of the mesh.
    """
    return lay_out(pattern, choose(pattern, plan, resolutions, sizes))


def decisive(pattern: OpPattern) -> tuple[object, ...]:
    """What a choice depends on: patterns that agree in it make the same one under every plan."""
    form = pattern.form
    sums = form.results if SlotKind.REDUCTION in form.kinds else ()
    return (
        pattern.groups,
        pattern.strands,
        pattern.role,
        form.sizes,
        form.kinds,
        form.extents,
        form.majors,
        sums,
        pattern.space,
    )


def choose(pattern: OpPattern, plan: Plan, resolutions: dict[int, int], sizes: tuple[int, ...]) -> Choice:
    """Who gets which axis in one op; arguments as for `iterate`."""
    slot_axes = _spend_axes(pattern, plan, resolutions, sizes)
    if pattern.space is not None:
        _leave_space(pattern.space, slot_axes, sizes)
    partial = _partial(pattern.form, slot_axes)
    if not partial:
        return tuple(slot_axes), ()
    wanted: list[tuple[int, ...]] = []
    for dims in pattern.form.results:
        own = {slot: slot_axes[slot] for slots in dims for slot in slots}
        places: list[int] = []
        for axis in partial:
            slot = _wants(pattern, plan, resolutions, sizes, axis, own, dims)
            places.append(slot)
            if slot != NOWHERE:
                own[slot] = (*own[slot], axis)
        wanted.append(tuple(places))
    return tuple(slot_axes), tuple(wanted)


def lay_out(pattern: OpPattern, choice: Choice) -> Iteration:
    """The layouts that follow from a choice."""
    form = pattern.form
    slot_axes, wanted = choice

    def layout(dims: tuple[tuple[int, ...], ...], axes_of: Sequence[tuple[int, ...]] = slot_axes) -> Layout:
        return tuple(tuple(axis for slot in slots for axis in axes_of[slot]) for slots in dims)

    operands = tuple(map(layout, form.operands))
    if pattern.operand_pins:
        operands = tuple(_pin(at, pin) for at, pin in zip(operands, pattern.operand_pins, strict=True))
    partial = _partial(form, slot_axes)
    computed = tuple(map(layout, form.results))
    layouts = list(computed)
    scattered: list[tuple[int, ...]] = [()] * len(computed)
    reduced: list[int] = []
    for k, places in enumerate(wanted):
        own = list(slot_axes)
        for axis, slot in zip(partial, places, strict=True):
            if slot == NOWHERE:
                reduced.append(axis)
            else:
                own[slot] = (*own[slot], axis)
                scattered[k] = (*scattered[k], axis)
        layouts[k] = layout(form.results[k], own)
    reduced_to = tuple(layouts)
    if pattern.result_pins:
        layouts = [_pin(at, pin) for at, pin in zip(layouts, pattern.result_pins, strict=True)]
        if not operands and not partial:  # an argument: it simply rests as pinned
            computed = reduced_to = tuple(layouts)
    return Iteration(
        slot_axes, operands, computed, reduced_to, tuple(layouts), tuple(dict.fromkeys(reduced)), tuple(scattered)
    )


def _partial(form: Form, slot_axes: Sequence[tuple[int, ...]]) -> list[int]:
    """Axes over which results are partial."""
    return [a for kind, axes in zip(form.kinds, slot_axes, strict=True) if kind is SlotKind.REDUCTION for a in axes]


def _spend_axes(
    pattern: OpPattern, plan: Plan, resolutions: dict[int, int], sizes: tuple[int, ...]
) -> list[tuple[int, ...]]:
    form, groups = pattern.form, pattern.groups
    slot_axes: list[tuple[int, ...]] = [()] * len(groups)
    shards = [1] * len(groups)
    used = {d.axis for d in plan if isinstance(d, Replicate) and d.role == pattern.role}
    for decision in plan:
        if isinstance(decision, Replicate) or decision.axis in used or decision.group not in groups:
            continue
        if decision.unless in groups:
            continue
        size = sizes[decision.axis]
        for slot in _candidates(pattern, decision, resolutions):
            if form.kinds[slot] is SlotKind.BLOCKED or not _divides(shards[slot] * size, form.extents[slot]):
                continue
            if form.majors[slot] and any(shards[major] != form.sizes[major] for major in form.majors[slot]):
                continue
            slot_axes[slot] = (*slot_axes[slot], decision.axis)
            shards[slot] *= size
            used.add(decision.axis)
            break
    return slot_axes


def _leave_space(space: Space, slot_axes: list[tuple[int, ...]], sizes: tuple[int, ...]) -> None:
    """Takes away the axes that split space where XLA's partitioner would not go along.

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
    for slot in away:
        slot_axes[slot] = ()


def _divides(count: int, extents: tuple[int, ...]) -> bool:
    for extent in extents:  # noqa: SIM110 - called millions of times, and a generator costs more than the loop
        if extent % count:
            return False
    return True


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


def _wants(
    pattern: OpPattern,
    plan: Plan,
    resolutions: dict[int, int],
    sizes: tuple[int, ...],
    axis: int,
    own: dict[int, tuple[int, ...]],
    dims: tuple[tuple[int, ...], ...],
) -> int:
    """The slot of a result on which the first interested decision wants `axis`, which the result is partial over, or NOWHERE."""
    form = pattern.form
    for decision in plan:
        if isinstance(decision, Replicate) or decision.axis != axis or decision.unless in pattern.groups:
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

    def count(s: int) -> int:
        total = 1
        for a in own[s]:
            total *= sizes[a]
        return total

    if not _divides(count(slot) * more, form.extents[slot]):
        return False
    slots = next(slots for slots in dims if slot in slots)
    return all(count(major) == form.sizes[major] for major in slots[: slots.index(slot)])


def _pin(layout: Layout, pin: PinnedLayout | None) -> Layout:
    """`layout` with the pinned dimensions as pinned; axes a pin takes leave the open dimensions."""
    if pin is None:
        return layout
    taken = {axis for axes in pin if axes is not None for axis in axes}
    return tuple(
        tuple(a for a in axes if a not in taken) if want is None else want
        for axes, want in zip(layout, pin, strict=True)
    )
