"""Caches of decoding programs: how often their bytes are there. The figures are what XLA:TPU needs for the same
programs on v5e.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import arg, case_of

LAYERS, BATCH, LENGTH, HEADS, WIDTH = 4, 16, 64, 8, 128
FEATURES = HEADS * WIDTH
ORDERS = {"btkh": (BATCH, LENGTH, HEADS, WIDTH), "bkth": (BATCH, HEADS, LENGTH, WIDTH)}


def step(order: str, queries: int, x: Any, w: Any, cache: Any, at: Any, layer: Any = None) -> tuple[Any, Any]:
    """One layer: writes a position of its cache and attends to all of them. layer: which of a stacked cache."""
    new, where = (
        ((BATCH, 1, HEADS, WIDTH), (0, at, 0, 0)) if order == "btkh" else ((BATCH, HEADS, 1, WIDTH), (0, 0, at, 0))
    )
    key = (x @ w).reshape(new)
    if layer is None:
        own = cache = lax.dynamic_update_slice(cache, key, where)
    else:
        cache = lax.dynamic_update_slice(cache, key[None], (layer, *where))
        own = lax.dynamic_index_in_dim(cache, layer, 0, keepdims=False)
    query = jnp.stack([x.reshape(BATCH, HEADS, WIDTH)] * queries, 2) if queries > 1 else x.reshape(BATCH, HEADS, WIDTH)
    name = "bkgh" if queries > 1 else "bkh"
    scores = jnp.einsum(f"{name},{order}->{name[:-1]}t", query, own)
    read = jnp.einsum(f"{name[:-1]}t,{order}->{name}", jax.nn.softmax(scores), own)
    return x + (read.sum(2) if queries > 1 else read).reshape(BATCH, FEATURES), cache


def scanned_over(attend: Any, cache: Any, weights: Any, x: Any, at: Any) -> tuple[Any, Any]:
    return lax.scan(lambda x, layer: attend(x, *layer, at), x, (weights, cache))


def carried(attend: Any, cache: Any, weights: Any, x: Any, at: Any) -> tuple[Any, Any]:
    def layer(state: Any, of: Any) -> Any:
        (x, cache), (w, number) = state, of
        return attend(x, w, cache, at, number), None

    return lax.scan(layer, (x, cache), (weights, jnp.arange(LAYERS)))[0]


def for_all_positions(layers: Any, attend: Any, cache: Any, weights: Any, x: Any) -> Any:
    def token(at: Any, state: Any) -> Any:
        x, cache = state
        return layers(attend, cache, weights, x, at)

    return lax.fori_loop(0, LENGTH, token, (x, cache))


# cache carried through the layers or scanned over, for one token or in a loop over tokens, order of its dimensions,
# queries per head, how often its bytes are needed beside the (donated) argument
CASES = [
    (scanned_over, False, "btkh", 1, 1),  # the scan stacks a new one
    (scanned_over, False, "bkth", 4, 1),
    (scanned_over, True, "btkh", 1, 1),  # where it was, but copied before and after
    (scanned_over, True, "bkth", 1, 1),
    (scanned_over, True, "btkh", 4, 1),
    (scanned_over, True, "bkth", 4, 0),  # as arguments lie, and where it was
    (carried, True, "btkh", 1, 1),
    (carried, True, "bkth", 1, 1),
    (carried, True, "bkth", 4, 1),
]


@pytest.mark.parametrize(("layers", "loops", "order", "queries", "copies"), CASES)
def test_how_often_a_donated_cache_is_there(layers: Any, loops: bool, order: str, queries: int, copies: int) -> None:
    attend = partial(step, order, queries)
    run = partial(for_all_positions, layers, attend) if loops else lambda *given: layers(attend, *given, LENGTH // 2)
    cache = arg(LAYERS, *ORDERS[order])
    evaluator = case_of(run, cache, arg(LAYERS, FEATURES, FEATURES), arg(BATCH, FEATURES), donate=(0,)).evaluator
    cost = evaluator.exact_cost(())
    size = 4 * LAYERS * BATCH * LENGTH * FEATURES
    assert (cost.peak_bytes - cost.argument_bytes) / size == pytest.approx(copies, abs=0.4)


def test_what_a_scan_reads_elsewhere_is_not_written_over() -> None:
    """The new stack takes over what is scanned over in a loop around, unless something else still reads that."""

    def run(reads: bool, stack: Any) -> Any:
        def outer(_: Any, stack: Any) -> Any:
            new = lax.scan(lambda c, x: (c, jnp.sin(x) * 2.0), 0.0, stack)[1]
            return new * stack if reads else new

        return lax.fori_loop(0, 3, outer, stack)

    alone, read = (
        case_of(partial(run, reads), arg(8, 64, 1024), donate=(0,)).evaluator.exact_cost(()).peak_bytes
        for reads in (False, True)
    )
    assert alone < 1.4 * 4 * 8 * 64 * 1024 < 1.9 * 4 * 8 * 64 * 1024 < read
