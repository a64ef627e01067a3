"""Plans for transformer blocks: Megatron, sequence and context parallel, each with the collectives it is known for.

Every array is f32 (4 bytes an element). `bytes` are of the result on one device, see `CollectiveUse`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import Case, arg, case_of, round_mesh

from toast_cli.plan.decisions import Plan

Collectives = list[tuple[str, tuple[str, ...], float, float]]

B, S, M, H, K, W = 2, 16, 32, 4, 8, 64  # batch, sequence, model, heads, head size, hidden
ACTIVATION = B * S * M * 4.0
FOUR = round_mesh(data=2, model=4)
ATTENTION = {"wk": arg(M, H, K), "wo": arg(H, K, M), "wq": arg(M, H, K), "wv": arg(M, H, K)}
MLP = {"down": arg(W, M), "up": arg(M, W)}


def norm(x: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attention(x: Any, p: Any) -> Any:
    n = norm(x)
    q, k, v = (jnp.einsum("bsd,dhk->bshk", n, p[w]) for w in ("wq", "wk", "wv"))
    scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k))
    return x + jnp.einsum("bshk,hkd->bsd", jnp.einsum("bhst,bthk->bshk", scores, v), p["wo"])


def mlp(x: Any, p: Any) -> Any:
    return x + jax.nn.relu(norm(x) @ p["up"]) @ p["down"]


def block(x: Any, p: Any) -> Any:
    return mlp(attention(x, p), p)


def backward(forward: Any) -> Any:
    def run(x: Any, p: Any) -> Any:
        return jax.grad(lambda x, p: jnp.sum(forward(x, p) ** 2), argnums=(0, 1))(x, p)

    return run


# name, function, its weights, how often Megatron reduces an activation in it
BLOCKS: list[tuple[str, Any, dict[str, Any], float]] = [
    ("mlp, forward", mlp, MLP, 1.0),
    ("attention, forward", attention, ATTENTION, 1.0),
    ("block, forward", block, MLP | ATTENTION, 2.0),
    ("mlp, both ways", backward(mlp), MLP, 2.0),
    ("attention, both ways", backward(attention), ATTENTION, 2.0),
    ("block, both ways", backward(block), MLP | ATTENTION, 4.0),
]


def megatron(case: Case) -> Plan:
    names = {a.path: a for a in case.program.arguments}
    places = [place for place in ("p['wq'].1", "p['up'].1") if place.partition(".")[0] in names]
    return tuple(case.shard(place, "model") for place in places)


@pytest.mark.parametrize(("run", "weights", "count"), [b[1:] for b in BLOCKS], ids=[b[0] for b in BLOCKS])
def test_megatron_all_reduces_twice_a_block_and_direction(run: Any, weights: Any, count: float) -> None:
    case = case_of(run, arg(B, S, M), weights, mesh=FOUR)
    assert case.collectives(megatron(case)) == [("all-reduce", ("model",), ACTIVATION, count)]


@pytest.mark.parametrize(("run", "weights", "count"), [b[1:] for b in BLOCKS], ids=[b[0] for b in BLOCKS])
def test_sequence_parallelism_turns_them_into_reduce_scatters_and_all_gathers(
    run: Any, weights: Any, count: float
) -> None:
    case = case_of(run, arg(B, S, M), weights, mesh=FOUR)
    plan = (*megatron(case), case.shard("x.1", "model"))
    assert case.collectives(plan) == [
        ("all-gather", ("model",), ACTIVATION, count),
        ("reduce-scatter", ("model",), ACTIVATION / 4, count),
    ]
    assert case.rest("x", plan) == "-|model|-"


def shared_heads(x: Any, p: Any) -> Any:
    """Multi-query attention: all heads share one key and value head."""
    n = norm(x)
    q, k, v = jnp.einsum("bsd,dhk->bshk", n, p["wq"]), n @ p["wk"], n @ p["wv"]
    scores = jax.nn.softmax(jnp.einsum("bshk,btk->bhst", q, k))
    return x + jnp.einsum("bshk,hkd->bsd", jnp.einsum("bhst,btk->bshk", scores, v), p["wo"])


def test_only_terms_that_are_partial_share_a_reduction() -> None:
    """Going back, queries leave a partial term of the input's gradient; keys and values are summed over heads before
    that.
    """
    weights = {"wk": arg(M, K), "wo": arg(H, K, M), "wq": arg(M, H, K), "wv": arg(M, K)}
    case = case_of(backward(shared_heads), arg(B, S, M), weights, mesh=FOUR)
    assert case.collectives(megatron(case)) == [
        ("all-reduce", ("model",), B * S * K * 4.0, 2.0),
        ("all-reduce", ("model",), ACTIVATION, 2.0),
    ]


def test_sequence_first_gathers_weights_instead() -> None:
    case = case_of(mlp, arg(B, S, M), MLP, mesh=FOUR)
    plan = (case.shard("x.1", "model"), *megatron(case))
    assert case.collectives(plan) == [("all-gather", ("model",), M * W * 4.0, 2.0)]
    assert case.rest("p['up']", plan) == "-|model"


def test_context_parallelism_over_queries_gathers_keys_and_values() -> None:
    case = case_of(attention, arg(B, S, M), ATTENTION, mesh=FOUR)
    plan = (case.shard("x.1", "model", side=0),)
    assert case.collectives(plan) == [("all-gather", ("model",), B * S * H * K * 4.0, 2.0)]


def test_context_parallelism_over_keys_gathers_queries_and_reduces_what_comes_out() -> None:
    case = case_of(attention, arg(B, S, M), ATTENTION, mesh=FOUR)
    plan = (case.shard("x.1", "model", side=1),)
    row = B * H * S * 4.0  # one number for each query and head: the softmax's maximum and its sum
    assert case.collectives(plan) == [
        ("all-gather", ("model",), row, 2.0),
        ("all-gather", ("model",), B * S * H * K * 4.0, 1.0),  # queries
        ("reduce-scatter", ("model",), row / 4, 2.0),
        ("reduce-scatter", ("model",), B * S * H * K * 4.0 / 4, 1.0),  # the mixed values
    ]


@pytest.mark.parametrize("side", [0, 1])
def test_a_side_decides_which_dimension_of_the_scores_is_split(side: int) -> None:
    case = case_of(backward(attention), arg(B, S, M), ATTENTION, mesh=FOUR)
    lowered = case.lowered((case.shard("x.1", "model", side=side),))
    (first, *_) = case.ops("exponential")  # of the scores [b, h, s, t]
    expected = "-|-|model|-" if side == 0 else "-|-|-|model"
    assert case.text(lowered.shardings[case.program.ops[first].results[0]]) == expected


def test_both_sides_can_be_split_over_different_axes() -> None:
    case = case_of(attention, arg(B, S, M), ATTENTION, mesh=FOUR)
    lowered = case.lowered((case.shard("x.1", "model", side=0), case.shard("x.1", "data", side=1)))
    (exponential,) = case.ops("exponential")
    assert case.text(lowered.shardings[case.program.ops[exponential].results[0]]) == "-|-|model|data"
