"""Facts about one op that depend on its attributes: its sharding rule (Shardy's, or one from a small table), its
arithmetic, the windows it reads, and the groups of a ragged product.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log2, prod
from typing import Any

import numpy as np

from toast_cli import xla
from toast_cli.program.model import Op, Program, Rule, ValueFactors, Window
from toast_cli.program.ops import (
    BLOCK_SCALED_DOT,
    CONVOLUTION,
    CUSTOM_CALL,
    DYNAMIC_UPDATE_SLICE,
    PAD,
    RAGGED_DOT,
    RESHAPE,
    SCATTER,
    kind_of,
)
from toast_cli.program.values import DisjointSets
from toast_cli.xla import call_target, create, ir

# ---------------------------------------------------------------- sharding rules
# Op rules: Shardy's, read off the attribute it populates, and a small table for ops without a Shardy rule.
#
# Equal rules are mostly one object, since later steps look them up once for each op.

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
    if name == CUSTOM_CALL and target in BATCHED_CUSTOM_CALLS and operands and results:
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
        if attribute not in self._rules:
            rule = Rule(*xla.sharding_rule(attribute))
            if xla.is_custom_rule(attribute):  # what its operands and results do not share must be unsharded
                sides = rule.operands, rule.results
                read, written = ({f for dims in side for factors in dims for f in factors} for side in sides)
                rule = replace(rule, need_replication=rule.need_replication | (read ^ written))
            self._rules[attribute] = rule
        return self._rules[attribute]


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
        counts = Counter(factor for dims in (*rule.operands, *rule.results) for factors in dims for factor in factors)
        permuted = frozenset(factor for factor in permuted if counts[factor] > 1)
        sizes = tuple(1 if f in rule.permutation - permuted else size for f, size in enumerate(sizes))
    return replace(rule, sizes=sizes, need_replication=need, permutation=permuted)


@lru_cache(maxsize=4096)
def concatenation_rule(rule: Rule) -> Rule:
    """The rule of a concatenation: its dimension must be unsharded. Shardy marks it as permutation for all slices of
    one array; XLA sends shards (collective-permute) only if that rotates the array by half, and else reshards twice."""
    return replace(rule, need_replication=rule.need_replication | rule.permutation, permutation=frozenset())


@lru_cache(maxsize=4096)
def bitwise_reduction_rule(rule: Rule) -> Rule:
    """The rule of a reduction of integers by `and`, `or` or `xor`: the reduced dimension must be unsharded. Neither
    XLA:CPU nor XLA:GPU has such an all-reduce, except for booleans."""
    return replace(rule, need_replication=rule.need_replication | rule.reduction, reduction=frozenset())


def region_rule(body: Program) -> Rule:
    """The rule of a region. A dimension sharded over manual axes is longer outside than its factor."""
    dimensions: DisjointSets[Dimension] = DisjointSets()
    unsharded: set[Dimension] = set()
    for op in body.ops:
        for dims in _factors(op).values():
            for dimension in dims[1:]:
                dimensions.union(dims[0], dimension)
        unsharded.update(_unsplittable(op))
    blocked = {dimensions.find(dimension) for dimension in unsharded}
    for value, array in enumerate(body.values):  # classes that occur twice in one array
        count = Counter(dimensions.find((value, d)) for d in range(len(array.shape)))
        blocked.update(name for name, times in count.items() if times > 1)
    inside = [argument.value for argument in body.arguments], [result.value for result in body.results]
    numbers: dict[Dimension, int] = {}
    sizes: list[int] = []

    def factors(value: int) -> ValueFactors:
        dims: list[tuple[int, ...]] = []
        for d, size in enumerate(body.values[value].shape):
            name = dimensions.find((value, d))
            if name in blocked or size == 1:
                dims.append(())
                continue
            number = numbers.setdefault(name, len(sizes))
            if number == len(sizes):
                sizes.append(size)
            dims.append((number,) if sizes[number] == size else ())
        return tuple(dims)

    come, leave = (tuple(map(factors, values)) for values in inside)
    return Rule(tuple(sizes), come, leave)


def _arrays(op: Op) -> Iterator[tuple[int, ValueFactors]]:
    yield from zip(op.operands, op.rule.operands, strict=True)
    yield from zip(op.results, op.rule.results, strict=True)


def _factors(op: Op) -> dict[int, list[Dimension]]:
    """Factor of an op -> the dimensions of which it is all or the major part."""
    dimensions: dict[int, list[Dimension]] = defaultdict(list)
    for value, dims in _arrays(op):
        for d, factors in enumerate(dims):
            if factors:
                dimensions[factors[0]].append((value, d))
    return dimensions


def _unsplittable(op: Op) -> Iterator[Dimension]:
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


# ---------------------------------------------------------------- arithmetic
# Arithmetic operations of one op, on unsharded shapes, as XLA's HloCostAnalysis counts them (a multiply-add is 2).
#
# Data movement counts 0.

Shape = tuple[int, ...]

# Elementwise ops that take several vector operations per element: a TPU's extended unary unit takes one register a
# cycle beside four arithmetic units, a GPU has 16 special function units for 128 f32 lanes. They matter only if such
# ops outweigh memory traffic, which is rare.
SLOW = 4.0

# Factorizations that StableHLO leaves to libraries (LAPACK, cuSOLVER, XLA's own for TPUs): arithmetic operations over
# m n min(m, n) of an m x n matrix, vectors included (Golub, Van Loan, Matrix Computations, 4th edition).
_FACTORIZATION = re.compile(
    r"(?:lapack|cusolver|cublas|hipsolver|hipblas|magma)_[a-z]*?(potrf|getrf|geqrf|orgqr|ungqr|sytrd|hetrd|gehrd|syev|"
    r"heev|gesdd|gesvd|geev|gees|trsm)|(Cholesky|LuDecomposition|Qr|ProductOfElementaryHouseholderReflectors|Eigh)$"
)
_RATIOS = {
    "potrf": 1 / 3, "Cholesky": 1 / 3, "getrf": 2 / 3, "LuDecomposition": 2 / 3, "geqrf": 4 / 3, "orgqr": 4 / 3,
    "ungqr": 4 / 3, "Qr": 4 / 3, "ProductOfElementaryHouseholderReflectors": 4 / 3, "sytrd": 10 / 3, "hetrd": 10 / 3,
    "gehrd": 10 / 3, "syev": 9.0, "heev": 9.0, "Eigh": 9.0, "gesdd": 26.0, "gesvd": 26.0, "geev": 25.0, "gees": 25.0,
}  # fmt: skip


def op_flops(op: Any, name: str, operands: list[Shape], results: list[Shape], rule: Rule) -> float:
    """Arithmetic operations of one execution of `op`. name: of the op, or of a custom call's target."""
    if name == CUSTOM_CALL:
        return library_flops(call_target(op), operands)
    kind = kind_of(name)
    if not results or kind.computes_nothing:
        return 0.0
    out = float(prod(results[0]))
    if name == RAGGED_DOT:
        return ragged_flops(op, rule)
    if kind.contraction:
        return 2.0 * prod(rule.sizes)
    if kind.convolution:
        return convolution_flops(op, operands, results[0])
    if name == "stablehlo.reduce_window":
        return out * float(prod(op.attributes["window_dimensions"]))
    if kind.reduction:
        return float(prod(operands[0]))
    if name == SCATTER:
        return float(prod(operands[-1]))
    if name in ("stablehlo.sort", "chlo.top_k"):
        elements = float(prod(operands[0]))
        return elements * max(1.0, log2(max(2.0, elements)))
    if name == "stablehlo.fft":
        return 5.0 * out * log2(max(2, prod(op.attributes["fft_length"])))
    if name in ("stablehlo.cholesky", "stablehlo.triangular_solve"):
        return out * operands[0][-1]
    return SLOW * out if kind.transcendental or kind.division else out


