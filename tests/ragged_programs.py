"""Products of ragged groups of each kind, as StableHLO."""

from __future__ import annotations

TENSORS = {
    "rows": ("64x16", "8x16x32", "8", "64x32"),
    "transposed": ("64x32", "8x16x32", "8", "64x16"),
    "contracted": ("64x16", "64x32", "8", "8x16x32"),
    "batch": ("8x4x16", "8x16x32", "8", "8x4x32"),
    "in a batch": ("4x16x8", "8x4x8x16", "4x8", "4x16x16"),
    "contracted in a batch": ("4x16x8", "4x16x16", "4x8", "8x4x8x16"),
    "the same in a batch": ("4x16x8", "8x4x8x16", "8", "4x16x16"),
}
NUMBERS = {
    "rows": "lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [1], lhs_ragged_dimensions = [0], "
    "rhs_group_dimensions = [0]",
    "transposed": "lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [2], lhs_ragged_dimensions = [0], "
    "rhs_group_dimensions = [0]",
    "contracted": "lhs_contracting_dimensions = [0], rhs_contracting_dimensions = [0], lhs_ragged_dimensions = [0]",
    "batch": "lhs_batching_dimensions = [0], rhs_batching_dimensions = [0], lhs_contracting_dimensions = [2], "
    "rhs_contracting_dimensions = [1], lhs_ragged_dimensions = [0]",
    "in a batch": "lhs_batching_dimensions = [0], rhs_batching_dimensions = [1], lhs_contracting_dimensions = [2], "
    "rhs_contracting_dimensions = [2], lhs_ragged_dimensions = [1], rhs_group_dimensions = [0]",
    "contracted in a batch": "lhs_batching_dimensions = [0], rhs_batching_dimensions = [0], "
    "lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [1], lhs_ragged_dimensions = [1]",
}
NUMBERS["the same in a batch"] = NUMBERS["in a batch"]


def program(name: str) -> str:
    left, right, sizes, result = (
        f"tensor<{shape}x{'i32' if k == 2 else 'f32'}>" for k, shape in enumerate(TENSORS[name])
    )
    return f"""func.func public @main(%x: {left}, %w: {right}, %g: {sizes}) -> {result} {{
      %0 = "chlo.ragged_dot"(%x, %w, %g) <{{ragged_dot_dimension_numbers = #chlo.ragged_dot<{NUMBERS[name]}>}}>
        : ({left}, {right}, {sizes}) -> {result}
      return %0 : {result}
    }}"""
