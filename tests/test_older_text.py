"""Programs as older exporters write them: booleans of one bit are read as today's, the rest is refused."""

from __future__ import annotations

import numpy as np
import pytest
from programs import source_of_text

from toast_cli.base.errors import InputError
from toast_cli.frontend.formats import with_byte_booleans

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
REGION = """
module attributes {mhlo.num_partitions = 8 : i32} {
  func.func public @main(%a: tensor<8x4xf32>) -> tensor<8x4xf32> {
    %0 = stablehlo.custom_call @SPMDFullToShardShape(%a) {mhlo.sharding = "{manual}"}
      : (tensor<8x4xf32>) -> tensor<1x4xf32>
    %3 = stablehlo.custom_call @SPMDShardToFullShape(%0) {mhlo.sharding = "{devices=[8,1]<=[8]}"}
      : (tensor<1x4xf32>) -> tensor<8x4xf32>
    return %3 : tensor<8x4xf32>
  }
}
"""
REFUSED = {
    "MHLO": (LOOK_UP.format(dialect="mhlo", sizes=BEFORE), "mhlo.gather is MHLO"),
    "lists as tensors": (LOOK_UP.format(dialect="stablehlo", sizes=BEFORE), "slice_sizes"),
    "a manual region of GSPMD": (REGION, "GSPMD's form"),
}


def ops_of(text: str) -> list[tuple[str, object]]:
    return [(op.name, op.rule) for op in source_of_text(text).program.ops]


@pytest.mark.parametrize(("text", "what"), REFUSED.values(), ids=REFUSED)
def test_what_only_older_exporters_write_is_refused_with_the_way_out(text: str, what: str) -> None:
    with pytest.raises(InputError) as refused:
        source_of_text(text)
    assert what in refused.value.what and "JAX 0.7 or newer" in (refused.value.hint or "")
    assert ":" in refused.value.where


def test_booleans_were_packed() -> None:
    """16 × 24 elements are 48 bytes before and 384 today."""
    mask = np.random.default_rng(0).random((16, 24)) < 0.5
    text = 'func.func @main() -> tensor<16x24xi1> {{\n  %0 = stablehlo.constant dense<"0x{}"> : tensor<16x24xi1>\n  '
    text += "return %0 : tensor<16x24xi1>\n}}"
    before = text.format(np.packbits(mask.ravel(), bitorder="little").tobytes().hex().upper())
    today = text.format(mask.astype(np.uint8).tobytes().hex())
    assert with_byte_booleans(before.encode()) == with_byte_booleans(today.encode()) == today.encode()
    assert ops_of(before) == ops_of(today)


def test_an_error_behind_older_words_is_the_one_that_is_told() -> None:
    text = 'func.func @main() -> tensor<8x16xi1> {\n  %0 = stablehlo.constant dense<"0x' + "0F" * 16
    text += '"> : tensor<8x16xi1>\n  return %1 : tensor<8x16xi1>\n}'
    with pytest.raises(InputError, match=r":3:\d+: .*undeclared"):
        source_of_text(text)