def library_flops(target: str, operands: list[Shape]) -> float:
    """Arithmetic operations of a library's factorization or triangular solve; 0 for other custom calls.

    Args:
        operands: the first is [..., m, n]; of a triangular solve [..., n, n], and the second the right-hand sides.
    """
    match = _FACTORIZATION.match(target)
    if match is None or not operands or len(operands[0]) < 2:
        return 0.0
    name, (*batch, m, n) = match[match.lastindex or 0], operands[0]
    if name == "trsm":
        return float(n * prod(operands[1]))
    return _RATIOS[name] * prod(batch) * m * n * min(m, n)


def convolution_flops(op: Any, operands: list[Shape], result: Shape) -> float:
    """2 x batch x output features x input features per group x valid (output, kernel) position pairs per spatial
    dimension.
    """
    _, rhs, out = convolution_dims(op)
    features = operands[1][rhs.index("i")]
    flops = 2.0 * result[out.index("b")] * result[out.index("f")] * features
    for window in convolution_windows(op, operands, result):
        flops *= _valid_pairs(window)
    return flops


def _valid_pairs(window: Window) -> int:
    """Pairs (output position, kernel position) of one spatial dimension that read a real element, not padding or a
    hole.
    """
    pairs = window.outputs * window.size
    if pairs > 4_000_000:  # a window as wide as the array: counting pair by pair is too slow
        return pairs // window.dilation
    starts = np.arange(window.outputs)[:, None] * window.stride - window.low
    places = starts + np.arange(window.size)[None, :] * window.spread
    inside = (places >= 0) & (places < (window.inputs - 1) * window.dilation + 1) & (places % window.dilation == 0)
    return int(np.count_nonzero(inside))


