"""Training steps of decoders whose layers are stacked and scanned, in five styles and under four policies of what the
backward pass recomputes.

All are one model: 8 layers 2,048 wide, 16 heads and 8 for keys and values, a gated feed-forward 8,192 wide, 32,768
words, 256 sequences of 2,048 tokens, AdamW; weights in f32, computed in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from benchmarks.real.other_packages import equinox_step, tokens
from benchmarks.real.steps import STYLES, Lowerable, cross_entropy

LAYERS, WIDTH, HEADS, KEY_HEADS, HEAD, HIDDEN, WORDS = 8, 2048, 16, 8, 128, 8192, 32_768
BATCH, LENGTH = 256, 2048

Policy = Callable[..., Any] | None

# What is kept from the forward to the backward pass of a layer: everything, nothing but its input, contractions with
# weights, or what has a name.
POLICIES: dict[str, tuple[bool, Policy]] = {
    "kept": (False, None),
    "full": (True, None),
    "dots": (True, jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "names": (True, jax.checkpoint_policies.save_only_these_names("attention", "hidden")),
}


def scanned_decoder(style: str, policy: str) -> Lowerable:
    """The step in one of `DECODERS` under one of `POLICIES`."""
    return DECODERS[style](*POLICIES[policy])


# -- what all styles share --------------------------------------------------------------------------------------------


def rotated(x: Any) -> Any:
    """Rotary positions of [batch, length, heads, width]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * (10_000.0 ** (-jnp.arange(half) / half))[None]
    sin, cos = jnp.sin(angles)[None, :, None].astype(x.dtype), jnp.cos(angles)[None, :, None].astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def normalised(x: Any, scale: Any) -> Any:
    """Root-mean-square norm, in f32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def attended(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of [batch, length, heads, width] over fewer heads of keys and values."""
    return jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)


# -- plain JAX --------------------------------------------------------------------------------------------------------


def own(remat: bool, policy: Policy) -> Lowerable:
    """A dictionary of stacked weights and `lax.scan`."""

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    params = {
        "embed": shape(WORDS, WIDTH),
        "layers": {
            "norm": shape(LAYERS, WIDTH),
            "wq": shape(LAYERS, WIDTH, HEADS, HEAD),
            "wk": shape(LAYERS, WIDTH, KEY_HEADS, HEAD),
            "wv": shape(LAYERS, WIDTH, KEY_HEADS, HEAD),
            "wo": shape(LAYERS, HEADS, HEAD, WIDTH),
            "ffn_norm": shape(LAYERS, WIDTH),
            "gate": shape(LAYERS, WIDTH, HIDDEN),
            "up": shape(LAYERS, WIDTH, HIDDEN),
            "down": shape(LAYERS, HIDDEN, WIDTH),
        },
        "norm": shape(WIDTH),
        "head": shape(WIDTH, WORDS),
    }

    def layer(x: Any, weights: Any) -> Any:
        w = jax.tree.map(lambda one: one.astype(jnp.bfloat16), weights)
        y = normalised(x, weights["norm"])
        q, k, v = (jnp.einsum("btd,dhk->bthk", y, w[name]) for name in ("wq", "wk", "wv"))
        x = x + checkpoint_name(jnp.einsum("bthk,hkd->btd", attended(q, k, v), w["wo"]), "attention")
        y = normalised(x, weights["ffn_norm"])
        hidden = checkpoint_name(jax.nn.silu(y @ w["gate"]) * (y @ w["up"]), "hidden")
        return x + hidden @ w["down"], None

    body = jax.checkpoint(layer, policy=policy) if remat else layer

    def loss(params: Any, batch: Any, key: Any) -> Any:
        x = params["embed"].astype(jnp.bfloat16)[batch["tokens"]]
        x, _ = jax.lax.scan(body, x, params["layers"])
        logits = normalised(x, params["norm"]) @ params["head"].astype(jnp.bfloat16)
        return cross_entropy(logits, batch["targets"])

    return STYLES["separate"](loss, params, _data())


# -- Flax Linen: nn.scan, and as MaxText writes it --------------------------------------------------------------------


def linen(remat: bool, policy: Policy) -> Lowerable:
    """`nn.scan` of layers stacked along the first axis; a table for words that is used for the logits, too."""
    return _linen(remat, policy, axis=0, tied=True, style="train state")


