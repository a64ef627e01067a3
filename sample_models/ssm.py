"""A state-space language model: gated diagonal recurrences (Griffin's RG-LRU, De et al. 2024), an associative scan.

Weights and moments are float32, products bfloat16, the recurrence float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from sample_models.common import Sample, Tree, Weight, cast, dense, main, tokens, training_sample, zeros
from sample_models.layers import one_hot_loss, rms_norm


@dataclass(frozen=True)
class Config:
    layers: int
    model: int
    state: int
    vocab: int
    batch: int
    seq: int


def layer_weights(config: Config) -> Tree:
    d, n = config.model, config.state
    return {
        "norm": zeros(d),
        "drive": dense(d, n),
        "input_gate": dense(d, n),
        "decay_gate": dense(d, n),
        "output_gate": dense(d, n),
        "decay": Weight((n,), fill=2.0),
        "out": dense(n, d),
    }


def recurrence(decay: jax.Array, drive: jax.Array) -> jax.Array:
    """h[t] = decay[t] * h[t-1] + drive[t] along axis 1, in log2(seq) parallel steps."""

    def compose(
        first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        return first[0] * second[0], first[1] * second[0] + second[1]

    return lax.associative_scan(compose, (decay, drive), axis=1)[1]


def block(layer: Tree, x: jax.Array) -> jax.Array:
    narrow = cast(layer)
    normed = rms_norm(x, layer["norm"])
    opened = jax.nn.sigmoid((normed @ narrow["decay_gate"]).astype(jnp.float32))
    log_decay = -8 * opened * jax.nn.softplus(-layer["decay"])
    gate = jax.nn.sigmoid(normed @ narrow["input_gate"])
    drive = (gate * (normed @ narrow["drive"])).astype(jnp.float32)
    hidden = recurrence(jnp.exp(log_decay), jnp.sqrt(1 - jnp.exp(2 * log_decay)) * drive)
    return x + (hidden.astype(x.dtype) * jax.nn.gelu(normed @ narrow["output_gate"])) @ narrow["out"]


def training(name: str, about: str, config: Config) -> Sample:
    def ssm_loss(params: Tree, batch: Tree) -> jax.Array:
        x = params["embed"].astype(jnp.bfloat16)[batch["tokens"]]
        for number, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer_{number}"):
                x = block(layer, x)
        x = rms_norm(x, params["final_norm"])
        logits = jnp.dot(x, params["head"].astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        return one_hot_loss(logits, batch["targets"])

    def batch(key: jax.Array) -> Tree:
        text = tokens(key, config.vocab, config.batch, config.seq + 1)
        return {"tokens": text[:, :-1], "targets": text[:, 1:]}

    weights = {
        "embed": Weight((config.vocab, config.model), fan_in=1),
        "layers": [layer_weights(config) for _ in range(config.layers)],
        "final_norm": zeros(config.model),
        "head": dense(config.model, config.vocab),
    }
    return training_sample(name, about, ssm_loss, weights, batch)


SSM = Config(layers=8, model=2048, state=2560, vocab=32000, batch=32, seq=1024)
TINY = Config(layers=2, model=48, state=64, vocab=160, batch=16, seq=8)

SAMPLES = (
    training(
        "ssm_train", "state-space language model, 8 layers by associative scan, batch 32 x 1024: training step", SSM
    ),
    training("ssm_tiny", "its twin of 2 layers and 8 steps", TINY),
)

if __name__ == "__main__":
    main(SAMPLES)
