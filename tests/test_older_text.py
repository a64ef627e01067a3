"""Programs as older versions of JAX, StableHLO and MHLO write them are read as today's."""

from __future__ import annotations

import numpy as np
import pytest
from programs import source_of_text

from toast_cli.errors import InputError
from toast_cli.frontend.formats import in_todays_words

LOOK_UP = """
module @jit_f {{
  func.func public @main(%table: tensor<64x16xf32>, %ids: tensor<8x1xi32>) -> tensor<8x16xf32> {{
    %0 = "{dialect}.gather"(%table, %ids) {{dimension_numbers = #{dialect}.gather<offset_dims = [1],
      collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, indices_are_sorted = false,
      slice_sizes = {sizes}}} : (tensor<64x16xf32>, tensor<8x1xi32>) -> tensor<8x16xf32>
    return %0 : tensor<8x16xf32>
  }}
}}
"""
TODAY, BEFORE = "array<i64: 1, 16>", "dense<[1, 16]> : tensor<2xi64>"
# As JAX 0.4.13 lowers a reduction over windows, and to MHLO.
WINDOWS = """
func.func public @main(%x: tensor<8x16xf32>, %low: tensor<f32>) -> tensor<8x16xf32> {{
  %0 = "{dialect}.reduce_window"(%x, %low) ({{
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %1 = {dialect}.maximum %a, %b : tensor<f32>
    "{dialect}.return"(%1) : (tensor<f32>) -> ()
  }}) {{base_dilations = dense<1> : tensor<2xi64>, padding = dense<[[0, 0], [1, 1]]> : tensor<2x2xi64>,
    window_dilations = dense<1> : tensor<2xi64>, window_dimensions = dense<[1, 3]> : tensor<2xi64>,
    window_strides = dense<1> : tensor<2xi64>}} : (tensor<8x16xf32>, tensor<f32>) -> tensor<8x16xf32>
  return %0 : tensor<8x16xf32>
}}
"""


def ops_of(text: str) -> list[tuple[str, object]]:
    return [(op.name, op.rule) for op in source_of_text(text).program.ops]


@pytest.mark.parametrize("dialect", ["stablehlo", "mhlo"])
def test_lists_were_tensors(dialect: str) -> None:
    today = ops_of(LOOK_UP.format(dialect="stablehlo", sizes=TODAY))
    assert ops_of(LOOK_UP.format(dialect=dialect, sizes=BEFORE)) == today
    assert [name for name, _ in ops_of(WINDOWS.format(dialect=dialect))][2] == "stablehlo.reduce_window"


@pytest.mark.parametrize(
    ("before", "today"),
    [
        ("permutation = dense<[1, 0]> : tensor<2xi64>", "permutation = array<i64: 1, 0>"),
        ("window_strides = dense<2> : tensor<2xi64>", "window_strides = array<i64: 2, 2>"),
        ("broadcast_dimensions = dense<> : tensor<0xi64>", "broadcast_dimensions = array<i64>"),
        ("window_reversal = dense<false> : tensor<2xi1>", "window_reversal = array<i1: false, false>"),
        ("window_reversal = dense<[true, false]> : tensor<2xi1>", "window_reversal = array<i1: true, false>"),
        ("padding = dense<[[0, 1]]> : tensor<1x2xi64>", "padding = dense<[[0, 1]]> : tensor<1x2xi64>"),
        ("indices_of_shape = dense<1> : tensor<1xi64>", "indices_of_shape = dense<1> : tensor<1xi64>"),
    ],
)
def test_words_of_lists(before: str, today: str) -> None:
    assert in_todays_words(before.encode()).decode() == today


def test_booleans_were_packed() -> None:
    """16 × 24 elements are 48 bytes before and 384 today."""
    mask = np.random.default_rng(0).random((16, 24)) < 0.5
    text = 'func.func @main() -> tensor<16x24xi1> {{\n  %0 = stablehlo.constant dense<"0x{}"> : tensor<16x24xi1>\n  '
    text += "return %0 : tensor<16x24xi1>\n}}"
    before = text.format(np.packbits(mask.ravel(), bitorder="little").tobytes().hex().upper())
    today = text.format(mask.astype(np.uint8).tobytes().hex())
    assert in_todays_words(before.encode()) == in_todays_words(today.encode()) == today.encode()
    assert ops_of(before) == ops_of(today)


def test_an_error_behind_older_words_is_the_one_that_is_told() -> None:
    text = LOOK_UP.format(dialect="stablehlo", sizes=BEFORE).replace("return %0", "return %1")
    with pytest.raises(InputError, match=r":7:\d+: .*undeclared"):
        source_of_text(text)


def test_unknown_mhlo_is_refused_with_the_way_out() -> None:
    """MHLO takes a table of dimensions where StableHLO has a list."""
    text = """func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
      %0 = "mhlo.broadcast_in_dim"(%x) {broadcast_dimensions = dense<[[0]]> : tensor<1x1xi64>}
        : (tensor<4xf32>) -> tensor<4xf32>
      return %0 : tensor<4xf32>
    }"""
    with pytest.raises(InputError, match="MHLO that is not known here") as refused:
        source_of_text(text)
    assert "StableHLO" in (refused.value.hint or "")
