"""Which local rule writes which kind of op. An op that is not listed is computed whole on every device."""

from __future__ import annotations

from toast_cli.emit.spmd.rules.making import constant, iota
from toast_cli.emit.spmd.rules.plain import one_device, plain, sliced, whole
from toast_cli.emit.spmd.rules.reducing import reduce
from toast_cli.emit.spmd.site import LocalRule

_SAME_ON_PIECES = """
abs add and atan2 bitcast_convert cbrt ceil clamp compare complex convert cosine count_leading_zeros divide exponential
exponential_minus_one floor imag is_finite log log_plus_one logistic map maximum minimum multiply negate not or popcnt power real
reduce_precision remainder round_nearest_afz round_nearest_even rsqrt select shift_left shift_right_arithmetic shift_right_logical
sign sine sqrt subtract tan tanh xor
broadcast_in_dim cholesky concatenate dot dot_general optimization_barrier pad reduce_window reshape reverse sort transpose
triangular_solve convolution custom_call
"""

RULES: dict[str, LocalRule] = {
    **{f"stablehlo.{name}": plain for name in _SAME_ON_PIECES.split()},
    "stablehlo.constant": constant,
    "stablehlo.iota": iota,
    "stablehlo.slice": sliced,
    "stablehlo.reduce": reduce,
    "stablehlo.partition_id": one_device,
    "stablehlo.replica_id": one_device,
}


def rule_of(name: str) -> LocalRule:
    """The local rule of an op, by its dialect name."""
    found = RULES.get(name)
    return found or (plain if name.startswith("chlo.") else whole)
