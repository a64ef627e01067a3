"""A Llama-like decoder that scans over stacked layer weights and recomputes each layer in the backward pass.

Weights and moments are float32, the arithmetic is bfloat16. Head dimensions are split off by reshapes, not by einsum.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from sample_models.common import Sample, Tree, Weight, cast, dense, main, stacked, tokens, training_sample, zeros
from sample_models.layers import attention, causal_mask, gather_loss, rms_norm, rope, rope_tables


@dataclass(frozen=True)
class Config:
    layers: int
    model: int
    heads: int
    head: int
    ff: int
    vocab: int
    batch: int
    seq: int


def weights(config: Config) -> Tree:
    d, inner = config.model, config.heads * config.head
    layer = {
        "attention_norm": zeros(d),
        "wq": dense(d, inner),
        "wk": dense(d, inner),
        "wv": dense(d, inner),
        "wo": dense(inner, d),
        "mlp_norm": zeros(d),
        "gate": dense(d, config.ff),
        "up": dense(d, config.ff),
        "down": dense(config.ff, d),
    }
    return {
        "embed": Weight((config.vocab, d), fan_in=1),
        "layers": stacked(layer, config.layers),
        "final_norm": zeros(d),
        "head": dense(d, config.vocab),
    }


def block(config: Config, x: jax.Array, layer: Tree) -> jax.Array:
    batch, seq, _ = x.shape
    layer = cast(layer)
    tables = rope_tables(jnp.arange(seq), config.head)
    with jax.named_scope("attention"):
        normed = rms_norm(x, layer["attention_norm"])
        q, k, v = ((normed @ layer[w]).reshape(batch, seq, config.heads, config.head) for w in ("wq", "wk", "wv"))
        mixed = attention(rope(q, tables), rope(k, tables), v, causal_mask(seq, seq))
        x = x + mixed.reshape(batch, seq, config.heads * config.head) @ layer["wo"]
    with jax.named_scope("mlp"):
        normed = rms_norm(x, layer["mlp_norm"])
        return x + (jax.nn.silu(normed @ layer["gate"]) * (normed @ layer["up"])) @ layer["down"]


def training(name: str, about: str, config: Config) -> Sample:
    def body(x: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        return block(config, x, layer), None

    def scanned_loss(params: Tree, batch: Tree) -> jax.Array:
        x = params["embed"].astype(jnp.bfloat16)[batch["tokens"]]
        x, _ = lax.scan(jax.checkpoint(body), x, params["layers"])
        x = rms_norm(x, params["final_norm"])
        logits = jnp.dot(x, params["head"].astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        return gather_loss(logits, batch["targets"])

    def batch(key: jax.Array) -> Tree:
        text = tokens(key, config.vocab, config.batch, config.seq + 1)
        return {"tokens": text[:, :-1], "targets": text[:, 1:]}

    return training_sample(name, about, scanned_loss, weights(config), batch)


SCAN = Config(layers=24, model=2048, heads=16, head=128, ff=5632, vocab=32000, batch=64, seq=1024)
TINY = Config(layers=3, model=64, heads=8, head=24, ff=128, vocab=256, batch=16, seq=32)

SAMPLES = (
    training("scan_train", "decoder scanned over 24 stacked layers with remat, batch 64 x 1024: training step", SCAN),
    training("scan_tiny", "its twin of 3 layers", TINY),
)

if __name__ == "__main__":
    main(SAMPLES)
