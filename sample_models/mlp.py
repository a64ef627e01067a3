"""MLP: a training step of a plain multi-layer perceptron, in float32 throughout."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp

from sample_models.common import Sample, Tree, dense, main, training_sample, zeros
from sample_models.layers import gather_loss


@dataclass(frozen=True)
class Config:
    batch: int
    sizes: tuple[int, ...]  # inputs, hidden layers, classes


def forward(params: Tree, x: jax.Array) -> jax.Array:
    *hidden, last = params["layers"]
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def training(name: str, about: str, config: Config, form: str = "bytecode") -> Sample:
    weights = {"layers": [{"w": dense(n, m), "b": zeros(m)} for n, m in pairwise(config.sizes)]}

    def mlp_loss(params: Tree, batch: Tree) -> jax.Array:
        return gather_loss(forward(params, batch["x"]), batch["label"])

    def batch(key: jax.Array) -> Tree:
        data, label = jax.random.split(key)
        return {
            "x": jax.random.normal(data, (config.batch, config.sizes[0])),
            "label": jax.random.randint(label, (config.batch,), 0, config.sizes[-1], jnp.int32),
        }

    return training_sample(name, about, mlp_loss, weights, batch, form=form)


MLP = Config(batch=4096, sizes=(3072, *[16384] * 5, 1024))
TINY = Config(batch=32, sizes=(48, 128, 128, 16))

SAMPLES = (
    training("mlp_train", "perceptron with 5 hidden layers of 16384, batch 4096: training step", MLP),
    training("mlp_tiny", "its twin with 2 hidden layers", TINY, form="text"),
)

if __name__ == "__main__":
    main(SAMPLES)