# ---------------------------------------------------------------- windows
# Reads windows: which elements of the operand an element of a convolution, a pooling, a slice or a pad depends on.

_DIM_NUMBERS = re.compile(r"#stablehlo\.conv<\[(.*?)\]x\[(.*?)\]->\[(.*?)\]>")


def windows_of(op: Any, name: str, operands: list[Shape], results: list[Shape]) -> tuple[Window, ...]:
    """The windows of an op; empty for an op of another kind."""
    if name not in _READERS:
        return ()
    windows = _READERS[name](op, operands, results[0])
    return tuple(w for w in windows if (w.inputs, w.size, w.stride, w.low, w.dilation) != (w.outputs, 1, 1, 0, 1))


def convolution_dims(op: Any) -> tuple[list[str], list[str], list[str]]:
    """Dimensions of image, kernel and result of a convolution, in order: b, f, i, o, or the number of a spatial one."""
    match = _DIM_NUMBERS.search(str(op.attributes["dimension_numbers"]))
    lhs, rhs, out = ([d.strip() for d in text.split(",")] for text in match.groups())  # type: ignore[union-attr]
    return lhs, rhs, out


def _integers(op: Any, key: str, default: list[int]) -> list[int]:
    """A list of integers, row by row; a default if the attribute is missing."""
    if key not in op.attributes:
        return default
    attribute = op.attributes[key]
    return [int(x) for x in (np.array(attribute).ravel() if key == "padding" else attribute)]


def convolution_windows(op: Any, operands: list[Shape], result: Shape) -> list[Window]:
    lhs, rhs, out = convolution_dims(op)
    spatial = [d for d in out if d.isdigit()]
    ones = [1] * len(spatial)
    strides, dilations, spreads = (_integers(op, k, ones) for k in ("window_strides", "lhs_dilation", "rhs_dilation"))
    low = _integers(op, "padding", [0] * 2 * len(spatial))[::2]
    windows = []
    for n, d in enumerate(spatial):
        i, k, o = lhs.index(d), rhs.index(d), out.index(d)
        sizes = operands[0][i], result[o], operands[1][k]
        windows.append(Window(i, o, *sizes, strides[n], low[n], dilations[n], spreads[n], kernel_dim=k))
    return windows


def _pooling(op: Any, operands: list[Shape], result: Shape) -> list[Window]:
    """Windows of a pooling, or of a select-and-scatter, whose windows choose where each element of its source goes."""
    rank = len(operands[0])
    outputs = operands[1] if op.name == "stablehlo.select_and_scatter" else result
    ones = [1] * rank
    names = ("window_dimensions", "window_strides", "base_dilations", "window_dilations")
    size, stride, dilation, spread = (_integers(op, key, ones) for key in names)
    low = _integers(op, "padding", [0] * 2 * rank)[::2]
    return [
        Window(d, d, operands[0][d], outputs[d], size[d], stride[d], low[d], dilation[d], spread[d])
        for d in range(rank)
    ]


