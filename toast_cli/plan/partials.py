"""Partial sums and the collectives that complete them: which are added before they are reduced, over which axes, and
where.

A value is partial over a mesh axis where its op reduces a dimension which that axis splits: each device holds a term of
it. An all-reduce completes it, or a reduce-scatter where its sharding is to use that axis. Partial values that are
added (see `program.values`) are reduced once, at the end of the sum, if all terms are partial over the same axes, with
the same sharding before and after: `all-reduce(a) + all-reduce(b) = all-reduce(a + b)`. XLA does this where the terms
have no other readers (its all-reduce reassociation). An addition ends the sum if its other side is complete, partial
over other axes, or has to be resharded first. So does a scatter into the other term if both are reduce-scattered,
unless over one axis alone with no all-reduce (see `program.values.scatters_into`).

These rules are pure functions of the shardings of the ops involved. Lowering applies them to every sum of a program,
the incremental evaluator to every kind of sum.
A worked example: the docstring of `toast_cli.plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from math import prod
from typing import NamedTuple

from toast_cli.plan.sharding import (
    OpSharding,
    Sharding,
    axes_of,
    in_mesh_order,
    refines,
    scattered_in,
    shards,
    split_further,
    without,
)
from toast_cli.program.model import Op
from toast_cli.program.ops import CARRY, DOT_GENERAL, REDUCE, REDUCERS
from toast_cli.program.values import Does, Steps

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all-reduce", "reduce-scatter", "all-gather"

Cuts = tuple[tuple[int, ...], ...]  # axes by which uses split a total, ordered by use and dimension


class Partial(NamedTuple):
    """A partial value and the reduction that completes it.

    Attributes:
        sharding: the one it has while it is partial. to: the one it is to have; axes that only `to` has are scattered
            over.
        reduced: axes it is all-reduced over.
    """

    sharding: Sharding
    to: Sharding
    reduced: tuple[int, ...]


class Reduction(NamedTuple):
    """Terms of a sum that one reduction completes.

    Attributes:
        first: index of its first term in the sum's steps. added: index of its last addition; `first` for a single term.
        terms: how many it has. ends_sum: it comprises the whole sum, so that the end of the sum is reduced.
        partial: the partial value at `added`. cut: reduced axes by which uses after `added` split it.
        cut_before: the same for uses before `added`; `partial.to` includes them. into: some addition of a scattered
            value is a scatter into its other operand.
    """

    first: int
    added: int
    terms: int
    ends_sum: bool
    partial: Partial
    cut: Cuts
    cut_before: Cuts
    into: bool

    @property
    def separate(self) -> bool:
        """Whether the partitioner reduces its terms separately; the compiler merges these reductions afterwards."""
        return self.into or bool(self.cut_before)


class CollectiveStep(NamedTuple):
    """One collective that completes a partial value. fraction: of the whole array that its result is on each device.
    before, after: shardings of the value; None where readers that see it through a view determine it."""

    kind: str
    axes: tuple[int, ...]
    fraction: float
    before: Sharding | None
    after: Sharding | None


# -- the reductions of a sum -------------------------------------------------------------------------------------------


class _Open(NamedTuple):
    """A part of a sum that may still grow into a `Reduction`. partial: the partial value at this step; None where it is
    complete. at_addition: the partial value at `added`. viewed: a term is read through a view. The others: see
    `Reduction`."""

    partial: Partial | None
    first: int
    added: int = 0
    at_addition: Partial | None = None
    terms: int = 1
    cut: Cuts = ()
    cut_before: Cuts = ()
    into: bool = False
    viewed: bool = False


def reductions_of(steps: Steps, op_sharding_of: Callable[[int], OpSharding]) -> Iterator[Reduction]:
    """The reductions that complete a sum. op_sharding_of: op sharding of the op of each step."""
    if len(steps) == 1:  # as most are
        yield from _closed(_Open(partial := partial_of(op_sharding_of(steps[0].op)), 0, 0, partial), ends_sum=True)
        return
    waiting: list[_Open] = []
    for place, (does, op) in enumerate(steps):
        op_sharding = op_sharding_of(op)
        if does == "term":
            partial = partial_of(op_sharding)
            waiting.append(_Open(partial, place, place, partial))
            continue
        read = [_read_in(waiting.pop(), op_sharding) for _ in range(1 if does == "view" else 2)]
        (left, _), (right, _) = read[-1], read[0]
        grown = _viewed(left, op_sharding) if does == "view" else _added(left, right, place, op_sharding, does)
        if grown is None:
            for _, ended in read:
                yield from _closed(ended, ends_sum=False)
            grown = _Open(None, read[-1][1].first)
        waiting.append(grown)
    for part in waiting:
        yield from _closed(part, ends_sum=True)


def partial_of(op_sharding: OpSharding, k: int = 0) -> Partial | None:
    """Result k of an op as a partial value; None where it is complete."""
    if not op_sharding.reduced and not op_sharding.scattered[k]:
        return None
    return Partial(op_sharding.computed[k], op_sharding.reduced_to[k], op_sharding.reduced)


def _closed(part: _Open, *, ends_sum: bool) -> Iterator[Reduction]:
    if part.partial is not None and part.at_addition is not None:
        yield Reduction(
            part.first, part.added, part.terms, ends_sum, part.at_addition, part.cut, part.cut_before, part.into
        )


def _read_in(part: _Open, user: OpSharding) -> tuple[_Open | None, _Open]:
    """(the part as the first operand of a use, the part as it is reduced if it ends there). Axes that it is reduced
    over and that also split the operand become reduce-scattered. The first is None if the part is complete or has to be
    resharded as well."""
    partial, required = part.partial, user.operands[0]
    if partial is None or partial.to == required:
        return (part if partial else None), part
    sharding, to, reduced = partial
    over = axes_of(required)
    cut = by_dimension(reduced, user.operands[0]) if axes_of(to) <= over else ()
    ended = part._replace(cut=(*part.cut, *cut))
    if not refines(required, to) or axes_of(required) - axes_of(to) != axes_of(cut):
        return None, ended
    left = tuple([axis for axis in reduced if axis not in axes_of(cut)])
    return ended._replace(partial=Partial(sharding, required, left)), ended


def _viewed(part: _Open | None, op_sharding: OpSharding) -> _Open | None:
    """The part seen through a view; None where the view of a partial value is not split as the value is."""
    if part is None or part.partial is None:
        return None
    sharding, to, reduced = part.partial
    seen, over = op_sharding.shardings[0], axes_of(to).difference(axes_of(sharding))
    before = without(seen, over)
    if axes_of(seen) != axes_of(to) or not refines(seen, before):
        return None
    return part._replace(partial=Partial(before, seen, reduced), viewed=True)


def _added(left: _Open | None, right: _Open | None, place: int, op_sharding: OpSharding, does: Does) -> _Open | None:
    """The sum of both parts; None where they are not partial alike."""
    if left is None or right is None or left.partial is None or right.partial is None:
        return None
    partial, other, needed = left.partial, right.partial, op_sharding.operands
    alike = partial[:2] == other[:2] and sorted(partial.reduced) == sorted(other.reduced)
    if not alike or needed[0] != needed[1] or op_sharding.shardings[0] != partial.to:
        return None
    lands = does == "into" and axes_of(partial.to) != axes_of(partial.sharding)
    over_one_axis = not partial.reduced and len(axes_of(partial.to)) == len(axes_of(partial.sharding)) + 1
    if lands and (left.viewed or right.viewed or not over_one_axis):
        return None
    into, cut = left.into or right.into or lands, (*left.cut_before, *left.cut)
    viewed = left.viewed or right.viewed
    return _Open(partial, left.first, place, partial, left.terms + right.terms, (), cut, into, viewed)


# -- the collectives of a reduction ------------------------------------------------------------------------------------


class Completion(NamedTuple):
    """How a partial value is completed.

    Attributes:
        in_steps: reduce-scattered in steps, not over all axes at once (see `scattered_in_steps`); otherwise a value
            scattered along several dimensions is all-reduced. beside: reduce-scattered over some axes and all-reduced
            over others (see `scattered_beside`). gathers: see `gathers_terms`.
    """

    in_steps: bool
    beside: bool
    gathers: bool


def completion_of(
    op: Op, op_sharding: OpSharding, k: int, sizes: tuple[int, ...], terms: int = 1, *, separate: bool = False
) -> Completion:
    """How partial result k of an op is completed, in a reduction of so many terms. separate: see `Reduction`."""
    beside = scattered_beside(op, 1 if separate else terms, op_sharding, k, sizes)
    return Completion(scattered_in_steps(op, terms, op_sharding, k, sizes), beside, gathers_terms(op))


def completed(partial: Partial, sizes: tuple[int, ...], how: Completion, cut: Cuts = ()) -> Iterator[CollectiveStep]:
    """The collectives that complete a partial value, in order.

    XLA writes one all-reduce over all reduced axes and a slice on each device, and makes a reduce-scatter of both where
    the slice is along one dimension. The all-reduce stays where devices keep the same slice, where slices are along
    several dimensions, and where a slice is sliced again; unless the value is scattered `beside`. XLA:TPU and XLA:GPU
    do so alike (libtpu 0.0.42.1, jaxlib 0.10.2; products, sums of two products, gradients of look-ups and reductions on
    v4-32, v5e-16 and 8 H100).

    Args:
        cut: all-reduced axes by which all readers then split it (see `cut_by_readers`), which makes a reduce-scatter.
    """
    before, to, reduced = partial
    over_dims = [axes for axes in _over(before, to) if axes]
    scattered = tuple([axis for axes in over_dims for axis in axes])
    if how.gathers:
        over = tuple(sorted({*scattered, *reduced}))
        yield CollectiveStep(ALL_GATHER, over, shards((over,), sizes) / shards(before, sizes), before, before)
        return
    cut_axes = axes_of(cut)
    later = tuple(sorted(cut_axes.union(reduced)))
    if scattered and ((later and not how.beside) or (len(over_dims) > 1 and not how.in_steps)):
        yield CollectiveStep(ALL_REDUCE, tuple(sorted({*scattered, *later})), 1 / shards(before, sizes), before, before)
        return
    current, fraction = before, 1 / shards(before, sizes)
    for axes in scattered_in(_over(before, to), sizes) if how.in_steps else [scattered]:
        if axes:
            following, fraction = split_further(current, to, axes), fraction / shards((axes,), sizes)
            yield CollectiveStep(REDUCE_SCATTER, tuple(sorted(axes)), fraction, current, following)
            current = following
    if len(cut) == 1 and cut_axes.issuperset(reduced):
        yield CollectiveStep(REDUCE_SCATTER, later, fraction / shards((later,), sizes), current, None)
    elif later:
        yield CollectiveStep(ALL_REDUCE, later, fraction, current, current)


def in_steps(op: Op) -> bool:
    """Whether a partial result that is added to no others may be reduce-scattered in steps: a contraction's or a
    loop's."""
    return op.kind.matrix_unit or op.name == CARRY


