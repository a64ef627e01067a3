"""ResNet-50 (v1.5: the stride sits on the 3 x 3 convolution) with batch norm; its running statistics are state.

Weights, statistics and moments are float32, convolutions bfloat16; NHWC.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from sample_models.common import Sample, Tree, adam, dense, initialise, main, moments, ones, tokens, zeros
from sample_models.layers import gather_loss


@dataclass(frozen=True)
class Config:
    batch: int
    image: int
    stem: int  # channels after the first convolution
    stages: tuple[int, ...]  # bottleneck blocks per stage; channels double from stage to stage
    classes: int
    colours: int = 3
    expansion: int = 4


# ---------------------------------------------------------------- weights


def conv_weights(size: int, inputs: int, outputs: int) -> Tree:
    return {"w": dense(size, size, inputs, outputs, inputs=3), "scale": ones(outputs), "bias": zeros(outputs)}


def block_weights(config: Config, inputs: int, middle: int, shortcut: bool) -> Tree:
    outputs = middle * config.expansion
    block = {
        "conv1": conv_weights(1, inputs, middle),
        "conv2": conv_weights(3, middle, middle),
        "conv3": conv_weights(1, middle, outputs),
    }
    return block | {"shortcut": conv_weights(1, inputs, outputs)} if shortcut else block


def weights(config: Config) -> Tree:
    stages, inputs = [], config.stem
    for number, count in enumerate(config.stages):
        middle = config.stem * 2**number
        blocks = []
        for index in range(count):
            blocks.append(block_weights(config, inputs, middle, shortcut=index == 0))
            inputs = middle * config.expansion
        stages.append(blocks)
    return {
        "stem": conv_weights(7, config.colours, config.stem),
        "stages": stages,
        "head": {"w": dense(inputs, config.classes), "b": zeros(config.classes)},
    }


def fresh_statistics(params: Tree) -> Tree:
    """Running mean and variance for every batch norm, in a tree shaped like the weights (the head has none)."""
    if isinstance(params, list):
        return [fresh_statistics(part) for part in params]
    if "scale" in params:
        return {"mean": jnp.zeros_like(params["bias"]), "variance": jnp.ones_like(params["scale"])}
    return {name: fresh_statistics(part) for name, part in params.items() if name != "head"}


# ---------------------------------------------------------------- layers


def conv_norm(params: Tree, running: Tree, x: jax.Array, stride: int = 1) -> tuple[jax.Array, Tree]:
    """Convolution and batch norm over this batch; also the running statistics, moved a tenth of the way."""
    w = params["w"].astype(jnp.bfloat16)
    x = lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=(0, 1, 2))
    variance = jnp.mean(wide * wide, axis=(0, 1, 2)) - mean * mean
    normed = (wide - mean) * (lax.rsqrt(variance + 1e-5) * params["scale"]) + params["bias"]
    moved = {
        "mean": 0.9 * running["mean"] + 0.1 * lax.stop_gradient(mean),
        "variance": 0.9 * running["variance"] + 0.1 * lax.stop_gradient(variance),
    }
    return normed.astype(jnp.bfloat16), moved


def bottleneck(params: Tree, running: Tree, x: jax.Array, stride: int) -> tuple[jax.Array, Tree]:
    moved = {}
    y, moved["conv1"] = conv_norm(params["conv1"], running["conv1"], x)
    y, moved["conv2"] = conv_norm(params["conv2"], running["conv2"], jax.nn.relu(y), stride)
    y, moved["conv3"] = conv_norm(params["conv3"], running["conv3"], jax.nn.relu(y))
    if "shortcut" in params:
        x, moved["shortcut"] = conv_norm(params["shortcut"], running["shortcut"], x, stride)
    return jax.nn.relu(x + y), moved


def max_pool(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def resnet(params: Tree, running: Tree, image: jax.Array) -> tuple[jax.Array, Tree]:
    """Logits f32[batch, classes], and the running statistics after this batch."""
    x, stem = conv_norm(params["stem"], running["stem"], image.astype(jnp.bfloat16), stride=2)
    x = max_pool(jax.nn.relu(x))
    stages: list[list[Tree]] = []
    for number, blocks in enumerate(params["stages"]):
        stages.append([])
        for index, block in enumerate(blocks):
            with jax.named_scope(f"stage_{number}/block_{index}"):
                x, moved = bottleneck(block, running["stages"][number][index], x, 2 if number and not index else 1)
            stages[-1].append(moved)
    pooled = jnp.mean(x.astype(jnp.float32), axis=(1, 2))
    return pooled @ params["head"]["w"] + params["head"]["b"], {"stem": stem, "stages": stages}


def training(name: str, about: str, config: Config) -> Sample:
    def resnet_loss(params: Tree, running: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        logits, running = resnet(params, running, batch["image"])
        return gather_loss(logits, batch["label"]), running

    def train_step(
        params: Tree, mu: Tree, nu: Tree, count: jax.Array, running: Tree, batch: Tree
    ) -> tuple[Tree, ...]:  # fmt: skip
        (value, running), gradients = jax.value_and_grad(resnet_loss, has_aux=True)(params, running, batch)
        params, mu, nu, count = adam(params, gradients, mu, nu, count, 1e-3)
        return params, mu, nu, count, running, value

    def init(key: jax.Array) -> tuple[Tree, ...]:
        weight, image, label = jax.random.split(key, 3)
        params = initialise(weight, weights(config))
        shape = (config.batch, config.image, config.image, config.colours)
        batch = {"image": jax.random.normal(image, shape), "label": tokens(label, config.classes, config.batch)}
        return params, *moments(params), jnp.zeros((), jnp.int32), fresh_statistics(params), batch

    return Sample(name, about, train_step, init, donate=(0, 1, 2, 3, 4))


RESNET50 = Config(batch=1024, image=224, stem=64, stages=(3, 4, 6, 3), classes=1000)
TINY = Config(batch=48, image=24, stem=16, stages=(1, 1), classes=80)

SAMPLES = (
    training(
        "resnet50_train",
        "ResNet-50 v1.5 with running batch statistics, batch 1024 at 224 x 224: training step",
        RESNET50,
    ),
    training("resnet50_tiny", "its twin of 2 blocks at 24 x 24", TINY),
)

if __name__ == "__main__":
    main(SAMPLES)
