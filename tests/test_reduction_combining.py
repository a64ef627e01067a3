"""Reductions that become one collective: those that nothing waits for, and those that stand level."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax
from programs import PLAIN, ROUND_CHIP, Case, arg, case_of

from toast_cli.hardware.model import Axis, Link, Mesh
from toast_cli.price.profile import CompilerProfile

APART = replace(PLAIN, passes=PLAIN.passes - {"reduction-combining"})
ROWS, FEATURES, TRIPS = 64, 16, 3
LATENCY = 1.0
# Latency is all that counts: two messages of a gather over four devices, and as many of a reduce-scatter.
SLOW = Mesh("slow", ROUND_CHIP, (Axis("data", 4, (Link("switch", 4, 1e30, LATENCY / 4, "data"),)),), 2**40)


def case(fn: Any, profile: CompilerProfile = PLAIN) -> Case:
    """`fn` of a batch and of weights; its statistics are read by a product, so that they are waited for."""

    def read(x: Any, w: Any) -> Any:
        return fn(x) @ w

    return case_of(read, arg(ROWS, FEATURES), arg(FEATURES, 8), mesh=SLOW, profile=profile)


def one_pass(x: Any) -> Any:
    return (x - x.mean(0)) * lax.rsqrt((x * x).mean(0))


def two_passes(x: Any) -> Any:
    centred = x - x.mean(0)
    return centred * lax.rsqrt((centred * centred).mean(0))


def beside(x: Any) -> Any:
    """A block and its shortcut, both normalised."""
    return one_pass(jnp.sin(x)) + one_pass(jnp.cos(x))


def after(x: Any) -> Any:
    return one_pass(jnp.sin(one_pass(x)))


def narrower(x: Any) -> Any:
    squares = lax.reduce((x * x).astype(jnp.bfloat16), jnp.bfloat16(0), lax.add, (0,))
    return (x - x.mean(0)) * squares.astype(jnp.float32)


def within_a_loop(x: Any) -> Any:
    return lax.fori_loop(0, TRIPS, lambda _, y: jnp.sin(y) - jnp.tanh(y).sum(0), x) - x.sum(0)


@pytest.mark.parametrize(
    ("what", "fn", "collectives", "written"),
    [
        ("both sums of a normalisation", one_pass, 1, 2),
        ("a variance, which needs the mean", two_passes, 2, 2),
        ("four sums of two normalisations beside each other", beside, 1, 4),
        ("two normalisations after each other", after, 2, 4),
        ("a sum and a maximum", lambda x: (x - x.sum(0)) * x.max(0), 2, 2),
        ("sums of two types", narrower, 2, 2),
        ("a sum in each of three trips, and one outside", within_a_loop, 4, 4),
    ],
)
def test_what_stands_level_pays_one_latency(what: str, fn: Any, collectives: float, written: float) -> None:
    assert messages(case(fn)) == pytest.approx((collectives, written)), what
    assert messages(case(fn, APART)) == pytest.approx((written, written)), what


def messages(made: Case, dimension: str = "x.0") -> tuple[float, float]:
    """All-reduces where that is split: how many there are by their latency, and how many are written."""
    uses = made.evaluator.collectives((made.shard(dimension, "data"),))
    assert {use.kind for use in uses} == {"all-reduce"}
    return sum(use.seconds for use in uses) / LATENCY, sum(use.count for use in uses)


def test_what_nothing_waits_for_becomes_part_of_a_large_one() -> None:
    """Though it does not stand level: the second is over another dimension besides."""
    made = case_of(lambda x: (x.sum(0), jnp.sin(x).sum()), arg(ROWS, FEATURES), mesh=SLOW)
    by_latency, written = messages(made)
    assert written == 2
    assert by_latency == pytest.approx((FEATURES * 4 + 4) / PLAIN.combined_bytes)


def test_terms_of_one_sum_are_one_reduction() -> None:
    def fn(x: Any, v: Any, w: Any, u: Any) -> Any:
        return jnp.sin(x @ v + x @ w) @ u

    square = arg(FEATURES, FEATURES)
    made = case_of(fn, arg(ROWS, FEATURES), square, square, arg(FEATURES, 8), mesh=SLOW)
    assert messages(made, "x.1") == pytest.approx((1, 1))


def test_what_nothing_waits_for_is_one_in_each_trip() -> None:
    """As gradients of two weights, the second of which comes after a product that is reduced under other plans."""

    def fn(x: Any, w: Any) -> Any:
        def step(x: Any, _: Any) -> Any:
            y = jnp.sin(x @ w)
            return y, (x.sum(0), y.sum(0))

        return lax.scan(step, x, None, length=TRIPS)[1]

    for profile, each in ((PLAIN, 1), (APART, 2)):
        made = case_of(fn, arg(ROWS, FEATURES), arg(FEATURES, FEATURES), mesh=SLOW, profile=profile)
        assert messages(made) == pytest.approx((TRIPS * each, TRIPS * 2))


def test_reduce_scatters_that_something_waits_for_stay_alone() -> None:
    """Products over what is split, of which each device keeps a piece."""

    def fn(x: Any, v: Any, w: Any, u: Any) -> Any:
        return (jnp.sin(x @ v) * jnp.cos(x @ w)) @ u

    square = arg(FEATURES, FEATURES)
    made = case_of(fn, arg(ROWS, FEATURES), square, square, arg(FEATURES, 8), mesh=SLOW)
    uses = made.evaluator.collectives((made.shard("x.1", "data"), made.shard("x.0", "data")))
    scattered = [use for use in uses if use.kind == "reduce-scatter"]
    assert sum(use.seconds for use in scattered) / LATENCY == pytest.approx(2 / 2)  # half of an all-reduce each
    assert sum(use.count for use in scattered) == 2


def test_branches_of_a_condition_have_collectives_of_their_own() -> None:
    def fn(x: Any, w: Any, which: Any) -> Any:
        return lax.switch(which, [lambda: x - jnp.tanh(x).sum(0), lambda: x - jnp.cos(x).sum(0)]) @ w

    shapes = arg(ROWS, FEATURES), arg(FEATURES, 8), arg(dtype=jnp.int32)
    assert messages(case_of(fn, *shapes, mesh=SLOW)) == pytest.approx((1, 1))  # each runs half of the time


def test_a_sum_over_another_dimension_stands_alone() -> None:
    made = case(lambda x: x - x.sum(0) * x.sum(1, keepdims=True))
    assert {item.share for item in made.evaluator.items.sums if not item.late} == {1.0}


def test_one_collective_is_no_larger_than_the_compiler_makes_it() -> None:
    size = FEATURES * 4.0
    for most, collectives in ((size, 4), (2 * size, 2), (4 * size, 1), (8 * size, 1)):
        assert messages(case(beside, replace(PLAIN, combined_bytes=most)))[0] == pytest.approx(collectives)
