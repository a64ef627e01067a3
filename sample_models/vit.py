"""ViT: a training step of a vision transformer shaped like ViT-L/16 with mean pooling instead of a class token.

Weights and moments are float32, the arithmetic is bfloat16 with float32 norms and softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from sample_models.common import Sample, Tree, Weight, cast, dense, main, ones, tokens, training_sample, zeros
from sample_models.layers import attention, gather_loss, layer_norm


@dataclass(frozen=True)
class Config:
    layers: int
    model: int
    heads: int
    head: int
    ff: int
    classes: int
    batch: int
    image: int  # pixels along each side
    patch: int
    colours: int = 3


def layer_weights(config: Config) -> Tree:
    d, h, k = config.model, config.heads, config.head
    return {
        "norm1": {"scale": ones(d), "bias": zeros(d)},
        "qkv": Weight((d, 3, h, k), fan_in=d),
        "wo": dense(h, k, d, inputs=2),
        "norm2": {"scale": ones(d), "bias": zeros(d)},
        "up": {"w": dense(d, config.ff), "b": zeros(config.ff)},
        "down": {"w": dense(config.ff, d), "b": zeros(d)},
    }


def weights(config: Config) -> Tree:
    patches, d = (config.image // config.patch) ** 2, config.model
    return {
        "patch": {"w": dense(config.patch**2 * config.colours, d), "b": zeros(d)},
        "position": Weight((patches, d), fan_in=2500),
        "layers": [layer_weights(config) for _ in range(config.layers)],
        "norm": {"scale": ones(d), "bias": zeros(d)},
        "head": {"w": dense(d, config.classes), "b": zeros(config.classes)},
    }


def patches_of(config: Config, image: jax.Array) -> jax.Array:
    """[batch, height, width, colours] -> [batch, patches, patch * patch * colours]."""
    side = config.image // config.patch
    cut = image.reshape(config.batch, side, config.patch, side, config.patch, config.colours)
    return cut.transpose(0, 1, 3, 2, 4, 5).reshape(config.batch, side * side, -1)


def block(layer: Tree, x: jax.Array) -> jax.Array:
    layer = cast(layer)
    with jax.named_scope("attention"):
        q, k, v = jnp.einsum("bsd,dchk->cbshk", layer_norm(x, **layer["norm1"]), layer["qkv"])
        x = x + jnp.einsum("bshk,hkd->bsd", attention(q, k, v), layer["wo"])
    with jax.named_scope("mlp"):
        hidden = jax.nn.gelu(layer_norm(x, **layer["norm2"]) @ layer["up"]["w"] + layer["up"]["b"], approximate=False)
        return x + hidden @ layer["down"]["w"] + layer["down"]["b"]


def training(name: str, about: str, config: Config, form: str = "bytecode") -> Sample:
    def vit_loss(params: Tree, batch: Tree) -> jax.Array:
        patch = cast(params["patch"])
        x = patches_of(config, batch["image"].astype(jnp.bfloat16)) @ patch["w"] + patch["b"]
        x = x + params["position"].astype(jnp.bfloat16)
        for number, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer_{number}"):
                x = block(layer, x)
        pooled = jnp.mean(layer_norm(x, **params["norm"]).astype(jnp.float32), axis=1)
        return gather_loss(pooled @ params["head"]["w"] + params["head"]["b"], batch["label"])

    def batch(key: jax.Array) -> Tree:
        image, label = jax.random.split(key)
        shape = (config.batch, config.image, config.image, config.colours)
        return {"image": jax.random.normal(image, shape), "label": tokens(label, config.classes, config.batch)}

    return training_sample(name, about, vit_loss, weights(config), batch, form=form)


VIT = Config(layers=24, model=1024, heads=16, head=64, ff=4096, classes=1000, batch=512, image=224, patch=16)
TINY = Config(layers=2, model=96, heads=16, head=24, ff=128, classes=80, batch=32, image=16, patch=2)

SAMPLES = (
    training(
        "vit_train", "ViT-L/16 without class token, 24 layers unrolled, batch 512 at 224 x 224: training step", VIT
    ),
    training("vit_tiny", "its twin of 2 layers at 16 x 16", TINY, form="portable"),
)

if __name__ == "__main__":
    main(SAMPLES)
