"""Writes programs whose size is an argument: `python benchmarks/generate.py t2b 54 OUT` or `unrolled 2500 OUT`.

`t2b`: the T2B training step with so many layers (about 560 ops each). `unrolled`: the training step of a recurrence
that runs so many steps without a loop (about 48 ops each, forward and backward), the shape in which programs grow to
hundreds of thousands of ops.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

from sample_models import t2b
from sample_models.common import Sample, Tree, dense, encode, lower, training_sample

BATCH, INPUT, HIDDEN = 512, 256, 1024


def unrolled(steps: int) -> Sample:
    """A gated recurrence over `steps` inputs, unrolled."""

    def loss(params: Tree, batch: Tree) -> jax.Array:
        state = jnp.zeros((BATCH, HIDDEN))
        for step in range(steps):
            entering = jnp.concatenate([batch["x"][step], state], axis=1)
            gate, new = jax.nn.sigmoid(entering @ params["gate"]), jnp.tanh(entering @ params["new"])
            state = gate * state + (1 - gate) * new
        return jnp.mean((state @ params["out"] - batch["y"]) ** 2)

    weights = {
        "gate": dense(INPUT + HIDDEN, HIDDEN), "new": dense(INPUT + HIDDEN, HIDDEN), "out": dense(HIDDEN, INPUT),
    }  # fmt: skip

    def batch(key: jax.Array) -> Tree:
        return {"x": jax.random.normal(key, (steps, BATCH, INPUT)), "y": jax.random.normal(key, (BATCH, INPUT))}

    return training_sample(
        f"unrolled_{steps}", f"recurrence of {steps} steps, unrolled: training step", loss, weights, batch
    )


KINDS = {"t2b": t2b.of_layers, "unrolled": unrolled}


def main(arguments: list[str]) -> int:
    kind, size, path = arguments
    Path(path).write_bytes(encode(lower(KINDS[kind](int(size))), "bytecode"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
