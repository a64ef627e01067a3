"""Enumerates every op sharding of an op pattern on a mesh, whether or not decisions lead to it.

In: an `OpPattern` and the sizes of mesh axes. Out: `OpSharding`s. Their number grows with the orders of the axes
and their assignments to factors, so only small ops and meshes have few.
"""

from __future__ import annotations

from itertools import permutations, product
from math import prod

from toast_cli.dimensions.model import FactorKind, Form
from toast_cli.plan.axis_assignment import without_split_space
from toast_cli.plan.decisions import NONE
from toast_cli.plan.op_sharding import FactorAxes, OpPattern, OpSharding, axes_summed_over, lay_out


def every_op_sharding(pattern: OpPattern, sizes: tuple[int, ...]) -> list[OpSharding]:
    """All op shardings of a pattern, each once."""
    form = pattern.form
    found: dict[OpSharding, None] = {}
    for split in _every_split(form, sizes, pattern.closed):
        factor_axes = split if pattern.space is None else without_split_space(pattern.space, split, sizes)
        partial = axes_summed_over(form.kinds, factor_axes)
        factors = (
            [(NONE, *(factor for factors in dims for factor in factors)) for dims in form.results] if partial else []
        )
        for wanted in product(*(tuple(product(of, repeat=len(partial))) for of in factors)):
            if all(
                _can_scatter(form, factor_axes, partial, dims, to, sizes)
                for dims, to in zip(form.results, wanted, strict=False)
            ):
                found[lay_out(pattern, (factor_axes, wanted))] = None
    return list(found)


def _every_split(form: Form, sizes: tuple[int, ...], closed: frozenset[int]) -> list[FactorAxes]:
    """All ways in which mesh axes can split an op: shards divide, and a minor factor is split where its majors are
    fully split.
    """
    axes = [axis for axis, size in enumerate(sizes) if size > 1 and axis not in closed]
    found: dict[FactorAxes, None] = {}
    for order in permutations(axes):
        for places in product((NONE, *range(len(form.sizes))), repeat=len(order)):
            split: list[tuple[int, ...]] = [()] * len(form.sizes)
            for axis, factor in zip(order, places, strict=True):
                if factor != NONE:
                    split[factor] = (*split[factor], axis)
            if _is_legal(form, [prod(sizes[a] for a in of) for of in split]):
                found[tuple(split)] = None
    return list(found)


def _is_legal(form: Form, shards: list[int]) -> bool:
    return all(
        form.kinds[factor] is not FactorKind.BLOCKED
        and not any(extent % count for extent in form.extents[factor])
        and all(shards[major] == form.sizes[major] for major in form.majors[factor])
        for factor, count in enumerate(shards)
        if count > 1
    )


def _can_scatter(
    form: Form,
    factor_axes: FactorAxes,
    partial: list[int],
    dims: tuple[tuple[int, ...], ...],
    wanted: tuple[int, ...],
    sizes: tuple[int, ...],
) -> bool:
    """Whether a result that is partial over these axes can be scattered over them on these factors."""
    shards = [prod(sizes[a] for a in axes) for axes in factor_axes]
    for axis, factor in zip(partial, wanted, strict=True):
        if factor != NONE:
            shards[factor] *= sizes[axis]
    return all(
        factor not in wanted
        or (
            not any(extent % shards[factor] for extent in form.extents[factor])
            and all(shards[major] == form.sizes[major] for major in factors[:place])
        )
        for factors in dims
        for place, factor in enumerate(factors)
    )
