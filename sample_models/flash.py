"""Flash: the training step of two Megatron-shaped blocks whose attention is JAX's Pallas kernel for TPU.

Long sequences, weights and moments in float32, the arithmetic in bfloat16. The kernel runs on TPUs only, so that this
model has no tiny twin.
"""

from __future__ import annotations

from math import sqrt

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

from sample_models.block import Config, layer_weights
from sample_models.common import Sample, Tree, cast, main, training_sample
from sample_models.layers import layer_norm


def block(config: Config, layer: Tree, x: jax.Array) -> jax.Array:
    layer = cast(layer)
    split = (config.batch, config.seq, config.heads, config.head)
    with jax.named_scope("attention"):
        normed = layer_norm(x, **layer["norm1"])
        q, k, v = ((normed @ layer[name]).reshape(split).swapaxes(1, 2) for name in ("wq", "wk", "wv"))
        mixed = flash_attention(q, k, v, causal=True, sm_scale=1 / sqrt(config.head)).swapaxes(1, 2)
        x = x + mixed.reshape(config.batch, config.seq, -1) @ layer["wo"]
    with jax.named_scope("mlp"):
        hidden = jax.nn.gelu(layer_norm(x, **layer["norm2"]) @ layer["up"]["w"] + layer["up"]["b"])
        return x + hidden @ layer["down"]["w"] + layer["down"]["b"]


def training(name: str, about: str, config: Config) -> Sample:
    def flash_loss(params: Tree, batch: Tree) -> jax.Array:
        x = batch["x"]
        for number, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer_{number}"):
                x = block(config, layer, x)
        return jnp.mean((x - batch["target"]).astype(jnp.float32) ** 2)

    def batch(key: jax.Array) -> Tree:
        shape = (config.batch, config.seq, config.model)
        x, target = (jax.random.normal(part, shape, jnp.bfloat16) for part in jax.random.split(key))
        return {"x": x, "target": target}

    weights = {"layers": [layer_weights(config) for _ in range(config.layers)]}
    # Bytecode with custom calls is readable by one version of jaxlib only.
    return training_sample(name, about, flash_loss, weights, batch, platform="tpu", form="portable")


FLASH = Config(layers=2, model=4096, heads=32, head=128, ff=16384, seq=4096, batch=8)

SAMPLES = (training("flash_train", "two blocks with Pallas flash attention, batch 8 x 4096: training step", FLASH),)

if __name__ == "__main__":
    main(SAMPLES)
