"""Which local rule writes which kind of op. An op that is not listed is computed whole on every device."""

from __future__ import annotations

from toast_cli.emit.spmd.rules.making import constant, iota
from toast_cli.emit.spmd.rules.plain import one_device, plain, sliced, whole
from toast_cli.emit.spmd.rules.reducing import reduce
from toast_cli.emit.spmd.site import LocalRule
from toast_cli.program.ops import OpKind

_SAME_ON_PIECES = """
broadcast_in_dim cholesky concatenate convolution custom_call dot dot_general map optimization_barrier pad reduce_window reshape reverse sort
transpose triangular_solve
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


def rule_of(kind: OpKind) -> LocalRule:
    """The local rule of an op."""
    found = RULES.get(kind.name)
    return found or (plain if kind.elementwise or kind.name.startswith("chlo.") else whole)
