"""What one device makes for all others: each array of it is all-reduced, with zeros from all but one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import io_callback
from programs import Case, arg, case_of, evaluator_of, round_mesh, source_of_text
from test_gathered import compiled, promised

from toast_cli.plan.decision_space import decision_space

X, W = arg(64, 32), arg(32, 64)
ALL = ("data", "model")


def on_the_host(x: jax.Array, w: jax.Array) -> jax.Array:
    return 2 * jax.pure_callback(np.sin, arg(64, 64), x @ w)


def two_results(x: jax.Array, w: jax.Array) -> jax.Array:
    found, counts = jax.pure_callback(lambda a: (a, a[0]), (arg(64, 64), arg(64)), x @ w)
    return found * counts


def two_that_are_added_up(x: jax.Array, w: jax.Array) -> jax.Array:
    found, more = jax.pure_callback(lambda a: (a, a), (arg(64, 64),) * 2, x @ w)
    return found + more


def three_that_are_added_up(x: jax.Array, w: jax.Array) -> jax.Array:
    one, other = jax.pure_callback(lambda a: (a, a), (arg(64, 64),) * 2, x @ w)
    return one + other + jax.pure_callback(np.sin, arg(64, 64), w.T @ x.T)


def one_is_read_twice(x: jax.Array, w: jax.Array) -> Any:
    one, other = jax.pure_callback(lambda a: (a, a), (arg(64, 64),) * 2, x @ w)
    return one + other, jax.numpy.sin(other)


def one_is_read(x: jax.Array, w: jax.Array) -> jax.Array:
    return 2 * jax.pure_callback(lambda a: (a, a), (arg(64, 64),) * 2, x @ w)[1]


def two_that_are_returned(x: jax.Array, w: jax.Array) -> Any:
    return jax.pure_callback(lambda a: (a, a[0]), (arg(64, 64), arg(64)), x @ w)


def one_is_a_number(x: jax.Array, w: jax.Array) -> jax.Array:
    scale, found = jax.pure_callback(lambda a: (a[0, 0], a), (arg(), arg(64, 64)), x @ w)
    return scale * (found @ x)


def in_a_loop(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 3, lambda i, c: jax.pure_callback(np.sin, arg(64, 32), c) + i, x) @ w


def nobody_reads_it(x: jax.Array, w: jax.Array) -> jax.Array:
    io_callback(np.sin, arg(64, 32), x)
    return x @ w


CASES = [
    (on_the_host, 64 * 64 * 4),
    (two_results, 65 * 64 * 4),
    (two_that_are_added_up, 64 * 64 * 4),
    (three_that_are_added_up, 64 * 64 * 4),
    (one_is_read_twice, 2 * 64 * 64 * 4),
    (one_is_read, 64 * 64 * 4),
    (two_that_are_returned, 65 * 64 * 4),
    (one_is_a_number, (64 * 64 + 1) * 4),
    (in_a_loop, 3 * 64 * 32 * 4),
    (nobody_reads_it, 0),
]


@pytest.mark.parametrize(("function", "size"), CASES, ids=[case[0].__name__ for case in CASES])
@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_results_of_host_callbacks(function: Any, size: int, form: Any) -> None:
    case = case_of(function, X, W)
    plan = (case.shard("w.1", "data"),)
    sent = promised(case, plan)
    assert sent.get(("all-reduce", ALL), 0) == size
    assert sum(bytes * count for kind, axes, bytes, count in case.collectives(plan)) == sum(sent.values())
    assert compiled(case, plan, form) == sent


NOISE = """
func.func public @main(%low: tensor<f32>, %high: tensor<f32>, %x: tensor<64x32xf32>) -> tensor<64x32xf32> {
  %shape = stablehlo.constant dense<[64, 32]> : tensor<2xi64>
  %0 = stablehlo.rng %low, %high, %shape, distribution = UNIFORM
    : (tensor<f32>, tensor<f32>, tensor<2xi64>) -> tensor<64x32xf32>
  %1 = stablehlo.add %0, %x : tensor<64x32xf32>
  return %1 : tensor<64x32xf32>
}"""


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_random_numbers_for_all_are_those_of_one(form: Any) -> None:
    source = source_of_text(NOISE)
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    plan = (decision_space(case.problem).choices[0],)
    assert promised(case, plan) == {("all-reduce", ALL): 64 * 32 * 4}
    assert compiled(case, plan, form) == promised(case, plan)