def _slice(op: Any, operands: list[Shape], result: Shape) -> list[Window]:
    starts, strides = (_integers(op, key, []) for key in ("start_indices", "strides"))
    return [Window(d, d, operands[0][d], result[d], 1, strides[d], -starts[d]) for d in range(len(result))]


def _pad(op: Any, operands: list[Shape], result: Shape) -> list[Window]:
    low, holes = (_integers(op, key, []) for key in ("edge_padding_low", "interior_padding"))
    return [Window(d, d, operands[0][d], result[d], 1, 1, low[d], holes[d] + 1) for d in range(len(result))]


_READERS: dict[str, Callable[[Any, list[Shape], Shape], list[Window]]] = {
    "stablehlo.convolution": convolution_windows,
    "stablehlo.reduce_window": _pooling,
    "stablehlo.select_and_scatter": _pooling,
    "stablehlo.slice": _slice,
    "stablehlo.pad": _pad,
}


# ---------------------------------------------------------------- ragged products
# Products of ragged groups (`chlo.ragged_dot`): their dimension numbers and sharding rule.
#
# Consecutive rows belong to groups; `group_sizes` states how many rows each group has. The ragged dimension is one of
# three kinds (as in `jax.lax.ragged_dot_general`):
# * not contracted: `[m, k] x [g, k, n] -> [m, n]`, each row with the matrix of its group (a mixture of experts);
# * contracted: `[m, k] x [m, n] -> [g, k, n]`, a product for each group (the gradient of the experts' weights);
# * a batch dimension: `[b, m, k] x [b, k, n] -> [b, m, n]`.
#
# Groups are a factor like any other: a device that has the matrices of some groups computes the rows of these, so the
# result is a partial sum, as it is along `k`.

Dims = tuple[int, ...]
NUMBERS = "ragged_dot_dimension_numbers"


@dataclass(frozen=True)
class RaggedDot:
    """Dimension numbers. left, right: of the two operands. ragged: the left operand's dimension of rows. group: the
    right operand's dimension of groups, or -1. rank: of the left operand."""

    left_batch: Dims
    right_batch: Dims
    left_contracting: Dims
    right_contracting: Dims
    ragged: int
    group: int
    rank: int

    @property
    def contracts_rows(self) -> bool:
        return self.ragged in self.left_contracting

    @property
    def left_free(self) -> Dims:
        """Dimensions that only the left operand and the result have."""
        return tuple(d for d in range(self.rank) if d not in self.left_batch + self.left_contracting)

    @property
    def right_ragged(self) -> int:
        """The right operand's dimension of rows; -1 if it has none."""
        for left, right in ((self.left_contracting, self.right_contracting), (self.left_batch, self.right_batch)):
            if self.ragged in left:
                return right[left.index(self.ragged)]
        return -1

    @property
    def result_ragged(self) -> int:
        """The result's dimension of rows, if these are not contracted."""
        return (self.left_batch + self.left_free).index(self.ragged)

    @property
    def prefix(self) -> Dims:
        """Dimensions of the left operand that `group_sizes` has in front of the groups, if any."""
        if self.ragged in self.left_batch:
            return self.left_batch[: self.left_batch.index(self.ragged)]
        others = self.left_contracting if self.contracts_rows else self.left_free
        return self.left_batch + others[: others.index(self.ragged)]


