"""Values that propagation could take further than the plan says.

Enters: a `Program`, a `PartitionedProgram`, and which uses have a constraint. Leaves: the values that need a pin.

A constraint at a use, or an op that computes in another sharding than an operand has, offers its axes to every value
that it touches. Where the plan declines an offer, two shardings compete for the value, and the one that reaches it
first wins. Which one that is depends on the order of ops, and XLA:TPU simplifies the program before it propagates. So
every such value is pinned. Of any other value all neighbours offer no more than the plan gives it: in whatever order
Shardy visits the ops, nothing gets further than planned.
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
    """Values of which some neighbour has a dimension split further, or otherwise. pinned: values that are computed in
    one sharding and go on in another, which a pin says already."""
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
    """Of an op's operands and results [each a sharding], those that another one would split further. silent: those that
    have no say: they are made anew for each use, and lie as the others do."""
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
    """Whether a value in one sharding would have to be split further, or otherwise, to be in the other as well."""
    return any(axes != own[: len(axes)] for own, axes in zip(have, offered, strict=True))


def factor_axes(
    rule: Rule, factors: tuple[tuple[int, ...], ...], sharding: Sharding, axis_sizes: Sequence[int]
) -> dict[int, Axes]:
    """The axes that split each factor of one array, the major factor of a dimension first. None of an array that is
    hidden in a region, which has no sharding."""
    found: dict[int, Axes] = {}
    for dimension, axes in zip(factors, sharding or ((),) * len(factors), strict=True):
        if len(dimension) == 1:  # however long the array is there: a padding's rule has the operand's length
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
