"""Chooses shardings of one op's arrays with which every device can compute its part alone.

A factor of the op's rule is split by the same mesh axes in every array that has it. Splitting a factor that all results
have needs no communication; splitting a contracted factor makes the results partial. Factors of any other kind can be
split only if the op's own local rule supports it.

In: a rule, the operands' shardings, and the results' wanted shardings. Out: an `Alignment`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from toast_cli.plan.sharding import Sharding
from toast_cli.program.model import Rule, ValueFactors

FactorAxes = dict[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Alignment:
    """operands, results: sharding of each array. axes: factor -> mesh axes that split it. partial: axes over which the
    results are partial."""

    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    axes: FactorAxes
    partial: tuple[int, ...]


@lru_cache(maxsize=20_000)
def align(
    rule: Rule,
    operands: tuple[Sharding, ...],
    results: tuple[Sharding, ...],
    sizes: tuple[int, ...],
    splits: frozenset[int] = frozenset(),
    keeps: frozenset[int] = frozenset(),
) -> Alignment:
    """The feasible split that is nearest to `operands` and `results`.

    Args:
        rule: of the op. operands: their shardings. results: their wanted shardings. sizes: of the mesh axes.
        splits: factors that the rule calls whole, or permuted, and that can be split nevertheless. keeps: others that
            must not be split.
    """
    made = {factor for dims in rule.results for factors in dims for factor in factors}
    alone = frozenset(range(len(rule.sizes))) - made - rule.reduction  # splitting such a factor has no defined meaning
    whole = (rule.need_replication | rule.permutation | keeps | alone) - splits
    axes: FactorAxes = {}
    spent: set[int] = set()
    for factors, sharding in zip((*rule.results, *rule.operands), (*results, *operands), strict=True):
        for factor, found in factor_axes(factors, sharding, rule.sizes, sizes).items():
            if found and factor not in whole and factor not in axes and not spent & set(found):
                axes[factor] = found
                spent |= set(found)
    arrays = (*rule.operands, *rule.results)
    while stuck := next(filter(None, (_stuck(factors, axes, rule.sizes, sizes) for factors in arrays)), None):
        for factor in stuck:
            del axes[factor]
    in_shardings = tuple(_sharding(factors, axes) for factors in rule.operands)
    out_shardings = tuple(_sharding(factors, axes) for factors in rule.results)
    partial = tuple([a for factor in sorted(rule.reduction & axes.keys() - made) for a in axes[factor]])
    return Alignment(in_shardings, out_shardings, axes, partial)


def factor_axes(
    dims: ValueFactors, sharding: Sharding, factor_sizes: tuple[int, ...], sizes: tuple[int, ...]
) -> FactorAxes:
    """Factor -> the axes that split it in one array, the major factor of a dimension first; factors behind one that is
    not split completely are left out. Empty for an array inside a manual region, which has no sharding."""
    found: FactorAxes = {}
    for factors, axes in zip(dims, sharding or ((),) * len(dims), strict=True):
        if len(factors) == 1:  # at any size: the rule of a pad has the operand's size
            found[factors[0]] = axes
            continue
        waiting = list(axes)
        for factor in factors:
            left, own = factor_sizes[factor], list[int]()
            while waiting and left % sizes[waiting[0]] == 0:
                left //= sizes[waiting[0]]
                own.append(waiting.pop(0))
            found[factor] = tuple(own)
            if left > 1:
                break
    return found


def _stuck(dims: ValueFactors, axes: FactorAxes, factor_sizes: tuple[int, ...], sizes: tuple[int, ...]) -> list[int]:
    """Factors that cannot be split in this array, because a major factor of their dimension is not split completely."""
    found = []
    for factors in dims:
        ended = False
        for factor in factors:
            own = axes.get(factor, ())
            if ended and own:
                found.append(factor)
            ended = ended or factor_sizes[factor] > prod(sizes[axis] for axis in own)
    return found


def _sharding(dims: ValueFactors, axes: FactorAxes) -> Sharding:
    """The sharding of an array with these factors."""
    return tuple(tuple(axis for factor in factors for axis in axes.get(factor, ())) for factors in dims)
