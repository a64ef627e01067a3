"""RNN: a training step of a stacked LSTM language model; each layer scans over time, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from sample_models.common import Sample, Tree, Weight, dense, main, tokens, training_sample, zeros
from sample_models.layers import gather_loss


@dataclass(frozen=True)
class Config:
    layers: int
    model: int  # embedding width
    hidden: int
    vocab: int
    batch: int
    seq: int


def weights(config: Config) -> Tree:
    inputs, gates = [config.model, *[config.hidden] * (config.layers - 1)], 4 * config.hidden
    return {
        "embed": Weight((config.vocab, config.model), fan_in=1),
        "layers": [
            {"wx": dense(n, gates), "wh": dense(config.hidden, gates), "b": zeros(gates)}
            for n in inputs
        ],
        "head": dense(config.hidden, config.vocab),
    }  # fmt: skip


def lstm(layer: Tree, x: jax.Array) -> jax.Array:
    """Hidden states [seq, batch, hidden] of inputs [seq, batch, inputs]."""

    def cell(state: tuple[jax.Array, jax.Array], driven: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        hidden, memory = state
        into, forget, out, candidate = jnp.split(driven + hidden @ layer["wh"], 4, axis=-1)
        memory = jax.nn.sigmoid(forget + 1) * memory + jax.nn.sigmoid(into) * jnp.tanh(candidate)
        hidden = jax.nn.sigmoid(out) * jnp.tanh(memory)
        return (hidden, memory), hidden

    driven = x @ layer["wx"] + layer["b"]
    start = jnp.zeros((x.shape[1], layer["wh"].shape[0]), x.dtype)
    _, hidden = lax.scan(cell, (start, start), driven)
    return hidden


def training(name: str, about: str, config: Config, form: str = "bytecode") -> Sample:
    def lstm_loss(params: Tree, batch: Tree) -> jax.Array:
        x = params["embed"][batch["tokens"]].swapaxes(0, 1)
        for number, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer_{number}"):
                x = lstm(layer, x)
        return gather_loss(x.swapaxes(0, 1) @ params["head"], batch["targets"])

    def batch(key: jax.Array) -> Tree:
        text = tokens(key, config.vocab, config.batch, config.seq + 1)
        return {"tokens": text[:, :-1], "targets": text[:, 1:]}

    return training_sample(name, about, lstm_loss, weights(config), batch, form=form)


RNN = Config(layers=4, model=1024, hidden=2048, vocab=32000, batch=512, seq=128)
TINY = Config(layers=2, model=48, hidden=64, vocab=160, batch=32, seq=8)

SAMPLES = (
    training("rnn_train", "LSTM language model, 4 layers scanned over 128 steps, batch 512: training step", RNN),
    training("rnn_tiny", "its twin of 2 layers and 8 steps", TINY, form="portable"),
)

if __name__ == "__main__":
    main(SAMPLES)
