"""A transformer whose every second feed-forward part is a mixture of experts, dispatched as in GShard (Lepikhin 2020).

Tokens are cut into groups; in each group an expert takes at most `capacity` tokens, its two best experts per token.
Weights and moments are float32, the arithmetic is bfloat16 with float32 gates.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from sample_models.common import Sample, Tree, Weight, cast, dense, main, tokens, training_sample, zeros
from sample_models.layers import attention, causal_mask, one_hot_loss, rms_norm, rope, rope_tables


@dataclass(frozen=True)
class Config:
    layers: int
    model: int
    heads: int
    head: int
    ff: int
    experts: int
    groups: int
    capacity: int
    vocab: int
    batch: int
    seq: int


def layer_weights(config: Config, sparse: bool) -> Tree:
    d, h, k = config.model, config.heads, config.head
    layer = {
        "attention_norm": zeros(d),
        "wq": dense(d, h, k),
        "wk": dense(d, h, k),
        "wv": dense(d, h, k),
        "wo": dense(h, k, d, inputs=2),
        "mlp_norm": zeros(d),
    }
    if sparse:
        layer["router"] = dense(d, config.experts)
        layer["wi"] = Weight((config.experts, d, config.ff), fan_in=d)
        layer["wo_expert"] = Weight((config.experts, config.ff, d), fan_in=config.ff)
    else:
        layer["up"], layer["down"] = dense(d, config.ff), dense(config.ff, d)
    return layer


def weights(config: Config) -> Tree:
    return {
        "embed": Weight((config.vocab, config.model), fan_in=1),
        "layers": [layer_weights(config, sparse=number % 2 == 1) for number in range(config.layers)],
        "final_norm": zeros(config.model),
        "head": dense(config.model, config.vocab),
    }


def attend(layer: Tree, x: jax.Array, tables: tuple[jax.Array, jax.Array], mask: jax.Array) -> jax.Array:
    x = rms_norm(x, layer["attention_norm"])
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, layer[name]) for name in ("wq", "wk", "wv"))
    return jnp.einsum("bshk,hkd->bsd", attention(rope(q, tables), rope(k, tables), v, mask), layer["wo"])


def place(choice: jax.Array, capacity: int, taken: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Slots of one choice: choice f32[g, s, e] is one-hot, taken f32[g, 1, e] says how many slots are gone.

    Returns slots, one-hot f32[g, s, e, c] (all zero for a token that finds no room), and the slots gone now.
    """
    position = (jnp.cumsum(choice, axis=1) - 1 + taken) * choice
    fits = choice * (position < capacity)
    slots = fits[..., None] * jax.nn.one_hot(position.astype(jnp.int32), capacity, dtype=choice.dtype)
    return slots, taken + jnp.sum(choice, axis=1, keepdims=True)


def route(config: Config, router: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Combine weights f32[g, s, e, c] and the balance loss, from tokens [g, s, d]."""
    gates = jax.nn.softmax(jnp.einsum("gsd,de->gse", x.astype(jnp.float32), router))
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), config.experts)
    second = jax.nn.one_hot(jnp.argmax(gates * (1 - first), axis=-1), config.experts)
    first_slots, taken = place(first, config.capacity, jnp.zeros_like(gates[:, :1]))
    second_slots, _ = place(second, config.capacity, taken)
    combine = gates[..., None] * (first_slots + second_slots)
    balance = jnp.mean(jnp.mean(first, axis=1) * jnp.mean(gates, axis=1)) * config.experts**2
    return combine, balance


def experts(config: Config, layer: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sparse feed-forward part of [b, s, d], and its balance loss."""
    grouped = x.reshape(config.groups, -1, config.model)
    combine, balance = route(config, layer["router"], grouped)
    dispatch = (combine > 0).astype(x.dtype)
    arrived = jnp.einsum("gsec,gsd->egcd", dispatch, grouped)
    hidden = jax.nn.relu(jnp.einsum("egcd,edf->egcf", arrived, layer["wi"].astype(x.dtype)))
    done = jnp.einsum("egcf,efd->egcd", hidden, layer["wo_expert"].astype(x.dtype))
    return jnp.einsum("gsec,egcd->gsd", combine.astype(x.dtype), done).reshape(x.shape), balance


def training(name: str, about: str, config: Config) -> Sample:
    def moe_loss(params: Tree, batch: Tree) -> jax.Array:
        tables, mask = rope_tables(jnp.arange(config.seq), config.head), causal_mask(config.seq, config.seq)
        x = params["embed"].astype(jnp.bfloat16)[batch["tokens"]]
        balance = jnp.zeros(())
        for number, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer_{number}"):
                x = x + attend(cast(layer), x, tables, mask)
                normed = rms_norm(x, layer["mlp_norm"])
                if "router" in layer:
                    update, extra = experts(config, layer, normed)
                    balance = balance + extra
                else:
                    dense_layer = cast(layer)
                    update = jax.nn.relu(normed @ dense_layer["up"]) @ dense_layer["down"]
                x = x + update
        x = rms_norm(x, params["final_norm"])
        logits = jnp.dot(x, params["head"].astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        return one_hot_loss(logits, batch["targets"]) + 0.01 * balance

    def batch(key: jax.Array) -> Tree:
        text = tokens(key, config.vocab, config.batch, config.seq + 1)
        return {"tokens": text[:, :-1], "targets": text[:, 1:]}

    return training_sample(name, about, moe_loss, weights(config), batch)


MOE = Config(
    layers=6, model=1024, heads=16, head=96, ff=4096, experts=64, groups=128, capacity=40, vocab=32000, batch=64,
    seq=2048,
)  # fmt: skip
TINY = Config(
    layers=2, model=80, heads=8, head=40, ff=96, experts=16, groups=64, capacity=6, vocab=256, batch=32, seq=48
)  # fmt: skip

SAMPLES = (
    training("moe_train", "transformer of 6 layers, every second with 64 experts, batch 64 x 2048: training step", MOE),
    training("moe_tiny", "its twin of 2 layers and 16 experts", TINY),
)

if __name__ == "__main__":
    main(SAMPLES)
