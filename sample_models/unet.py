"""U-Net: one training step of a diffusion model (noise prediction), shaped like ADM's 64 x 64 network; NHWC.

Weights and moments are float32, the arithmetic is bfloat16 with float32 norms and softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from sample_models.common import Sample, Tree, cast, dense, main, ones, training_sample, zeros
from sample_models.layers import attention


@dataclass(frozen=True)
class Config:
    batch: int
    image: int  # pixels along each side
    colours: int
    base: int  # channels of the first level
    multiples: tuple[int, ...]  # channels of each level / base; resolution halves from level to level
    blocks: int  # residual blocks per level, one more on the way up
    attention_levels: tuple[int, ...]
    heads: int
    groups: int
    time: int  # width of the time embedding


# ---------------------------------------------------------------- weights


def conv_weights(size: int, inputs: int, outputs: int) -> Tree:
    return {"w": dense(size, size, inputs, outputs, inputs=3), "b": zeros(outputs)}


def norm_weights(channels: int) -> Tree:
    return {"scale": ones(channels), "bias": zeros(channels)}


def block_weights(config: Config, inputs: int, outputs: int, attends: bool) -> Tree:
    block = {
        "norm1": norm_weights(inputs),
        "conv1": conv_weights(3, inputs, outputs),
        "time": {"w": dense(config.time, outputs), "b": zeros(outputs)},
        "norm2": norm_weights(outputs),
        "conv2": conv_weights(3, outputs, outputs),
    }
    if inputs != outputs:
        block["skip"] = conv_weights(1, inputs, outputs)
    if attends:
        block["attention"] = {
            "norm": norm_weights(outputs),
            **{name: dense(outputs, outputs) for name in ("wq", "wk", "wv", "wo")},
        }
    return block


def weights(config: Config) -> Tree:
    """Walks down and up once, noting the channels that each skip connection carries."""
    channels = config.base
    skips, down, up = [channels], [], []
    for level, multiple in enumerate(config.multiples):
        blocks = []
        for _ in range(config.blocks):
            blocks.append(block_weights(config, channels, config.base * multiple, level in config.attention_levels))
            channels = config.base * multiple
            skips.append(channels)
        down.append({"blocks": blocks})
        if level < len(config.multiples) - 1:
            down[-1]["downsample"] = conv_weights(3, channels, channels)
            skips.append(channels)
    middle = [block_weights(config, channels, channels, attends) for attends in (True, False)]
    for level, multiple in reversed(list(enumerate(config.multiples))):
        blocks = []
        for _ in range(config.blocks + 1):
            inputs = channels + skips.pop()
            blocks.append(block_weights(config, inputs, config.base * multiple, level in config.attention_levels))
            channels = config.base * multiple
        up.append({"blocks": blocks})
        if level > 0:
            up[-1]["upsample"] = conv_weights(3, channels, channels)
    return {
        "time": [
            {"w": dense(config.base, config.time), "b": zeros(config.time)},
            {"w": dense(config.time, config.time), "b": zeros(config.time)},
        ],
        "input": conv_weights(3, config.colours, config.base),
        "down": down,
        "middle": middle,
        "up": up,
        "output_norm": norm_weights(channels),
        "output": conv_weights(3, channels, config.colours),
    }


# ---------------------------------------------------------------- layers


def conv(params: Tree, x: jax.Array, stride: int = 1) -> jax.Array:
    x = lax.conv_general_dilated(
        x, params["w"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )  # fmt: skip
    return x + params["b"]


def linear(params: Tree, x: jax.Array) -> jax.Array:
    return x @ params["w"] + params["b"]


def group_norm(params: Tree, x: jax.Array, groups: int) -> jax.Array:
    batch, height, width, channels = x.shape
    wide = x.astype(jnp.float32).reshape(batch, height, width, groups, channels // groups)
    mean = jnp.mean(wide, axis=(1, 2, 4), keepdims=True)
    variance = jnp.mean((wide - mean) ** 2, axis=(1, 2, 4), keepdims=True)
    normed = ((wide - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    return (normed * params["scale"] + params["bias"]).astype(x.dtype)


def spatial_attention(config: Config, params: Tree, x: jax.Array) -> jax.Array:
    batch, height, width, channels = x.shape
    flat = group_norm(params["norm"], x, config.groups).reshape(batch, height * width, channels)
    split = (batch, height * width, config.heads, channels // config.heads)
    q, k, v = ((flat @ params[name]).reshape(split) for name in ("wq", "wk", "wv"))
    mixed = attention(q, k, v).reshape(batch, height * width, channels) @ params["wo"]
    return x + mixed.reshape(x.shape)


def residual_block(config: Config, params: Tree, x: jax.Array, time: jax.Array) -> jax.Array:
    params = cast(params)
    y = conv(params["conv1"], jax.nn.silu(group_norm(params["norm1"], x, config.groups)))
    y = y + linear(params["time"], jax.nn.silu(time))[:, None, None, :]
    y = conv(params["conv2"], jax.nn.silu(group_norm(params["norm2"], y, config.groups)))
    x = y + (conv(params["skip"], x) if "skip" in params else x)
    return spatial_attention(config, params["attention"], x) if "attention" in params else x


def upsample(x: jax.Array) -> jax.Array:
    """Nearest neighbour, twice the pixels along each side."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def time_embedding(config: Config, params: Tree, time: jax.Array) -> jax.Array:
    half = config.base // 2
    frequency = jnp.exp(-jnp.log(10_000.0) * jnp.arange(half, dtype=jnp.float32) / half)
    angle = time[:, None] * 1000 * frequency
    x = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1).astype(jnp.bfloat16)
    first, second = cast(params)
    return linear(second, jax.nn.silu(linear(first, x)))


