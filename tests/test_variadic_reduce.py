"""A reduction of several arrays at once (argmax), or with a body of its own, over a split dimension: no all-reduce does
that, so what each device has found is gathered.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from emitted import emit_shardy
from jax import lax
from programs import arg, case_of
from test_gathered import partitioned, promised

from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.compile import collectives_after_partitioning

CASE = case_of(lambda x: jnp.argmax(x * 2, axis=1), arg(8, 64))


@pytest.mark.parametrize("plan", [("x.1=data",), ("x.1=data", "x.0=data")], ids=["kept whole", "wanted split"])
def test_partial_results_are_gathered(plan: tuple[str, ...]) -> None:
    decisions = tuple(CASE.shard(*decision.split("=")) for decision in plan)
    assert CASE.collectives(decisions) == [("all-gather", ("data",), 8 * 4 * 4, 2.0)]


def test_xla_does_so() -> None:
    lowered = CASE.lowered((CASE.shard("x.1", "data"),))
    found = collectives_after_partitioning(emit_shardy(CASE.source, lowered), "stablehlo", {"data": 4, "model": 2})
    assert not isinstance(found, Failure)
    assert [(c.kind, c.axes, c.bytes) for c in found] == [("all-gather", ("data",), 128)] * 2


def probability(x: jax.Array) -> jax.Array:
    """That one of independent events happens: a body of several ops, which no all-reduce has."""
    return lax.reduce(x, 0.0, lambda a, b: a + b - a * b, (0,))


def parity(x: jax.Array) -> jax.Array:
    return lax.reduce_xor(x > 0, (0,))


@pytest.mark.parametrize(("function", "size"), [(probability, 4), (parity, 1)])
@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_bodies_without_an_all_reduce_are_gathered(function: Any, size: int, form: Any) -> None:
    """Each of four devices finds 8 numbers, and all of them reduce what all have found."""
    case = case_of(function, arg(64, 8))
    plan = (case.shard("x.0", "data"),)
    assert promised(case, plan) == {("all-gather", ("data",)): 4 * 8 * size}
    assert partitioned(case, plan, form) == promised(case, plan)


def test_a_body_that_ends_with_an_addition_adds_nothing_up() -> None:
    """Two such reductions are not added up before devices reduce them."""

    def reduced(x: jax.Array) -> jax.Array:
        return lax.reduce(x, 0.0, lambda a, b: a * b + (a + b), (0,))

    case = case_of(lambda x: reduced(x) + reduced(2 * x), arg(64, 8))
    plan = (case.shard("x.0", "data"),)
    assert case.collectives(plan) == [("all-gather", ("data",), 4 * 8 * 4, 2.0)]
