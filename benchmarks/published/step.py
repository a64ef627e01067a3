"""The training step of a published run: a decoder as MaxText has it, with splash attention or cuDNN's.

Weights and Adam's second moment are f32, products bf16. In: a `Run`. Out: StableHLO for its platform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention

from benchmarks.published.runs import Run

Tree = dict[str, Any]
# Splash attention walks over 4 x 4 blocks: of 512 for 2,048 positions, MaxText's default, and of 2,048 for 8,192, as in
# its recipes for v6e.
BLOCKS, LEAST_BLOCK = 4, 128
GROUP = 512  # tokens that are given to experts at a time
BLOCK_SIZES = (
    "block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq",
    "block_kv_dq",
)  # fmt: skip
CUDNN = 91_000  # version, which is not asked for: no GPU is there
_RATE, _BETA1, _BETA2, _EPSILON = 1e-4, 0.9, 0.95, 1e-8


def lowered(run: Run) -> str:
    """The step in StableHLO, with debug locations."""
    weights = _weights(run)
    first = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, run.moment), weights)
    text = jax.ShapeDtypeStruct((run.batch, run.seq), jnp.int32)
    state = {"params": weights, "first": first, "second": weights, "count": jax.ShapeDtypeStruct((), jnp.int32)}
    step = jax.jit(_step(run), donate_argnums=0)
    with mock.patch.object(fused_attention_stablehlo, "check_cudnn_version", lambda: CUDNN):
        traced = step.trace(state, {"tokens": text, "targets": text})
        text_of: str = traced.lower(lowering_platforms=(run.platform,)).as_text(debug_info=True)
    return text_of


def _weights(run: Run) -> Tree:
    of = run.decoder
    stack = (of.layers,) if run.scanned else ()
    experts = (of.experts,) if of.experts else ()

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {
        "attention_norm": array(*stack, of.model),
        "query": array(*stack, of.model, of.heads, of.head),
        "key": array(*stack, of.model, of.kv_heads, of.head),
        "value": array(*stack, of.model, of.kv_heads, of.head),
        "out": array(*stack, of.heads, of.head, of.model),
        "mlp_norm": array(*stack, of.model),
        **({"gate": array(*stack, *experts, of.model, of.ff)} if of.gated else {}),
        **({"router": array(*stack, of.model, of.experts)} if of.experts else {}),
        "up": array(*stack, *experts, of.model, of.ff),
        "down": array(*stack, *experts, of.ff, of.model),
    }
    layers = layer if run.scanned else [layer] * of.layers
    embedding, logits = array(of.vocab, of.model), array(of.model, of.vocab)
    return {"embedding": embedding, "layers": layers, "norm": array(of.model), "logits": logits}


def _step(run: Run) -> Callable[[Tree, Tree], tuple[Tree, jax.Array]]:
    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda params: _loss(run, params, batch))(state["params"])
        count = state["count"] + 1
        first = jax.tree.map(
            lambda m, g: (_BETA1 * m.astype(g.dtype) + (1 - _BETA1) * g).astype(m.dtype), state["first"], gradients
        )
        second = jax.tree.map(lambda v, g: _BETA2 * v + (1 - _BETA2) * g * g, state["second"], gradients)
        rate = _RATE * jnp.sqrt(1 - _BETA2**count) / (1 - _BETA1**count)
        params = jax.tree.map(
            lambda p, m, v: p - rate * m.astype(p.dtype) / (jnp.sqrt(v) + _EPSILON), state["params"], first, second
        )
        return {"params": params, "first": first, "second": second, "count": count}, loss

    return step


def _loss(run: Run, params: Tree, batch: Tree) -> jax.Array:
    attention = _attention(run)

    def layer(x: jax.Array, weights: Tree) -> tuple[jax.Array, None]:
        return _layer(run, attention, x, weights), None

    if run.kept != "all":
        layer = jax.checkpoint(layer, policy=_policy(run), prevent_cse=not run.scanned)
    x = params["embedding"].astype(jnp.bfloat16)[batch["tokens"]]
    if run.scanned:
        x, _ = jax.lax.scan(layer, x, params["layers"])
    else:
        for weights in params["layers"]:
            x, _ = layer(x, weights)
    logits = jnp.einsum("bsd,dv->bsv", _norm(x, params["norm"]), params["logits"].astype(jnp.bfloat16))
    wanted = jax.nn.one_hot(batch["targets"], run.decoder.vocab, dtype=jnp.float32)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits.astype(jnp.float32)) * wanted, axis=-1))


def _policy(run: Run) -> Any:
    policies = jax.checkpoint_policies
    if run.kept == "full":
        return policies.nothing_saveable
    if run.offloaded:
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(run.kept),
            offload_src="device",
            offload_dst="pinned_host",
        )
    minimal = run.kept == "minimal"
    named = policies.checkpoint_dots_with_no_batch_dims if minimal else policies.save_only_these_names(*run.kept)
    return policies.save_from_both_policies(named, _of_cudnn)


def _of_cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    """True for the results of cuDNN's attention."""
    return str(primitive).startswith("dot_product_attention_fwd")


