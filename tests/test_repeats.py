"""Arrays that are repeated or widened for a product are moved before that, while they are small."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from emitted import collectives, compiled, on_cpu, strategy, worst_error
from programs import arg, case_of

QUERIES, KEYS = (8, 16, 4, 8), (8, 16, 2, 8)
SCORES = "bshd,bthd->bhst"


def repeated(q: Any, k: Any) -> Any:
    return jnp.einsum(SCORES, q, jnp.repeat(k, 2, axis=2))


def widened(q: Any, k: Any) -> Any:
    return jnp.einsum(SCORES, q, k.astype(jnp.float32))


def repeated_and_added(q: Any, k: Any) -> Any:
    return q + jnp.repeat(k, 2, axis=2)


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
@pytest.mark.parametrize(
    ("program", "keys", "gathered"),
    [
        (repeated, arg(*KEYS), 8 * 16 * 2 * 8 * 4.0),
        (widened, arg(*QUERIES, dtype=jnp.bfloat16), 8 * 16 * 4 * 8 * 2.0),
    ],
)
def test_keys_are_gathered_before_they_grow(program: Any, keys: Any, gathered: float, form: str) -> None:
    case = case_of(program, arg(*QUERIES), keys)
    plan = strategy(case, "q.1=data", "k.1=data")
    assert case.collectives(plan) == [("all-gather", ("data",), gathered, 1.0)]
    if program is repeated:  # XLA:CPU computes in float32 only
        assert collectives(case, compiled(case, plan, form)) == on_cpu(case, case.collectives(plan))
        assert worst_error(case.source, case.lowered(plan), form) < 1e-5


def test_a_repeat_that_no_product_reads_stays_split() -> None:
    case = case_of(repeated_and_added, arg(*QUERIES), arg(*KEYS))
    assert case.collectives(strategy(case, "q.1=data", "k.1=data")) == []


def test_heads_are_split_through_a_repeat() -> None:
    """Keys are split over their own heads, and each device repeats its own."""
    case = case_of(repeated, arg(*QUERIES), arg(*KEYS))
    plan = strategy(case, "k.2=model")
    assert case.collectives(plan) == []
    assert case.rest("q", plan) == "-|-|model|-"