def scattered_in_steps(op: Op, terms: int, op_sharding: OpSharding, k: int, sizes: tuple[int, ...]) -> bool:
    """Whether partial result k of an op is scattered over several axes in two steps (see `sharding.scattered_in`). A
    contraction is not where one step suffices or where it is also all-reduced; a convolution is not along one
    dimension, where XLA would merge both slices into one slice of an all-reduce."""
    if op.name != CARRY and (op_sharding.reduced or in_one_step(op_sharding, k, sizes)):
        return False
    if op.name not in (DOT_GENERAL, CARRY):
        split = [axes for axes in _over(op_sharding.computed[k], op_sharding.reduced_to[k]) if axes]
        if len(split) < 2:
            return False
    return terms == 1 and in_steps(op)


def scattered_beside(op: Op, terms: int, op_sharding: OpSharding, k: int, sizes: tuple[int, ...]) -> bool:
    """Whether partial result k of an op is scattered over some axes before it is all-reduced over others. XLA does so
    for contractions without a constraint, and for loop carries as they are written; it all-reduces a reduction, a
    look-up's gradient and a sum of several terms over all axes, and slices."""
    return terms == 1 and (op.name == CARRY or found_by_partitioner(op, op_sharding, k, sizes))


def in_one_step(op_sharding: OpSharding, k: int, sizes: tuple[int, ...]) -> bool:
    """Whether XLA:TPU reduce-scatters a contraction over all its scattered axes at once: one axis, or several that
    split one dimension in the order in which they split the contracted one, but not the whole mesh. Its partitioner
    treats such axes as one."""
    over = op_sharding.scattered[k]
    if not over:
        return False
    ends = (axes[-len(over) :] for axes in op_sharding.reduced_to[k])
    return len(over) == 1 or (over in ends and shards((over,), sizes) < prod(sizes))


