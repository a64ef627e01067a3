"""Block: a training step of two Megatron-shaped transformer blocks: one short sequence, very large weights.

Weights and moments are float32, the arithmetic is bfloat16 with float32 norms and softmax. Reshapes split off heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from sample_models.common import Sample, Tree, cast, dense, main, ones, training_sample, zeros
from sample_models.layers import attention, causal_mask, layer_norm

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # queries, keys, values [batch, seq, heads, head]


@dataclass(frozen=True)
class Config:
    layers: int
    model: int
    heads: int
    head: int
    ff: int
    seq: int
    batch: int = 1


def layer_weights(config: Config) -> Tree:
    d, inner = config.model, config.heads * config.head
    return {
        "norm1": {"scale": ones(d), "bias": zeros(d)},
        "wq": dense(d, inner),
        "wk": dense(d, inner),
        "wv": dense(d, inner),
        "wo": dense(inner, d),
        "norm2": {"scale": ones(d), "bias": zeros(d)},
        "up": {"w": dense(d, config.ff), "b": zeros(config.ff)},
        "down": {"w": dense(config.ff, d), "b": zeros(d)},
    }


def block(config: Config, layer: Tree, x: jax.Array, attend: Attend) -> jax.Array:
    layer = cast(layer)
    split = (config.batch, config.seq, config.heads, config.head)
    with jax.named_scope("attention"):
        normed = layer_norm(x, **layer["norm1"])
        q, k, v = ((normed @ layer[name]).reshape(split) for name in ("wq", "wk", "wv"))
        mixed = attend(q, k, v)
        x = x + mixed.reshape(config.batch, config.seq, -1) @ layer["wo"]
    with jax.named_scope("mlp"):
        hidden = jax.nn.gelu(layer_norm(x, **layer["norm2"]) @ layer["up"]["w"] + layer["up"]["b"])
        return x + hidden @ layer["down"]["w"] + layer["down"]["b"]


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return attention(q, k, v, causal_mask(q.shape[1], q.shape[1]))


def training(name: str, about: str, config: Config, attend: Attend = causal, platform: str = "cpu") -> Sample:
    def block_loss(params: Tree, batch: Tree) -> jax.Array:
        x = batch["x"]
        for number, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer_{number}"):
                x = block(config, layer, x, attend)
        return jnp.mean((x - batch["target"]).astype(jnp.float32) ** 2)

    def batch(key: jax.Array) -> Tree:
        shape = (config.batch, config.seq, config.model)
        x, target = (jax.random.normal(part, shape, jnp.bfloat16) for part in jax.random.split(key))
        return {"x": x, "target": target}

    weights = {"layers": [layer_weights(config) for _ in range(config.layers)]}
    # Bytecode with custom calls (TPU kernels) is readable by one version of jaxlib only.
    form = "bytecode" if platform == "cpu" else "portable"
    return training_sample(name, about, block_loss, weights, batch, platform=platform, form=form)


BLOCK = Config(layers=2, model=8192, heads=64, head=128, ff=32768, seq=512)
TINY = Config(layers=2, model=128, heads=16, head=24, ff=512, seq=32)

SAMPLES = (
    training("block_train", "two Megatron-shaped blocks of width 8192 on one sequence of 512: training step", BLOCK),
    training("block_tiny", "its twin of width 128", TINY),
)

if __name__ == "__main__":
    main(SAMPLES)
