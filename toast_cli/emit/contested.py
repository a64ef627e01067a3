"""Finds values that propagation could shard further than planned.

Enters: a `Program`, a `PartitionedProgram`, and which uses have a constraint. Leaves: the values that need a pin.

A constraint at a use, or an op that computes in another sharding than its operand's, offers its axes to all values that
it touches. If the plan rejects an offer, two shardings compete for the value, and the first to reach it wins. This
depends on the order of ops, and XLA:TPU simplifies the program before it propagates. So every such value is pinned. For
other values no neighbour offers more than the plan gives them: in whatever order Shardy visits the ops, propagation
stops where planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from toast_cli.emit.reshards import Reshard
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding
from toast_cli.program.model import Program, Rule
from toast_cli.program.rematerialised import remade_values

Axes = tuple[int, ...]


def contested_values(
    program: Program, lowered: PartitionedProgram, reshards: Sequence[Reshard], pinned: set[int]
) -> Iterator[int]:
    """Values that some neighbour shards further, or differently. pinned: values that are computed in one sharding and
    continue in another, for which a pin exists already."""
    at_use = {edge: reshard.sharding for reshard in reshards for edge in reshard.edges}
    for reshard in reshards:
        if declines(reshard.start, reshard.steps[0][0]):
            yield reshard.value
    remade = remade_values(program)
    found: dict[tuple[Rule, tuple[Sharding, ...], tuple[bool, ...]], tuple[bool, ...]] = {}
    for number, op in enumerate(program.ops):
        values = (*op.operands, *op.results)
        have = [at_use.get((number, k), lowered.shardings[value]) for k, value in enumerate(op.operands)]
        have += [lowered.path(v)[0] if v in pinned else lowered.shardings[v] for v in op.results]
        key = op.rule, tuple(have), tuple([remade[value] for value in values])
        if key not in found:
            found[key] = declining(*key, lowered.axis_sizes)
        for k, value in enumerate(values):
            if found[key][k] and (number, k) not in at_use:
                yield value


def declining(
    rule: Rule, shardings: Sequence[Sharding], silent: Sequence[bool], axis_sizes: Sequence[int]
) -> tuple[bool, ...]:
    """[operands and results of an op] True for those that another one would shard further. silent: those that make no
    offer: they are recomputed for each use, in the sharding of the others."""
    split = [
        factor_axes(rule, factors, sharding, axis_sizes)
        for factors, sharding in zip((*rule.operands, *rule.results), shardings, strict=True)
    ]
    offers: dict[int, set[Axes]] = {}
    for axes_of, quiet in zip(split, silent, strict=True):
        for factor, axes in axes_of.items():
            if axes and not quiet and factor not in rule.need_replication:
                offers.setdefault(factor, set()).add(axes)
    return tuple(
        any(axes != have[: len(axes)] for factor, have in axes_of.items() for axes in offers.get(factor, ()))
        for axes_of in split
    )


def declines(have: Sharding, offered: Sharding) -> bool:
    """True if a value in one sharding would need further, or different, axes to match the offered one."""
    return any(axes != own[: len(axes)] for own, axes in zip(have, offered, strict=True))


def factor_axes(
    rule: Rule, factors: tuple[tuple[int, ...], ...], sharding: Sharding, axis_sizes: Sequence[int]
) -> dict[int, Axes]:
    """The axes that split each factor of one array, the major factor of a dimension first. Empty for an array inside a
    manual region, which has no sharding."""
    found: dict[int, Axes] = {}
    for dimension, axes in zip(factors, sharding or ((),) * len(factors), strict=True):
        if len(dimension) == 1:  # at any size: the rule of a pad has the operand's size
            found[dimension[0]] = axes
            continue
        left = list(axes)
        for factor in dimension:
            room, own = rule.sizes[factor], list[int]()
            while left and room > 1 and room % axis_sizes[left[0]] == 0:
                room //= axis_sizes[left[0]]
                own.append(left.pop(0))
            found[factor] = tuple(own)
            if room > 1:
                break
    return found
