"""Products of matrices with vectors, which the vector unit does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest
from programs import PLAIN, arg, case_of, round_mesh

from toast_cli.price.cost import Attained, Grid
from toast_cli.price.kernel import elements_walked

PASSED = replace(PLAIN, passes=PLAIN.passes | {"vector-products"}, attained=Attained(pass_bytes=4.0))
# factors: 0 batch of 8, 1 rows, 2 columns of 64, 3 added up, 32
CASES = [
    (1, (1, 1, 1, 1), 8 * 32 * 64.0),
    (2, (1, 1, 1, 1), 0.0),
    (2, (4, 2, 1, 1), 2 * 32 * 64.0),  # one row a device
    (2, (1, 1, 64, 2), 8 * 16 * 2.0),  # one column a device
]


@pytest.mark.parametrize(("rows", "cuts", "walked"), CASES)
def test_a_product_of_one_row_on_a_device_walks_through_the_other_side(
    rows: int, cuts: tuple[int, ...], walked: float
) -> None:
    grid = Grid(((0, 8),), ((1, rows),), ((2, 64),), ((3, 32),), 1.0, grouped=False)
    assert elements_walked(PASSED, grid, cuts) == walked
    assert elements_walked(PLAIN, grid, cuts) == 0.0


@pytest.mark.parametrize(("dtype", "size"), [(jnp.float32, 4), (jnp.bfloat16, 2)])
@pytest.mark.parametrize("split", [False, True])
def test_a_batch_that_is_split_into_single_rows_pays_for_it(dtype: Any, size: int, split: bool) -> None:
    """x [4, 64] @ w [64, 1024] is read as it is by the matrix unit; of one row each element of w passes through the
    vector unit, which counts as 4 bytes more."""
    x, w = arg(4, 64, dtype=dtype), arg(64, 1024, dtype=dtype)
    case = case_of(lambda x, w: x @ w, x, w, mesh=round_mesh(data=4), profile=PASSED)
    plan = (case.shard("x.0", "data"),) if split else ()
    rows, elements = (1, 4 * 64 * 1024) if split else (4, 0)
    moved = size * (64 * 1024 + rows * 64) + max(elements - size * rows * 64 if split else 0, size * rows * 1024)
    assert case.evaluator.cost(plan).compute_seconds == pytest.approx(moved / 1e9, rel=0.05)
