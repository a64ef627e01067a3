"""Op rules: Shardy's, read off the attribute it populates, and a small table for the ops Shardy says nothing about.

Enters: an MLIR op on which `sdy-populate-op-sharding-rules` has run. Leaves: a `Rule`, or None for an op nobody knows. Equal
rules are one object where that is cheap to arrange, since everything downstream gathers ops by their rule's identity.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from toast_cli import xla
from toast_cli.program.model import Rule, ValueFactors

# CHLO ops that are elementwise over operands and results of one shape.
CHLO_ELEMENTWISE = frozenset(
    f"chlo.{name}"
    for name in [
        "acos",
        "acosh",
        "asin",
        "asin_acos_kernel",
        "asinh",
        "atan",
        "atanh",
        "bessel_i1e",
        "conj",
        "cosh",
        "digamma",
        "erf",
        "erf_inv",
        "erfc",
        "erfcx",
        "is_inf",
        "is_neg_inf",
        "is_pos_inf",
        "lgamma",
        "lgamma_scaled",
        "log_sigmoid",
        "next_after",
        "polygamma",
        "sinh",
        "square",
        "tan",
        "zeta",
        "constant_like",
        "_asin_acos_kernel",
    ]
)
# The same with NumPy broadcasting left implicit; only alike when the shapes are.
CHLO_BROADCAST_PREFIX = "chlo.broadcast_"

# Custom calls that act on the minor dimensions alone; every leading dimension is a batch: target -> minor dimensions.
BATCHED_CUSTOM_CALLS = {
    "ApproxTopK": 1, "PartialReduce": 1, "TopK": 1, "mhlo.topk": 1,
    "Cholesky": 2, "Eigh": 2, "LuDecomposition": 2, "Qr": 2, "ProductOfElementaryHouseholderReflectors": 2,
    "cu_threefry2x32": 0, "erf": 0, "mhlo.erf": 0, "mhlo.acos": 0, "mhlo.acosh": 0, "mhlo.asin": 0, "mhlo.asinh": 0,
    "mhlo.atan": 0, "mhlo.atanh": 0, "mhlo.cosh": 0, "mhlo.sinh": 0,
    "annotate_device_placement": 0, "MoveToHost": 0, "MoveToDevice": 0, "LayoutConstraint": 0,
}  # fmt: skip

# Ops that make a value from nothing; each dimension of the result is a factor of its own.
SOURCES = frozenset(
    {"stablehlo.constant", "stablehlo.iota", "stablehlo.dynamic_iota", "stablehlo.create_token", "sdy.constant"}
)

# Device numbers, tokens and sizes: nothing in them could be split, and what they read stays whole. XLA's partitioner also gathers what
# goes into a Fourier transform, batch and all (fft_handler.cc), whatever Shardy's rule for it says.
WHOLE = frozenset(
    {
        "stablehlo.partition_id", "stablehlo.replica_id", "stablehlo.after_all", "stablehlo.get_dimension_size", "stablehlo.fft",
    }
)  # fmt: skip


@cache
def free_rule(shape: tuple[int, ...]) -> Rule:
    """`()->([i, j, …])`: a value that can be made in any sharding."""
    return Rule(shape, (), (tuple((d,) for d in range(len(shape))),))


@cache
def identity_rule(shape: tuple[int, ...], operands: int, results: int) -> Rule:
    """`([i, j], …)->([i, j], …)`: elementwise."""
    factors = tuple((d,) for d in range(len(shape)))
    return Rule(shape, (factors,) * operands, (factors,) * results)


@cache
def whole_rule(operand_ranks: tuple[int, ...], result_ranks: tuple[int, ...]) -> Rule:
    """No factors: every operand and result is needed whole."""
    return Rule((), tuple(((),) * rank for rank in operand_ranks), tuple(((),) * rank for rank in result_ranks))


def batched_rule(operands: list[tuple[int, ...]], results: list[tuple[int, ...]], minor: int) -> Rule | None:
    """Leading dimensions pass through, the last `minor` ones are needed whole; None where the leading ones differ."""
    batch = operands[0][: len(operands[0]) - minor]

    def factors(shape: tuple[int, ...]) -> ValueFactors:
        return tuple((d,) if d < len(batch) else () for d in range(len(shape)))

    if any(shape[: len(batch)] != batch for shape in operands + results):
        return None
    return Rule(batch, tuple(map(factors, operands)), tuple(map(factors, results)))


def table_rule(name: str, target: str, operands: list[tuple[int, ...]], results: list[tuple[int, ...]]) -> Rule | None:
    """The rule of an op that Shardy leaves without one; None when this table does not know it either.

    Args:
        name: dialect name. target: a custom call's target, else empty.
        operands, results: shapes in elements.
    """
    if name in SOURCES:
        return free_rule(results[0])
    if name in WHOLE:
        return whole_rule(tuple(map(len, operands)), tuple(map(len, results)))
    same_shape = len(set(operands) | set(results)) == 1
    if (name in CHLO_ELEMENTWISE or name.startswith(CHLO_BROADCAST_PREFIX)) and same_shape:
        return identity_rule(results[0], len(operands), len(results))
    if name == "chlo.top_k":
        return batched_rule(operands, results, 1)
    if name == "stablehlo.custom_call" and target in BATCHED_CUSTOM_CALLS and operands and results:
        return batched_rule(operands, results, BATCHED_CUSTOM_CALLS[target])
    return None


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


def _whole_where_alone(rule: Rule, custom: bool) -> Rule:
    """A custom call's own rule names every dimension; one that its operands and results do not share is needed whole."""
    if not custom:
        return rule
    read, made = (
        {f for dims in arrays for factors in dims for f in factors} for arrays in (rule.operands, rule.results)
    )
    return replace(rule, need_replication=rule.need_replication | (read ^ made))
