"""Shardings of an op's operands and results, given the axes that split its factors (see `axis_assignment`).

In: an `OpPattern` and a `Choice`. Out: an `OpSharding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from toast_cli.dimensions.model import FactorKind, Form, Strand
from toast_cli.plan.decisions import NONE
from toast_cli.plan.sharding import Sharding

NO_ROLE = -1
FactorAxes = tuple[tuple[int, ...], ...]  # [factors] mesh axes that split each
PinnedSharding = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """Factors of a windowed convolution. tiled: windowed factors of image and result. summed: windowed factors of image
    and kernel. contracted: other factors of image and kernel. kernel: factors of the kernel without windows."""

    tiled: frozenset[int]
    summed: frozenset[int]
    contracted: frozenset[int]
    kernel: frozenset[int]


@dataclass(frozen=True, slots=True)
class OpPattern:
    """All that decides an op's shardings; ops with equal patterns are split alike under every plan.

    groups: [factors] class group. strands: [factors] place in a conflict, or None; empty when no factor has one.
    role: for an argument, a view of one, or a result in its buffer: weights, state, inputs (number in `Problem.roles`).
    kind: its kind of arguments (see `Problem.roles`). loop_role: a third role, see
        `loop_reads.weight_views`.
    result_pins, operand_pins: pinned shardings, per array, or None. space: factors of a windowed convolution.
    closed: mesh axes that cannot split it, such as those of a manual region. looked_up: factors of the indices of
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
    # Memo: (group, sides, scope if that is no group) -> factors in the order in which they are tried.
    candidates: dict[tuple[int, tuple[int, ...], int], tuple[int, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )


@dataclass(frozen=True, slots=True)
class OpSharding:
    """The shardings of one op under one plan.

    Attributes:
        factor_axes: [factors] mesh axes that split each.
        operands: [operands] sharding each must have.
        computed: [results] sharding the op computes each in. reduced_to: [results] sharding once reductions are
            resolved. shardings: [results] the same with pins applied.
        reduced: axes each result was partial on and is all-reduced over. scattered: axes it is reduce-scattered over.
        cuts: `operands` without axes that split a padded dimension, along which no sum is scattered; None where no
            operand has one.
        number: its number in an `OpShardingMemo`; -1 if it is in none.
    """

    factor_axes: FactorAxes
    operands: tuple[Sharding, ...]
    computed: tuple[Sharding, ...]
    reduced_to: tuple[Sharding, ...]
    shardings: tuple[Sharding, ...]
    reduced: tuple[int, ...]
    scattered: tuple[tuple[int, ...], ...]
    cuts: tuple[Sharding, ...] | None = None
    number: int = field(default=-1, repr=False, compare=False)

    def cut(self, operand: int) -> Sharding:
        """Sharding along which a sum that is read as this operand may be reduce-scattered."""
        return self.operands[operand] if self.cuts is None else self.cuts[operand]


# The axis assignment of an op, which determines its op sharding: [factors] the axes that split each, and per result,
# for each axis it is partial over, the factor to scatter it on (NONE: all-reduce it).
Choice = tuple[FactorAxes, tuple[tuple[int, ...], ...]]


def decisive(pattern: OpPattern) -> tuple[object, ...]:
    """The parts of a pattern that determine its choice: patterns that agree in them choose alike under every plan."""
    form = pattern.form
    sums = form.results if FactorKind.REDUCTION in form.kinds else ()
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


def lay_out(pattern: OpPattern, choice: Choice) -> OpSharding:
    """The shardings that follow from a choice."""
    form = pattern.form
    factor_axes, wanted = choice

    def sharding(dims: tuple[tuple[int, ...], ...], axes_of: Sequence[tuple[int, ...]] = factor_axes) -> Sharding:
        return tuple([_along(factors, axes_of) for factors in dims])

    pinned = _pin_further if pattern.closed else _pin
    operands = tuple(map(sharding, form.operands))
    if pattern.operand_pins:
        operands = tuple(pinned(at, pin) for at, pin in zip(operands, pattern.operand_pins, strict=True))
    partial = axes_summed_over(form.kinds, factor_axes)
    computed = tuple(map(sharding, form.results))
    shardings = list(computed)
    scattered: list[tuple[int, ...]] = [()] * len(computed)
    reduced: list[int] = []
    for k, places in enumerate(wanted):
        own = list(factor_axes)
        for axis, factor in zip(partial, places, strict=True):
            if factor == NONE:
                reduced.append(axis)
            else:
                own[factor] = (*own[factor], axis)
                scattered[k] = (*scattered[k], axis)
        shardings[k] = sharding(form.results[k], own)
    reduced_to = tuple(shardings)
    if pattern.result_pins:
        shardings = [pinned(at, pin) for at, pin in zip(shardings, pattern.result_pins, strict=True)]
        if pattern.closed:  # a region's results have its boundary shardings
            computed = reduced_to = tuple(shardings)
        if not operands and not partial:  # an argument: it is stored as pinned
            computed = reduced_to = tuple(shardings)
    even = [() if factor in form.uneven else axes for factor, axes in enumerate(factor_axes)]
    cuts = tuple(sharding(dims, even) for dims in form.operands) if form.uneven else None
    all_reduced = tuple(dict.fromkeys(reduced))
    return OpSharding(
        factor_axes, operands, computed, reduced_to, tuple(shardings), all_reduced, tuple(scattered), cuts
    )


def axes_summed_over(kinds: Sequence[FactorKind], factor_axes: FactorAxes) -> list[int]:
    """Axes over which an op's results are partial: those that split its reduction factors, in that order."""
    return [
        axis for kind, axes in zip(kinds, factor_axes, strict=True) if kind is FactorKind.REDUCTION for axis in axes
    ]


def _along(factors: tuple[int, ...], factor_axes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Axes that split a dimension made of these factors."""
    return (
        factor_axes[factors[0]]
        if len(factors) == 1
        else tuple([axis for factor in factors for axis in factor_axes[factor]])
    )


def _pin_further(sharding: Sharding, pin: PinnedSharding | None) -> Sharding:
    """`sharding` with the pinned axes first in each dimension: a manual region splits its shards further."""
    return sharding if pin is None else tuple((*(want or ()), *axes) for axes, want in zip(sharding, pin, strict=True))


def _pin(sharding: Sharding, pin: PinnedSharding | None) -> Sharding:
    """`sharding` with the pinned dimensions replaced; axes used by a pin are removed from the open dimensions."""
    if pin is None:
        return sharding
    taken = {axis for axes in pin if axes is not None for axis in axes}
    return tuple(
        tuple(a for a in axes if a not in taken) if want is None else want
        for axes, want in zip(sharding, pin, strict=True)
    )