def gathers_terms(op: Op) -> bool:
    """Whether partial results are all-gathered and reduced locally: for reductions with several results (an argmax), or
    with a body that no all-reduce has."""
    return op.name == REDUCE and (len(op.results) > 1 or op.detail not in REDUCERS)


def cut_by_readers(reduced: tuple[int, ...], wanted: Iterable[Sharding], current: Sharding | None = None) -> Cuts:
    """The reduced axes by which all readers split the value alike, per dimension, major to minor: each device keeps one
    shard of the total.

    Args:
        wanted: shardings that its readers require of it, or of a view of it.
        current: its present sharding. Where the readers need such an axis in place of those that now split the
            dimension, the value is resharded, and the axis is not returned.
    """
    different = set(wanted)
    if len(different) != 1:
        return ()
    (sharding,) = different
    moved: set[int] = set()
    if current is not None and len(current) == len(sharding) and not axes_of(current) <= axes_of(sharding):
        for have, want in zip(current, sharding, strict=True):
            if want[: len(have)] != have:
                moved.update(want)
    return by_dimension([axis for axis in reduced if axis not in moved], sharding)


def by_dimension(axes: Collection[int], sharding: Sharding) -> Cuts:
    """Those of `axes` that split an array, per dimension, major to minor; dimensions without any are left out."""
    split = (tuple([axis for axis in dim if axis in axes]) for dim in sharding)
    return tuple([dim for dim in split if dim])


