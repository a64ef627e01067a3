"""A Gemma-like decoder: RMS norms, rotary embeddings, grouped-query attention, gated GeLU, tied embedding, unrolled.

Weights and Adam's moments are float32, the arithmetic is bfloat16 with float32 norms, softmax and logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from sample_models.common import Sample, Tree, Weight, cast, dense, tokens, training_sample, zeros
from sample_models.layers import (
    attention,
    causal_mask,
    grouped_attention,
    one_hot_loss,
    rms_norm,
    rope,
    rope_tables,
)


@dataclass(frozen=True)
class Config:
    """Sizes; `remat` keeps only each layer's input for the backward pass."""

    layers: int
    model: int
    heads: int
    kv_heads: int
    head: int
    ff: int
    vocab: int
    batch: int
    seq: int
    remat: bool = False


def weights(config: Config) -> dict[str, object]:
    return {
        "embed": Weight((config.vocab, config.model), fan_in=config.model),
        "final_norm": zeros(config.model),
        "layers": [layer_weights(config) for _ in range(config.layers)],
    }


def layer_weights(config: Config) -> dict[str, Weight]:
    d, h, g, k = config.model, config.heads, config.kv_heads, config.head
    return {
        "attention_norm": zeros(d),
        "wq": dense(d, h, k),
        "wk": dense(d, g, k),
        "wv": dense(d, g, k),
        "wo": dense(h, k, d, inputs=2),
        "mlp_norm": zeros(d),
        "gate": dense(d, config.ff),
        "up": dense(d, config.ff),
        "down": dense(config.ff, d),
    }


def attend(layer: Tree, x: jax.Array, tables: tuple[jax.Array, jax.Array], mask: jax.Array) -> jax.Array:
    x = rms_norm(x, layer["attention_norm"])
    q = rope(jnp.einsum("bsd,dhk->bshk", x, layer["wq"]), tables)
    k = rope(jnp.einsum("bsd,dgk->bsgk", x, layer["wk"]), tables)
    v = jnp.einsum("bsd,dgk->bsgk", x, layer["wv"])
    mixed = attention(q, k, v, mask) if q.shape == k.shape else grouped_attention(q, k, v, mask)
    return jnp.einsum("bshk,hkd->bsd", mixed, layer["wo"])


def feed_forward(layer: Tree, x: jax.Array) -> jax.Array:
    x = rms_norm(x, layer["mlp_norm"])
    return (jax.nn.gelu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]


def block(layer: Tree, x: jax.Array, tables: tuple[jax.Array, jax.Array], mask: jax.Array) -> jax.Array:
    layer = cast(layer)
    with jax.named_scope("attention"):
        x = x + attend(layer, x, tables, mask)
    with jax.named_scope("mlp"):
        return x + feed_forward(layer, x)


def loss(config: Config, params: Tree, batch: Tree) -> jax.Array:
    seq = config.seq
    tables, mask = rope_tables(jnp.arange(seq), config.head), causal_mask(seq, seq)
    run = jax.checkpoint(block) if config.remat else block
    embed = params["embed"].astype(jnp.bfloat16)
    x = embed[batch["tokens"]] * jnp.bfloat16(config.model**0.5)
    for number, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{number}"):
            x = run(layer, x, tables, mask)
    x = rms_norm(x, params["final_norm"])
    logits = jnp.einsum("bsd,vd->bsv", x, embed, preferred_element_type=jnp.float32)
    return one_hot_loss(logits, batch["targets"])


def training(name: str, about: str, config: Config, form: str = "bytecode") -> Sample:
    """The training step of a decoder of these sizes."""

    def batch(key: jax.Array) -> Tree:
        text = tokens(key, config.vocab, config.batch, config.seq + 1)
        return {"tokens": text[:, :-1], "targets": text[:, 1:]}

    def decoder_loss(params: Tree, batch: Tree) -> jax.Array:
        return loss(config, params, batch)

    return training_sample(name, about, decoder_loss, weights(config), batch, form=form)