def _attention(run: Run) -> Any:
    """Attention of all heads, [batch, heads, positions, features], which toast splits. For TPUs splash attention, which
    MaxText splits by hand (`shard_map`)."""
    if run.platform == "cuda":
        return _attention_of_cudnn
    mask = splash_attention.MultiHeadMask([splash_attention.CausalMask((run.seq, run.seq))] * run.decoder.heads)
    sizes = dict.fromkeys(BLOCK_SIZES, max(LEAST_BLOCK, run.seq // BLOCKS))
    if run.fused:
        sizes = {name: size for name, size in sizes.items() if not name.endswith("_dq")}
    blocks = splash_attention.BlockSizes(**sizes, use_fused_bwd_kernel=run.fused)
    return jax.vmap(splash_attention.make_splash_mha(mask, block_sizes=blocks, head_shards=1, q_seq_shards=1))


def _attention_of_cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    mixed = jax.nn.dot_product_attention(q, k, v, scale=1.0, is_causal=True, implementation="cudnn")
    return jnp.swapaxes(mixed, 1, 2)


def _layer(run: Run, attention: Callable[..., jax.Array], x: jax.Array, weights: Tree) -> jax.Array:
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    x = checkpoint_name(x, "input")
    y = _norm(x, weights["attention_norm"])
    q = checkpoint_name(_rotated(jnp.einsum("bsd,dhk->bhsk", y, weights["query"])), "q")
    k = checkpoint_name(_rotated(jnp.einsum("bsd,dhk->bhsk", y, weights["key"])), "k")
    v = checkpoint_name(jnp.einsum("bsd,dhk->bhsk", y, weights["value"]), "v")
    mixed = checkpoint_name(attention(q * run.decoder.head**-0.5, k, v), "context")
    x = x + checkpoint_name(jnp.einsum("bhsk,hkd->bsd", mixed, weights["out"]), "out")
    y = _norm(x, weights["mlp_norm"])
    return x + (_experts(run, y, weights) if run.decoder.experts else _feed_forward(run, y, weights))


def _feed_forward(run: Run, y: jax.Array, weights: Tree) -> jax.Array:
    """[…, model] by one network, or [experts, …, model] by one for each."""
    inner = y @ weights["up"]
    if run.decoder.gated:
        inner = inner * jax.nn.silu(checkpoint_name(y @ weights["gate"], "gate"))
    else:
        inner = jax.nn.gelu(inner)
    return checkpoint_name(inner @ weights["down"], "down")


def _experts(run: Run, y: jax.Array, weights: Tree) -> jax.Array:
    """The chosen experts of each token, which take as many tokens of each group as they would if all had as many
    (GShard's dispatch, arXiv:2006.16668)."""
    of = run.decoder
    tokens = y.reshape(-1, min(run.seq, GROUP), of.model)
    capacity = max(1, tokens.shape[1] * of.chosen // of.experts)
    gates, chosen = jax.lax.top_k(jax.nn.softmax(jnp.einsum("gsd,de->gse", tokens, weights["router"])), of.chosen)
    taken = jax.nn.one_hot(chosen, of.experts, dtype=y.dtype)
    places = jax.nn.one_hot(jnp.cumsum(taken, axis=1) - 1, capacity, dtype=y.dtype) * taken[..., None]
    dispatch = jnp.sum(places, axis=2)
    combine = jnp.einsum("gskec,gsk->gsec", places, gates)
    arrived = jnp.einsum("gsec,gsd->egcd", dispatch, tokens)
    rows = arrived.reshape(of.experts, -1, of.model)
    done = _feed_forward(run, rows, weights).reshape(arrived.shape)
    return jnp.einsum("gsec,egcd->gsd", combine, done).reshape(y.shape)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary position embeddings; x: [batch, heads, positions, features]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[2])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
