"""Buffers of results that replace no argument: they are there before the results are made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from jax import lax
from programs import PLAIN, arg, case_of, round_mesh

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


def test_a_result_that_is_split_is_too_small_for_temporaries() -> None:
    case = case_of(lambda x, v: chain(x) @ v, LARGE, arg(64, 32), mesh=round_mesh(data=4), profile=HOLDING)
    plans = {56: (), 52: (case.shard("v.1", "data"),)}  # result 8 KiB, or 2 KiB, which is there from the start
    for peak, plan in plans.items():
        assert case.evaluator.exact_cost(plan).peak_bytes / 1024 == pytest.approx(peak, abs=0.1)
