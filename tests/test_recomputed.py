"""What a program computes a second time, and what MFU and HFU make of it."""

import pytest

from toast_cli.pipeline import partition
from toast_cli.program.ops import DOT_GENERAL
from toast_cli.program.values import recomputed_parts
from toast_cli.request import Request

# One layer whose product is computed again behind a barrier: dot 0 forward, dot 1 again, dot 2 the gradient.
BARRIER = """func.func @main(%x: tensor<512x256xbf16>, %w: tensor<256x256xbf16>) -> tensor<256x256xbf16> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<512x256xbf16>, tensor<256x256xbf16>) -> tensor<512x256xbf16>
  %1 = stablehlo.multiply %0, %0 : tensor<512x256xbf16>
  %2:3 = stablehlo.optimization_barrier %x, %w, %1 : tensor<512x256xbf16>, tensor<256x256xbf16>, tensor<512x256xbf16>
  %3 = stablehlo.dot_general %2#0, OTHER, contracting_dims = [1] x [0] : (tensor<512x256xbf16>, tensor<256x256xbf16>) -> tensor<512x256xbf16>
  %4 = stablehlo.multiply %3, %2#2 : tensor<512x256xbf16>
  %5 = stablehlo.dot_general %2#0, %4, contracting_dims = [0] x [0] : (tensor<512x256xbf16>, tensor<512x256xbf16>) -> tensor<256x256xbf16>
  return %5 : tensor<256x256xbf16>
}"""  # noqa: E501


def products(text: str) -> tuple[list[float], float, float]:
    """The recomputed part of each product, MFU and HFU."""
    outcome = partition(Request("p.mlir", "v5e-4", iterations=20, content=text.encode()))
    program = outcome.source.program
    parts = recomputed_parts(program)
    predicted = outcome.report.predicted
    return [p for p, op in zip(parts, program.ops, strict=True) if op.name == DOT_GENERAL], predicted.mfu, predicted.hfu


def test_a_product_behind_a_barrier_is_recomputed() -> None:
    parts, mfu, hfu = products(BARRIER.replace("OTHER", "%2#1"))
    assert parts == [0.0, 1.0, 0.0]
    # Three products of 2 * 512 * 256 * 256 operations, and two multiplications of 512 * 256.
    assert mfu / hfu == pytest.approx((2 * 2 * 256 + 2) / (3 * 2 * 256 + 2), rel=1e-3)


def test_a_product_computed_twice_without_a_barrier_is_recomputed() -> None:
    """`jax.checkpoint` with prevent_cse=False around layers that are no scan."""
    text = BARRIER.replace("OTHER", "%w").replace("%2#0", "%x").replace("%2#2", "%1")
    parts, mfu, hfu = products("\n".join(line for line in text.splitlines() if "optimization_barrier" not in line))
    assert parts == [0.0, 1.0, 0.0]
    assert mfu / hfu == pytest.approx((2 * 2 * 256 + 2) / (3 * 2 * 256 + 2), rel=1e-3)


def test_a_product_of_other_arrays_is_not() -> None:
    parts, mfu, hfu = products(
        BARRIER.replace("OTHER", "%w2").replace(
            "  %3 =", "  %w2 = stablehlo.add %2#1, %2#1 : tensor<256x256xbf16>\n  %3 ="
        )
    )
    assert parts == [0.0, 0.0, 0.0] and mfu == hfu


FORWARD_AND_BACKWARD_LOOP = """func.func @main(%w: tensor<4x256x256xbf16>, %x: tensor<512x256xbf16>) -> tensor<512x256xbf16> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %none = stablehlo.constant dense<0.0> : tensor<4x512x256xbf16>
  %f:3 = stablehlo.while(%i = %zero, %h = %x, %kept = %none) : tensor<i32>, tensor<512x256xbf16>, tensor<4x512x256xbf16>
  cond {
    %c = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %s = stablehlo.dynamic_slice %w, %i, %zero, %zero, sizes = [1, 256, 256] : (tensor<4x256x256xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x256x256xbf16>
    %r = stablehlo.reshape %s : (tensor<1x256x256xbf16>) -> tensor<256x256xbf16>
    %d = stablehlo.dot_general %h, %r, contracting_dims = [1] x [0] : (tensor<512x256xbf16>, tensor<256x256xbf16>) -> tensor<512x256xbf16>
    %t = stablehlo.tanh %d : tensor<512x256xbf16>
    %b = stablehlo.broadcast_in_dim %h, dims = [1, 2] : (tensor<512x256xbf16>) -> tensor<1x512x256xbf16>
    %k = stablehlo.dynamic_update_slice %kept, %b, %i, %zero, %zero : (tensor<4x512x256xbf16>, tensor<1x512x256xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x512x256xbf16>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %t, %k : tensor<i32>, tensor<512x256xbf16>, tensor<4x512x256xbf16>
  }
  %g:2 = stablehlo.while(%i = %zero, %h = %f#1) : tensor<i32>, tensor<512x256xbf16>
  cond {
    %c = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %j = stablehlo.subtract %three, %i : tensor<i32>
    %s = stablehlo.dynamic_slice %w, %j, %zero, %zero, sizes = [1, 256, 256] : (tensor<4x256x256xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x256x256xbf16>
    %r = stablehlo.reshape %s : (tensor<1x256x256xbf16>) -> tensor<256x256xbf16>
    %k = stablehlo.dynamic_slice %f#2, %j, %zero, %zero, sizes = [1, 512, 256] : (tensor<4x512x256xbf16>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x512x256xbf16>
    %x2 = stablehlo.reshape %k : (tensor<1x512x256xbf16>) -> tensor<512x256xbf16>
    %d = stablehlo.dot_general %x2, %r, contracting_dims = [1] x [0] : (tensor<512x256xbf16>, tensor<256x256xbf16>) -> tensor<512x256xbf16>
    %t = stablehlo.tanh %d : tensor<512x256xbf16>
    %m = stablehlo.multiply %t, %h : tensor<512x256xbf16>
    %y = stablehlo.dot_general %m, %r, contracting_dims = [1] x [1] : (tensor<512x256xbf16>, tensor<256x256xbf16>) -> tensor<512x256xbf16>
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %y : tensor<i32>, tensor<512x256xbf16>
  }
  return %g#1 : tensor<512x256xbf16>
}"""  # noqa: E501


def test_what_the_backward_loop_computes_of_what_the_forward_loop_stacked_is_recomputed() -> None:
    assert products(FORWARD_AND_BACKWARD_LOOP)[0] == [0.0, 1.0, 0.0]
    other = FORWARD_AND_BACKWARD_LOOP.replace("%f#2, %j", "%none, %j")  # not what was stacked
    assert products(other)[0] == [0.0, 0.0, 0.0]