def maxtext(remat: bool, policy: Policy) -> Lowerable:
    """As MaxText has it: stacked along the second axis, dense layers of several dimensions, a head of its own."""
    return _linen(remat, policy, axis=1, tied=False, style="one state")


def _linen(remat: bool, policy: Policy, *, axis: int, tied: bool, style: str) -> Lowerable:
    from flax import linen as nn

    def dense(sizes: Any, name: str, along: Any = -1) -> Any:
        return nn.DenseGeneral(sizes, axis=along, use_bias=False, dtype=jnp.bfloat16, name=name)

    class Layer(nn.Module):  # type: ignore[misc]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any, _: Any) -> Any:
            y = nn.RMSNorm(dtype=jnp.bfloat16, name="norm")(x)
            q = dense((HEADS, HEAD), "query")(y)
            k, v = dense((KEY_HEADS, HEAD), "key")(y), dense((KEY_HEADS, HEAD), "value")(y)
            x = x + checkpoint_name(dense(WIDTH, "out", (-2, -1))(attended(q, k, v)), "attention")
            y = nn.RMSNorm(dtype=jnp.bfloat16, name="ffn_norm")(x)
            hidden = checkpoint_name(nn.silu(dense(HIDDEN, "wi_0")(y)) * dense(HIDDEN, "wi_1")(y), "hidden")
            return x + dense(WIDTH, "wo")(hidden), None

    class Model(nn.Module):  # type: ignore[misc]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, ids: Any) -> Any:
            table = nn.Embed(WORDS, WIDTH, dtype=jnp.bfloat16, name="embed")
            block = nn.remat(Layer, policy=policy, prevent_cse=False) if remat else Layer
            stack = nn.scan(block, variable_axes={"params": axis}, split_rngs={"params": True}, length=LAYERS)
            x, _ = stack(name="layers")(table(ids), None)
            x = nn.RMSNorm(dtype=jnp.bfloat16, name="norm")(x)
            return table.attend(x) if tied else dense(WORDS, "logits")(x)

    model = Model()
    params = jax.eval_shape(model.init, jax.random.PRNGKey(0), tokens(BATCH, LENGTH))["params"]

    def loss(params: Any, batch: Any, key: Any) -> Any:
        return cross_entropy(model.apply({"params": params}, batch["tokens"]), batch["targets"])

    return STYLES[style](loss, params, _data())


# -- Flax NNX ---------------------------------------------------------------------------------------------------------


