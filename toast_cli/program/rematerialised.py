"""Values made from constants alone, which Shardy makes anew for each of their uses.

Enters: a program. Leaves: which of its values are such. They have no sharding of their own: each use gets a copy in its sharding, so a
reshard of one costs nothing and a sharding on one would only bind its uses together. Shardy's pass
`sdy-constant-or-scalar-splitter` draws the line; this table follows it.
"""

from __future__ import annotations

from toast_cli.program.model import Op, Program

SOURCES = frozenset({"stablehlo.constant", "stablehlo.iota"})
_PRESERVING = """
broadcast_in_dim reshape slice
abs add and atan2 bitcast_convert cbrt ceil clamp compare complex convert cosine count_leading_zeros divide exponential
exponential_minus_one floor imag is_finite log log_plus_one logistic maximum minimum multiply negate not or popcnt power real
remainder round_nearest_afz round_nearest_even rsqrt select shift_left shift_right_arithmetic shift_right_logical sign sine sqrt
subtract tan tanh xor
"""
PRESERVING = frozenset(f"stablehlo.{name}" for name in _PRESERVING.split())


def remade_values(program: Program) -> list[bool]:
    """[values] True where every use gets a copy of its own."""
    remade = [False] * len(program.values)
    for op in program.ops:
        preserved = op.name in PRESERVING and all(remade[v] for v in op.operands)
        if op.name in SOURCES or preserved or expands_scalar(op, program):
            for value in op.results:
                remade[value] = True
    return remade


def expands_scalar(op: Op, program: Program) -> bool:
    """A broadcast of a scalar, whatever the scalar comes from."""
    return op.name == "stablehlo.broadcast_in_dim" and not program.values[op.operands[0]].shape
