"""The per-device lowering of each kind of op. Of ops that are not listed, elementwise ones and those of CHLO are
computed on shards, all others replicated."""

from __future__ import annotations

from toast_cli.emit.spmd.rules.indexing import dynamic_slice, dynamic_update_slice, gather, scatter
from toast_cli.emit.spmd.rules.plain import constant, custom_call, iota, on_every_device, one_device, plain
from toast_cli.emit.spmd.rules.ragged import ragged
from toast_cli.emit.spmd.rules.reducing import reduce
from toast_cli.emit.spmd.rules.windows import convolution, pad, reduce_window, reverse, select_and_scatter, slices
from toast_cli.emit.spmd.site import LocalRule
from toast_cli.program.ops import BLOCK_SCALED_DOT, RAGGED_DOT, OpKind

_SAME_ON_PIECES = """
broadcast_in_dim cholesky concatenate dot_general fft map optimization_barrier reshape sort
transpose triangular_solve
"""

RULES: dict[str, LocalRule] = {
    **{f"stablehlo.{name}": plain for name in _SAME_ON_PIECES.split()},
    "stablehlo.custom_call": custom_call,
    "stablehlo.constant": constant,
    "stablehlo.iota": iota,
    "stablehlo.slice": slices,
    "stablehlo.pad": pad,
    "stablehlo.reduce_window": reduce_window,
    "stablehlo.convolution": convolution,
    "stablehlo.reverse": reverse,
    "stablehlo.select_and_scatter": select_and_scatter,
    "stablehlo.reduce": reduce,
    "stablehlo.gather": gather,
    "stablehlo.scatter": scatter,
    "stablehlo.dynamic_slice": dynamic_slice,
    "stablehlo.dynamic_update_slice": dynamic_update_slice,
    "stablehlo.partition_id": one_device,
    "stablehlo.replica_id": one_device,
    RAGGED_DOT: ragged,
    BLOCK_SCALED_DOT: plain,
}


def rule_of(kind: OpKind) -> LocalRule:
    """The per-device lowering of an op."""
    found = RULES.get(kind.name)
    return found or (plain if kind.elementwise or kind.name.startswith("chlo.") else on_every_device)