def nnx(remat: bool, policy: Policy) -> Lowerable:
    """`nnx.scan` over layers that `nnx.vmap` has made."""
    from flax import nnx as nn

    bf16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32}

    class Layer(nn.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            def dense(ins: Any, outs: Any, axis: Any = -1) -> Any:
                return nn.LinearGeneral(ins, outs, axis=axis, use_bias=False, rngs=rngs, **bf16)

            self.norm, self.ffn_norm = nn.RMSNorm(WIDTH, rngs=rngs, **bf16), nn.RMSNorm(WIDTH, rngs=rngs, **bf16)
            self.query, self.out = dense(WIDTH, (HEADS, HEAD)), dense((HEADS, HEAD), WIDTH, (-2, -1))
            self.key, self.value = dense(WIDTH, (KEY_HEADS, HEAD)), dense(WIDTH, (KEY_HEADS, HEAD))
            self.gate, self.up, self.down = dense(WIDTH, HIDDEN), dense(WIDTH, HIDDEN), dense(HIDDEN, WIDTH)

        def __call__(self, x: Any) -> Any:
            y = self.norm(x)
            x = x + checkpoint_name(self.out(attended(self.query(y), self.key(y), self.value(y))), "attention")
            y = self.ffn_norm(x)
            return x + self.down(checkpoint_name(nn.silu(self.gate(y)) * self.up(y), "hidden"))

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.embed = nn.Embed(WORDS, WIDTH, rngs=rngs, **bf16)
            self.norm = nn.RMSNorm(WIDTH, rngs=rngs, **bf16)
            self.head = nn.Linear(WIDTH, WORDS, use_bias=False, rngs=rngs, **bf16)

            @nn.split_rngs(splits=LAYERS)  # type: ignore[untyped-decorator]
            @nn.vmap(in_axes=(0,), out_axes=0)  # type: ignore[untyped-decorator]
            def make(rngs: Any) -> Any:
                return Layer(rngs)

            self.layers = make(rngs)

        def __call__(self, ids: Any) -> Any:
            def forward(x: Any, layer: Any) -> Any:
                return layer(x)

            body = nn.remat(forward, policy=policy) if remat else forward
            scan = nn.scan(body, in_axes=(nn.Carry, 0), out_axes=nn.Carry)
            return self.head(self.norm(scan(self.embed(ids), self.layers)))

    graph, params = nn.split(nn.eval_shape(lambda: Model(nn.Rngs(0))))
    params = nn.to_pure_dict(params)

    def loss(params: Any, batch: Any, key: Any) -> Any:
        return cross_entropy(nn.merge(graph, params)(batch["tokens"]), batch["targets"])

    return STYLES["separate"](loss, params, _data())


# -- Equinox ----------------------------------------------------------------------------------------------------------


def equinox(remat: bool, policy: Policy) -> Lowerable:
    """Layers stacked by `filter_vmap`, scanned over their arrays; one sequence at a time under `vmap`."""
    import equinox as eqx

    class Layer(eqx.Module):  # type: ignore[misc]
        norm: Any
        ffn_norm: Any
        query: Any
        key: Any
        value: Any
        out: Any
        gate: Any
        up: Any
        down: Any

        def __init__(self, key: Any) -> None:
            keys = iter(jax.random.split(key, 7))

            def dense(ins: int, outs: int) -> Any:
                return eqx.nn.Linear(ins, outs, use_bias=False, key=next(keys))

            self.norm = eqx.nn.RMSNorm(WIDTH, use_bias=False)
            self.ffn_norm = eqx.nn.RMSNorm(WIDTH, use_bias=False)
            self.query, self.out = dense(WIDTH, HEADS * HEAD), dense(HEADS * HEAD, WIDTH)
            self.key, self.value = dense(WIDTH, KEY_HEADS * HEAD), dense(WIDTH, KEY_HEADS * HEAD)
            self.gate, self.up, self.down = dense(WIDTH, HIDDEN), dense(WIDTH, HIDDEN), dense(HIDDEN, WIDTH)

        def __call__(self, x: Any) -> Any:
            y = jax.vmap(self.norm)(x)
            q, k, v = (jax.vmap(one)(y).reshape(1, LENGTH, -1, HEAD) for one in (self.query, self.key, self.value))
            seen = attended(q, k, v).reshape(LENGTH, -1)
            x = x + checkpoint_name(jax.vmap(self.out)(seen), "attention")
            y = jax.vmap(self.ffn_norm)(x)
            hidden = checkpoint_name(jax.nn.silu(jax.vmap(self.gate)(y)) * jax.vmap(self.up)(y), "hidden")
            return x + jax.vmap(self.down)(hidden)

    class Model(eqx.Module):  # type: ignore[misc]
        embed: Any
        layers: Any
        norm: Any
        head: Any

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, 3)
            self.embed = eqx.nn.Embedding(WORDS, WIDTH, key=keys[0])
            self.layers = eqx.filter_vmap(Layer)(jax.random.split(keys[1], LAYERS))
            self.norm = eqx.nn.RMSNorm(WIDTH, use_bias=False)
            self.head = eqx.nn.Linear(WIDTH, WORDS, use_bias=False, key=keys[2])

        def __call__(self, ids: Any) -> Any:
            arrays, static = eqx.partition(self.layers, eqx.is_array)

            def body(x: Any, one: Any) -> Any:
                return eqx.combine(one, static)(x), None

            x, _ = jax.lax.scan(jax.checkpoint(body, policy=policy) if remat else body, self.embed.weight[ids], arrays)
            return jax.vmap(self.head)(jax.vmap(self.norm)(x))

    def loss(model: Any, batch: Any, key: Any) -> Any:
        def narrow(one: Any) -> Any:
            return one.astype(jnp.bfloat16) if eqx.is_inexact_array(one) else one

        return cross_entropy(jax.vmap(jax.tree.map(narrow, model))(batch["tokens"]), batch["targets"])

    return equinox_step(Model, loss, _data())


def _data() -> dict[str, Any]:
    return {"tokens": tokens(BATCH, LENGTH), "targets": tokens(BATCH, LENGTH)}


DECODERS: dict[str, Callable[[bool, Policy], Lowerable]] = {
    "own": own,
    "maxtext": maxtext,
    "linen": linen,
    "nnx": nnx,
    "equinox": equinox,
}
