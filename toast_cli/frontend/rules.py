"""Op rules: Shardy's, read off the attribute it populates, and a small table for ops without a Shardy rule.

In: an MLIR op on which `sdy-populate-op-sharding-rules` has run. Out: a `Rule`, or None for an unknown op. Equal
rules are mostly one object, since later steps look them up once for each op.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from toast_cli import xla
from toast_cli.program.disjoint_set import DisjointSets
from toast_cli.program.model import Op, Program, Rule, ValueFactors
from toast_cli.program.ops import BLOCK_SCALED_DOT, CONVOLUTION, DYNAMIC_UPDATE_SLICE, PAD, RESHAPE, SLICE, kind_of
from toast_cli.xla import ir

# Custom calls that act on the minor dimensions alone; every leading dimension is a batch: target -> minor dimensions.
BATCHED_CUSTOM_CALLS = {
    "ApproxTopK": 1, "PartialReduce": 1, "TopK": 1, "mhlo.topk": 1,
    "Cholesky": 2, "Eigh": 2, "LuDecomposition": 2, "Qr": 2, "ProductOfElementaryHouseholderReflectors": 2,
    "cu_threefry2x32": 0, "erf": 0, "mhlo.erf": 0, "mhlo.acos": 0, "mhlo.acosh": 0, "mhlo.asin": 0, "mhlo.asinh": 0,
    "mhlo.atan": 0, "mhlo.atanh": 0, "mhlo.cosh": 0, "mhlo.sinh": 0,
    "annotate_device_placement": 0, "MoveToHost": 0, "MoveToDevice": 0, "LayoutConstraint": 0,
}  # fmt: skip

# Ops for which Shardy of jaxlib 0.12 states another rule than that of 0.10.
STATED_OTHERWISE = (CONVOLUTION, DYNAMIC_UPDATE_SLICE, PAD, RESHAPE)

Dimension = tuple[int, int]  # value, dimension
_WHOLE = tuple(f"stablehlo.{name}" for name in ("all_gather", "all_to_all", "collective_broadcast", "reduce_scatter"))


@lru_cache(maxsize=4096)
def free_rule(shape: tuple[int, ...]) -> Rule:
    """`()->([i, j, …])`: an op without operands, whose result can have any sharding."""
    return Rule(shape, (), (tuple((d,) for d in range(len(shape))),))


@lru_cache(maxsize=4096)
def identity_rule(shape: tuple[int, ...], operands: int, results: int) -> Rule:
    """`([i, j], …)->([i, j], …)`: elementwise."""
    factors = tuple((d,) for d in range(len(shape)))
    return Rule(shape, (factors,) * operands, (factors,) * results)


@lru_cache(maxsize=4096)
def replicated_rule(operand_ranks: tuple[int, ...], result_ranks: tuple[int, ...]) -> Rule:
    """No factors: every operand and result must be replicated."""
    return Rule((), tuple(((),) * rank for rank in operand_ranks), tuple(((),) * rank for rank in result_ranks))


def batched_rule(operands: list[tuple[int, ...]], results: list[tuple[int, ...]], minor: int) -> Rule | None:
    """Leading dimensions are batch dimensions, the last `minor` ones are unsharded; None if the leading ones differ."""
    batch = operands[0][: len(operands[0]) - minor]

    def factors(shape: tuple[int, ...]) -> ValueFactors:
        return tuple((d,) if d < len(batch) else () for d in range(len(shape)))

    if any(shape[: len(batch)] != batch for shape in operands + results):
        return None
    return Rule(batch, tuple(map(factors, operands)), tuple(map(factors, results)))


def table_rule(name: str, target: str, operands: list[tuple[int, ...]], results: list[tuple[int, ...]]) -> Rule | None:
    """The rule of an op without a Shardy rule; None if this table does not have it either.

    Args:
        name: dialect name. target: a custom call's target, else empty.
        operands, results: shapes in elements.
    """
    kind = kind_of(name)
    if kind.source:
        return free_rule(results[0])
    if kind.replicated:
        return replicated_rule(tuple(map(len, operands)), tuple(map(len, results)))
    same_shape = len(set(operands) | set(results)) == 1
    if kind.elementwise and same_shape:
        return identity_rule(results[0], len(operands), len(results))
    if name == "chlo.top_k":
        return batched_rule(operands, results, 1)
    if target == BLOCK_SCALED_DOT:
        return block_scaled_rule(operands, results)
    if name == "stablehlo.custom_call" and target in BATCHED_CUSTOM_CALLS and operands and results:
        return batched_rule(operands, results, BATCHED_CUSTOM_CALLS[target])
    return None


def block_scaled_rule(operands: list[tuple[int, ...]], results: list[tuple[int, ...]]) -> Rule | None:
    """`([b, m, k s], [b, n, k s], [b, m, k], [b, n, k])->([b, m, n]) reduction={k}`: a product of numbers with one
    scale per s of them (`jax.nn.scaled_matmul`); the second scales may be missing. None for other shapes."""
    (*batch, rows, summed), (*others, columns, too), *scales = operands
    blocks = scales[0][-1] if scales and scales[0] else 0
    expected = [(*batch, rows, blocks), (*batch, columns, blocks)]
    fits = blocks and summed % blocks == 0 and results == [(*batch, rows, columns)] and 1 <= len(scales) <= 2
    if not fits or (others, too) != (batch, summed) or scales != expected[: len(scales)]:
        return None
    leading = tuple((d,) for d in range(len(batch)))
    m, n, k, s = range(len(batch), len(batch) + 4)
    products = ((*leading, (m,), (k, s)), (*leading, (n,), (k, s)))
    scaled = ((*leading, (m,), (k,)), (*leading, (n,), (k,)))[: len(scales)]
    sizes = (*batch, rows, columns, blocks, summed // blocks)
    return Rule(sizes, products + scaled, ((*leading, (m,), (n,)),), frozenset((k,)), frozenset((s,)))


class ShardyRules:
    """Reads Shardy's rule attributes; equal attributes give the same `Rule` object."""

    def __init__(self) -> None:
        self._rules: dict[Any, Rule] = {}

    def read(self, attribute: Any) -> Rule:
        rule = self._rules.get(attribute)
        if rule is None:
            rule = self._rules[attribute] = _whole_where_alone(
                Rule(*xla.sharding_rule(attribute)), xla.is_custom_rule(attribute)
            )
        return rule