def in_turn(cuts: Iterable[tuple[int, ...]]) -> Cuts:
    """Cuts of several uses in order, with each axis only where it first occurs."""
    left: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for axes in cuts:
        if new := tuple([axis for axis in axes if axis not in seen]):
            left.append(new)
            seen.update(new)
    return tuple(left)


def found_by_partitioner(op: Op, op_sharding: OpSharding, k: int, sizes: tuple[int, ...]) -> bool:
    """Whether a contraction is all-reduced over some axes and scattered over others, and XLA scatters it first if no
    sharding constraint is in between; with one it all-reduces over all these axes, and slices. A contraction that is
    only scattered is constrained: XLA scatters it either way, and without a constraint XLA:TPU makes a slower loop of
    some (see docs/explanation/emitting.md).

    XLA does so for contractions that use every mesh axis and are scattered in one step along a dimension that was
    whole, where the axes of each dimension are in mesh order; otherwise it may all-reduce, gather everything and slice.
    A reduction needs a constraint because its operand is mostly elementwise, and the sharding of the result may spread
    over all of that, depending on the order of propagation. So does a sum, which no single op computes.
    """
    if op.name != DOT_GENERAL or not op_sharding.reduced or not in_one_step(op_sharding, k, sizes):
        return False
    target = op_sharding.shardings[k]
    busy = {axis for axes in op_sharding.factor_axes for axis in axes}
    idle = any(size > 1 and axis not in busy for axis, size in enumerate(sizes))
    return not idle and op_sharding.scattered[k] in target and in_mesh_order(target)


def _over(before: Sharding, to: Sharding) -> list[tuple[int, ...]]:
    """[dimensions] axes that `to` has and `before` has nowhere, in the order in which they split it."""
    there = axes_of(before)
    return [tuple([axis for axis in axes if axis not in there]) for axes in to]