def ragged_dot(operation: Any) -> RaggedDot | None:
    """The dimension numbers of a `chlo.ragged_dot`; None for numbers that do not fit its arrays."""
    text = str(operation.attributes[NUMBERS])

    def dims(name: str) -> Dims:
        match = re.search(rf"\b{name}_dimensions = \[([^\]]*)\]", text)
        return tuple(int(n) for n in match[1].split(",") if n.strip()) if match else ()

    left, right, sizes = (tuple(operand.type.shape) for operand in operation.operands)
    ragged, group = dims("lhs_ragged"), dims("rhs_group")
    numbers = RaggedDot(
        dims("lhs_batching"), dims("rhs_batching"), dims("lhs_contracting"), dims("rhs_contracting"),
        ragged[0] if ragged else -1, group[0] if group else -1, len(left),
    )  # fmt: skip
    lefts, rights = (
        numbers.left_batch + numbers.left_contracting,
        numbers.right_batch + numbers.right_contracting + group,
    )
    fits = (
        len(ragged) == 1
        and len(group) == (ragged[0] not in lefts)
        and len(numbers.left_batch) == len(numbers.right_batch)
        and len(numbers.left_contracting) == len(numbers.right_contracting)
        and all(
            len(set(used)) == len(used) and all(0 <= d < len(shape) for d in used)
            for used, shape in ((lefts, left), (rights, right))
        )
        and 0 <= ragged[0] < len(left)
    )
    if not fits or sizes[:-1] not in ((), tuple(left[d] for d in numbers.prefix)) or not sizes:
        return None
    return numbers


def ragged_rule(operation: Any) -> Rule | None:
    """The rule of a `chlo.ragged_dot`. `group_sizes` is replicated along the groups."""
    dot = ragged_dot(operation)
    if dot is None:
        return None
    left, right, sizes = (tuple(operand.type.shape) for operand in operation.operands)
    result_shape = tuple(operation.results[0].type.shape)
    lengths: list[int] = []

    def factor(length: int) -> tuple[int]:
        lengths.append(length)
        return (len(lengths) - 1,)

    of_left: ValueFactors = tuple(map(factor, left))
    shared = dict(zip(dot.right_batch + dot.right_contracting, dot.left_batch + dot.left_contracting, strict=True))
    of_right: ValueFactors = tuple(of_left[shared[d]] if d in shared else factor(n) for d, n in enumerate(right))
    groups = of_right[dot.group] if dot.group >= 0 else factor(sizes[-1]) if dot.contracts_rows else ()
    free = tuple(of_right[d] for d in range(len(right)) if d not in shared and d != dot.group)
    rows = tuple(of_left[d] for d in dot.left_batch + dot.left_free)
    result: ValueFactors = (*((groups,) if dot.contracts_rows else ()), *rows, *free)
    if tuple(lengths[f] for (f,) in result) != result_shape:
        return None
    prefix = tuple(of_left[d] for d in dot.prefix) if len(sizes) > 1 else ()
    summed = {f for d in dot.left_contracting for f in of_left[d]} | set(groups if dot.group >= 0 else ())
    # If each batch has its own group sizes, rows of a group begin at another place in each batch.
    unsharded = frozenset(groups if prefix else ())
    return Rule(
        tuple(lengths),
        (of_left, of_right, (*prefix, ())),
        (result,),
        frozenset(summed) - unsharded,
        need_replication=unsharded,
    )


def group_factor(rule: Rule, dot: RaggedDot) -> int:
    """The factor of the groups; -1 if neither operands nor the result have such a dimension."""
    if dot.group >= 0:
        return rule.operands[1][dot.group][0]
    return rule.results[0][0][0] if dot.contracts_rows else -1


def ragged_flops(operation: Any, rule: Rule) -> float:
    """FLOPs: two for each pair of numbers that are multiplied; each row is multiplied with one group's matrix."""
    dot = ragged_dot(operation)
    if dot is None:
        return 0.0
    of_groups = group_factor(rule, dot)
    flops = 2.0
    for factor, size in enumerate(rule.sizes):
        flops *= 1 if factor == of_groups else size
    return flops


def general_ragged_dot(operation: Any) -> list[Any]:
    """Converts an `mhlo.ragged_dot`, as HLO is converted to, to a `chlo.ragged_dot`."""
    written = str(operation.attributes[NUMBERS])
    inner = re.sub(r"dot_dimension_numbers = #mhlo\.dot<([^>]*)>", r"\1", written).replace("#mhlo", "#chlo")
    attributes = {NUMBERS: ir.Attribute.parse(inner)}
    if "precision_config" in operation.attributes:
        text = str(operation.attributes["precision_config"]).replace("#mhlo", "#chlo")
        attributes["precision_config"] = ir.Attribute.parse(text)
    types = [result.type for result in operation.results]
    return create(RAGGED_DOT, list(operation.operands), types, attributes, operation)