@lru_cache(maxsize=4096)
def partitioner_rule(rule: Rule, name: str, operand: tuple[int, ...], result: tuple[int, ...]) -> Rule:
    """The rule that Shardy states for an op, as in jaxlib 0.10: what XLA's partitioner can split.

    Shardy of jaxlib 0.12 also marks as permutation a shift by a pad, an update of part of an array, and a convolution
    window along no dimension of the image; and it needs dimensions of size 1 that a reshape adds or drops unsharded.
    operand, result: shapes of the first ones.
    """
    need, permuted, sizes = rule.need_replication, rule.permutation, rule.sizes
    if name == RESHAPE:
        need = frozenset(factor for factor in need if sizes[factor] > 1)
    elif name == PAD:
        same = (f for f, before, after in zip(rule.results[0], operand, result, strict=True) if before == after)
        permuted = permuted.difference(*same)
    elif name == DYNAMIC_UPDATE_SLICE:
        need, permuted = need | permuted.difference(*rule.results[0]), frozenset()
    elif name == CONVOLUTION:
        counts = Counter(factor for dims in (*rule.operands, *rule.results) for one in dims for factor in one)
        permuted = frozenset(factor for factor in permuted if counts[factor] > 1)
        sizes = tuple(1 if f in rule.permutation - permuted else size for f, size in enumerate(sizes))
    return replace(rule, sizes=sizes, need_replication=need, permutation=permuted)


def concatenation_rule(rule: Rule, concatenation: Any) -> Rule:
    """The rule of a concatenation. Shardy marks the dimension as permutation for all slices of one array; XLA sends
    shards (collective-permute) only if that rotates the array (`jnp.roll`), and otherwise reshards twice. In that case
    the dimension must be unsharded."""
    return rule if not rule.permutation or is_rotation(concatenation) else _whole_where_permuted(rule)


@lru_cache(maxsize=4096)
def _whole_where_permuted(rule: Rule) -> Rule:
    return replace(rule, need_replication=rule.need_replication | rule.permutation, permutation=frozenset())


@lru_cache(maxsize=4096)
def bitwise_reduction_rule(rule: Rule) -> Rule:
    """The rule of a reduction of integers by `and`, `or` or `xor`: the reduced dimension must be unsharded. Neither
    XLA:CPU nor XLA:GPU has such an all-reduce, except for booleans."""
    return replace(rule, need_replication=rule.need_replication | rule.reduction, reduction=frozenset())


