"""Loops that go on until sums of split arrays are small: conjugate gradients, power iterations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import arg, case_of
from test_gathered import partitioned, promised

MATRIX, VECTOR, TRIPS = arg(64, 64), arg(64), 20


def conjugate_gradients(a: jax.Array, b: jax.Array) -> jax.Array:
    def step(carry: Any) -> Any:
        x, r, p, square, k = carry
        along = a @ p
        by = square / jnp.vdot(p, along)
        x, r = x + by * p, r - by * along
        fresh = jnp.vdot(r, r)
        return x, r, r + (fresh / square) * p, fresh, k + 1

    start = jnp.zeros_like(b), b, b, jnp.vdot(b, b), 0
    return lax.while_loop(lambda c: (c[3] > 1e-10) & (c[4] < TRIPS), step, start)[0]


def power_iteration(a: jax.Array, b: jax.Array) -> jax.Array:
    def step(carry: Any) -> Any:
        v, _, k = carry
        w = a @ v
        size = jnp.linalg.norm(w)
        return w / size, size, k + 1

    return lax.while_loop(lambda c: (c[1] > 1e-6) & (c[2] < TRIPS), step, (b, jnp.float32(1), 0))[0]


def test_what_is_gathered_for_a_product_stays_split_for_the_rest() -> None:
    """Rows of the matrix are split: each trip gathers 64 numbers, and sums up two inner products; one more before."""
    case = case_of(conjugate_gradients, MATRIX, VECTOR)
    gather, sums = ("all-gather", ("data",)), ("all-reduce", ("data",))
    assert promised(case, (case.shard("a.0", "data"),)) == {gather: TRIPS * 64 * 4, sums: (2 * TRIPS + 1) * 4}


@pytest.mark.parametrize("function", [conjugate_gradients, power_iteration])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_as_promised(function: Any, side: int, form: Any) -> None:
    case = case_of(function, MATRIX, VECTOR)
    plan = (case.shard("a.0", "data", side),)
    assert promised(case, plan)
    assert partitioned(case, plan, form) == promised(case, plan)