# ---------------------------------------------------------------- the network


def unet(config: Config, params: Tree, x: jax.Array, time: jax.Array) -> jax.Array:
    """Predicted noise, f32[batch, height, width, colours]."""
    run = partial(residual_block, config)
    time = time_embedding(config, params["time"], time)
    x = conv(cast(params["input"]), x.astype(jnp.bfloat16))
    skips = [x]
    for number, level in enumerate(params["down"]):
        with jax.named_scope(f"down_{number}"):
            for block in level["blocks"]:
                x = run(block, x, time)
                skips.append(x)
            if "downsample" in level:
                x = conv(cast(level["downsample"]), x, stride=2)
                skips.append(x)
    with jax.named_scope("middle"):
        for block in params["middle"]:
            x = run(block, x, time)
    for number, level in enumerate(params["up"]):
        with jax.named_scope(f"up_{number}"):
            for block in level["blocks"]:
                x = run(block, jnp.concatenate([x, skips.pop()], axis=-1), time)
            if "upsample" in level:
                x = conv(cast(level["upsample"]), upsample(x))
    x = jax.nn.silu(group_norm(params["output_norm"], x, config.groups))
    return conv(cast(params["output"]), x).astype(jnp.float32)


def training(name: str, about: str, config: Config) -> Sample:
    def diffusion_loss(params: Tree, batch: Tree) -> jax.Array:
        """Mean squared error of the predicted noise under a cosine noise schedule."""
        angle = (jnp.pi / 2 * batch["time"])[:, None, None, None]
        noisy = jnp.cos(angle) * batch["image"] + jnp.sin(angle) * batch["noise"]
        return jnp.mean((unet(config, params, noisy, batch["time"]) - batch["noise"]) ** 2)

    def batch(key: jax.Array) -> Tree:
        image, noise, time = jax.random.split(key, 3)
        shape = (config.batch, config.image, config.image, config.colours)
        return {
            "image": jax.random.normal(image, shape),
            "noise": jax.random.normal(noise, shape),
            "time": jax.random.uniform(time, (config.batch,)),
        }

    return training_sample(name, about, diffusion_loss, weights(config), batch, rate=3e-4)


UNET = Config(
    batch=16, image=64, colours=3, base=192, multiples=(1, 2, 3, 4), blocks=3, attention_levels=(1, 2, 3), heads=6,
    groups=32, time=768,
)  # fmt: skip
TINY = Config(
    batch=32, image=8, colours=3, base=48, multiples=(1, 2), blocks=1, attention_levels=(1,), heads=4, groups=8,
    time=80,
)  # fmt: skip

SAMPLES = (
    training("unet_train", "diffusion U-Net at 64 x 64, attention at 32, 16 and 8, batch 16: training step", UNET),
    training("unet_tiny", "its twin of 2 levels at 8 x 8", TINY),
)

if __name__ == "__main__":
    main(SAMPLES)
