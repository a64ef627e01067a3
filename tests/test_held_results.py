"""Buffers of results that replace no argument: they are there before the results are made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from jax import lax
from programs import PLAIN, arg, case_of, evaluator_of, round_mesh, source_of_text

HOLDING = replace(PLAIN, passes=PLAIN.passes | {"held-results"})
LARGE, SMALL = arg(64, 64), arg(16, 16)  # 16 and 1 KiB


def chain(x: Any) -> Any:
    return x @ x @ x @ x


def late(x: Any, v: Any) -> Any:
    """A small result of large arrays."""
    return v @ chain(x)[:16, :16]


def replacing(x: Any, v: Any) -> Any:
    """A result that takes the place of an array that is there from the start."""
    return lax.sort(v) * chain(x)[0, 0]


@pytest.mark.parametrize(
    ("what", "fn", "shapes", "donate", "without", "peak"),
    [
        ("arguments 17 KiB, two products, and the result", late, (LARGE, SMALL), (), 49, 50),
        ("its buffer is an argument's", late, (LARGE, SMALL), (1,), 49, 49),
        ("the sorted array is there already", replacing, (LARGE, SMALL), (), 50, 50),
        ("the first product is in the result's buffer", chain, (LARGE,), (), 48, 48),
    ],
)
def test_results_have_their_buffers_from_the_start(
    what: str, fn: Any, shapes: tuple[Any, ...], donate: tuple[int, ...], without: float, peak: float
) -> None:
    for profile, expected in ((PLAIN, without), (HOLDING, peak)):
        case = case_of(fn, *shapes, mesh=round_mesh(data=1), profile=profile, donate=donate)
        assert case.evaluator.exact_cost(()).peak_bytes / 1024 == pytest.approx(expected, abs=0.1), what


TO_HOST = """
func.func @main(%x: tensor<64x64xf32>, %v: tensor<16x16xf32>)
    -> (tensor<16x16xf32> {mhlo.memory_kind = "pinned_host"}) {
  %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %1 = stablehlo.dot_general %0, %x, contracting_dims = [1] x [0]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %2 = stablehlo.slice %1 [0:16, 0:16] : (tensor<64x64xf32>) -> tensor<16x16xf32>
  %3 = stablehlo.dot_general %v, %2, contracting_dims = [1] x [0]
    : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
  %4 = stablehlo.custom_call @annotate_device_placement(%3) {
    has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "pinned_host"}
  } : (tensor<16x16xf32>) -> tensor<16x16xf32>
  return %4 : tensor<16x16xf32>
}
"""


def test_a_result_in_host_memory_holds_nothing_on_the_device() -> None:
    source = source_of_text(TO_HOST)
    for profile in (PLAIN, HOLDING):
        evaluator = evaluator_of(source, round_mesh(data=1), profile=profile)
        assert evaluator.exact_cost(()).peak_bytes / 1024 == pytest.approx(49, abs=0.1)


def test_a_result_that_is_split_is_too_small_for_temporaries() -> None:
    case = case_of(lambda x, v: chain(x) @ v, LARGE, arg(64, 32), mesh=round_mesh(data=4), profile=HOLDING)
    plans = {56: (), 52: (case.shard("v.1", "data"),)}  # result 8 KiB, or 2 KiB, which is there from the start
    for peak, plan in plans.items():
        assert case.evaluator.exact_cost(plan).peak_bytes / 1024 == pytest.approx(peak, abs=0.1)
