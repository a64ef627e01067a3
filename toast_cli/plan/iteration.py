"""What one op computes on: how its arrays lie once it is settled which axis splits what (see `axis_assignment`).

Enters: an `OpPattern` and a `Choice`. Leaves: an `Iteration`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from toast_cli.dimensions.model import Form, SlotKind, Strand
from toast_cli.plan.decisions import NOWHERE
from toast_cli.plan.sharding import Sharding

NO_ROLE = -1
SlotAxes = tuple[tuple[int, ...], ...]  # [slots] mesh axes that split each
PinnedSharding = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """Slots of a convolution that has windows. tiled: of its image and its result, reached over by windows; summed: of
    its image and its kernel, likewise; contracted: what else both have; kernel: of the kernel, all but windows."""

    tiled: frozenset[int]
    summed: frozenset[int]
    contracted: frozenset[int]
    kernel: frozenset[int]


@dataclass(frozen=True, slots=True)
class OpPattern:
    """All that decides an op's shardings; ops with equal patterns are split alike under every plan.

    groups: [slots] class group. strands: [slots] place in a conflict, or None; empty when no slot has one.
    role: argument group when the op is an argument at rest, a plain view of one, or a result that takes over its
        buffer. kind: the same of its kind of arguments (see `Problem.roles`). loop_role: a third one, see
        `loop_reads.weight_views`.
    result_pins, operand_pins: shardings insisted on, per array, or None. space: of a convolution with windows.
    closed: mesh axes that cannot split it, those over which a manual region is. looked_up: slots of the indices of
        a look-up in a table, or of a scatter into one, that are no dimensions of the table.
    """

    form: Form
    groups: tuple[int, ...]
    strands: tuple[Strand | None, ...]
    role: int = NO_ROLE
    kind: int = NO_ROLE
    operand_pins: tuple[PinnedSharding | None, ...] = ()
    result_pins: tuple[PinnedSharding | None, ...] = ()
    space: Space | None = None
    closed: frozenset[int] = frozenset()
    loop_role: int = NO_ROLE
    looked_up: frozenset[int] = frozenset()
    # (group, sides, scope if that is no group) -> slots in the order in which they are tried, as far as known: plans
    # ask for the same few again and again.
    candidates: dict[tuple[int, tuple[int, ...], int], tuple[int, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )


@dataclass(frozen=True, slots=True)
class Iteration:
    """One op under one plan.

    Attributes:
        slot_axes: [slots] mesh axes that split each.
        operands: [operands] sharding each must have.
        computed: [results] sharding the op computes each in. reduced_to: [results] sharding once reductions are
            resolved. shardings: [results] the same, but as pinned where a result is.
        reduced: axes each result was partial on and is all-reduced over. scattered: axes it is reduce-scattered over.
        cuts: `operands` without axes that split a padded dimension, along which no sum is scattered; None where no
            operand has one.
        number: which of the iterations of its `IterationMemo` it is; -1 for one that is in none.
    """

    slot_axes: SlotAxes
    operands: tuple[Sharding, ...]
    computed: tuple[Sharding, ...]
    reduced_to: tuple[Sharding, ...]
    shardings: tuple[Sharding, ...]
    reduced: tuple[int, ...]
    scattered: tuple[tuple[int, ...], ...]
    cuts: tuple[Sharding, ...] | None = None
    number: int = field(default=-1, repr=False, compare=False)

    def cut(self, operand: int) -> Sharding:
        """How it cuts an operand that is a sum."""
        return self.operands[operand] if self.cuts is None else self.cuts[operand]


# What an op makes of a plan, all else follows from it: [slots] the axes that split each, and per result, for each axis
# it is partial over, the slot to scatter it on (NOWHERE: all-reduce it).
Choice = tuple[SlotAxes, tuple[tuple[int, ...], ...]]


def decisive(pattern: OpPattern) -> tuple[object, ...]:
    """What a choice depends on: patterns that agree in it make the same one under every plan."""
    form = pattern.form
    sums = form.results if SlotKind.REDUCTION in form.kinds else ()
    return (
        pattern.groups,
        pattern.closed,
        pattern.strands,
        pattern.role,
        pattern.kind,
        pattern.loop_role,
        pattern.looked_up,
        form.sizes,
        form.kinds,
        form.extents,
        form.majors,
        form.uneven,
        sums,
        pattern.space,
    )


def lay_out(pattern: OpPattern, choice: Choice) -> Iteration:
    """The shardings that follow from a choice."""
    form = pattern.form
    slot_axes, wanted = choice

    def sharding(dims: tuple[tuple[int, ...], ...], axes_of: Sequence[tuple[int, ...]] = slot_axes) -> Sharding:
        return tuple([_along(slots, axes_of) for slots in dims])

    pinned = _pin_further if pattern.closed else _pin
    operands = tuple(map(sharding, form.operands))
    if pattern.operand_pins:
        operands = tuple(pinned(at, pin) for at, pin in zip(operands, pattern.operand_pins, strict=True))
    partial = axes_summed_over(form.kinds, slot_axes)
    computed = tuple(map(sharding, form.results))
    shardings = list(computed)
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
        shardings[k] = sharding(form.results[k], own)
    reduced_to = tuple(shardings)
    if pattern.result_pins:
        shardings = [pinned(at, pin) for at, pin in zip(shardings, pattern.result_pins, strict=True)]
        if pattern.closed:  # a region makes its results as its boundary says
            computed = reduced_to = tuple(shardings)
        if not operands and not partial:  # an argument: it simply rests as pinned
            computed = reduced_to = tuple(shardings)
    even = [() if slot in form.uneven else axes for slot, axes in enumerate(slot_axes)]
    cuts = tuple(sharding(dims, even) for dims in form.operands) if form.uneven else None
    all_reduced = tuple(dict.fromkeys(reduced))
    return Iteration(slot_axes, operands, computed, reduced_to, tuple(shardings), all_reduced, tuple(scattered), cuts)


def axes_summed_over(kinds: Sequence[SlotKind], slot_axes: SlotAxes) -> list[int]:
    """Axes over which the results of an op so split are partial, in the order in which they split what is summed."""
    return [axis for kind, axes in zip(kinds, slot_axes, strict=True) if kind is SlotKind.REDUCTION for axis in axes]


def _along(slots: tuple[int, ...], slot_axes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Axes that split a dimension made of these slots."""
    return slot_axes[slots[0]] if len(slots) == 1 else tuple([axis for slot in slots for axis in slot_axes[slot]])


def _pin_further(sharding: Sharding, pin: PinnedSharding | None) -> Sharding:
    """`sharding` with what is pinned in front of each dimension: a region splits its pieces further, over other
    axes."""
    return sharding if pin is None else tuple((*(want or ()), *axes) for axes, want in zip(sharding, pin, strict=True))


def _pin(sharding: Sharding, pin: PinnedSharding | None) -> Sharding:
    """`sharding` with the pinned dimensions as pinned; axes a pin takes leave the open dimensions."""
    if pin is None:
        return sharding
    taken = {axis for axes in pin if axes is not None for axis in axes}
    return tuple(
        tuple(a for a in axes if a not in taken) if want is None else want
        for axes, want in zip(sharding, pin, strict=True)
    )