def is_rotation(concatenation: Any) -> bool:
    """True if a concatenation puts the end of an array in front of its beginning."""
    if len(concatenation.operands) != 2:
        return False
    end, begin = (operand.owner for operand in concatenation.operands)
    if any(isinstance(part, ir.Block) or part.name != SLICE for part in (end, begin)):
        return False
    dim = int(concatenation.attributes["dimension"].value)
    array = end.operands[0]
    first, start = (int(part.attributes["start_indices"][dim]) for part in (end, begin))
    last, stop = (int(part.attributes["limit_indices"][dim]) for part in (end, begin))
    whole = array.type.shape[dim]
    lengths = [part.results[0].type.shape[dim] for part in (end, begin)]
    return bool(
        begin.operands[0] == array
        and (last, start) == (whole, 0)
        and first == stop
        and lengths == [whole - first, first]  # no strides
    )


def _whole_where_alone(rule: Rule, custom: bool) -> Rule:
    """Completes a custom call's own rule: a dimension that operands and results do not share must be unsharded."""
    if not custom:
        return rule
    read, made = (
        {f for dims in arrays for factors in dims for f in factors} for arrays in (rule.operands, rule.results)
    )
    return replace(rule, need_replication=rule.need_replication | (read ^ made))


def region_rule(body: Program) -> Rule:
    """The rule of a region. A dimension sharded over manual axes is longer outside than its factor."""
    dimensions: DisjointSets[Dimension] = DisjointSets()
    whole: set[Dimension] = set()
    for op in body.ops:
        for dims in _factors(op).values():
            for dimension in dims[1:]:
                dimensions.union(dims[0], dimension)
        whole.update(_needed_whole(op))
    blocked = {dimensions.find(dimension) for dimension in whole} | _twice(body, dimensions)
    inside = [argument.value for argument in body.arguments], [result.value for result in body.results]
    numbers: dict[Dimension, int] = {}
    sizes: list[int] = []

    def factors(value: int) -> ValueFactors:
        found: list[tuple[int, ...]] = []
        for d, size in enumerate(body.values[value].shape):
            name = dimensions.find((value, d))
            if name in blocked or size == 1:
                found.append(())
                continue
            number = numbers.setdefault(name, len(sizes))
            if number == len(sizes):
                sizes.append(size)
            found.append((number,) if sizes[number] == size else ())
        return tuple(found)

    come, leave = (tuple(map(factors, values)) for values in inside)
    return Rule(tuple(sizes), come, leave)


def _arrays(op: Op) -> Iterator[tuple[int, ValueFactors]]:
    yield from zip(op.operands, op.rule.operands, strict=True)
    yield from zip(op.results, op.rule.results, strict=True)


def _factors(op: Op) -> dict[int, list[Dimension]]:
    """Factor of an op -> the dimensions of which it is all or the major part."""
    found: dict[int, list[Dimension]] = defaultdict(list)
    for value, dims in _arrays(op):
        for d, factors in enumerate(dims):
            if factors:
                found[factors[0]].append((value, d))
    return found


def _needed_whole(op: Op) -> Iterator[Dimension]:
    """Dimensions along which an op cannot be split, and minor parts of others. XLA gathers the operands of collectives
    along further axes."""
    rule = op.rule
    if op.name in _WHOLE:
        yield from ((value, d) for value, dims in _arrays(op) for d in range(len(dims)))
    stuck = rule.need_replication | rule.permutation
    minor = {factor for _, dims in _arrays(op) for factors in dims for factor in factors[1:]}
    for value, dims in _arrays(op):
        for d, factors in enumerate(dims):
            if not factors or not stuck.isdisjoint(factors) or factors[0] in minor:
                yield value, d


def _twice(body: Program, dimensions: DisjointSets[Dimension]) -> set[Dimension]:
    """Dimension classes that occur twice in one array."""
    found: set[Dimension] = set()
    for value, array in enumerate(body.values):
        names = [dimensions.find((value, d)) for d in range(len(array.shape))]
        found.update(_repeated(names))
    return found


def _repeated(names: Iterable[Dimension]) -> Iterator[Dimension]:
    seen = set()
    for name in names:
        if name in seen:
            yield name
        seen.add(name)
