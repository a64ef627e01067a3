"""Writes programs whose size is an argument: `python benchmarks/generate.py t2b 54 OUT`, `unrolled 2500 OUT` or
`text 3750 OUT`.

`t2b`: the T2B training step with so many layers (about 560 ops each). `unrolled`: the training step of a recurrence
that runs so many steps without a loop (about 48 ops each, forward and backward), the shape in which programs grow to
hundreds of thousands of ops. `text`: such a recurrence forward (8 ops a step), written at once as StableHLO text
without names or locations.
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


def recurrence_text(steps: int) -> str:
    """StableHLO text of a gated recurrence over `steps` steps that share two weights."""
    state, weight = f"tensor<{BATCH}x{HIDDEN}xf32>", f"tensor<{HIDDEN}x{HIDDEN}xf32>"
    product = f"contracting_dims = [1] x [0] : ({state}, {weight}) -> {state}"
    lines = [
        f"func.func public @main(%s0: {state}, %gate: {weight}, %new: {weight}) -> {state} {{",
        f"%one = stablehlo.constant dense<1.0> : {state}",
    ]
    for k in range(steps):
        lines += [
            f"%a{k} = stablehlo.dot_general %s{k}, %gate, {product}",
            f"%b{k} = stablehlo.logistic %a{k} : {state}",
            f"%c{k} = stablehlo.dot_general %s{k}, %new, {product}",
            f"%d{k} = stablehlo.tanh %c{k} : {state}",
            f"%e{k} = stablehlo.multiply %b{k}, %s{k} : {state}",
            f"%f{k} = stablehlo.subtract %one, %b{k} : {state}",
            f"%g{k} = stablehlo.multiply %f{k}, %d{k} : {state}",
            f"%s{k + 1} = stablehlo.add %e{k}, %g{k} : {state}",
        ]
    return "\n".join([*lines, f"return %s{steps} : {state} }}"])


KINDS = {"t2b": t2b.of_layers, "unrolled": unrolled}


def main(arguments: list[str]) -> int:
    kind, size, path = arguments
    if kind == "text":
        Path(path).write_text(recurrence_text(int(size)))
        return 0
    Path(path).write_bytes(encode(lower(KINDS[kind](int(size))), "bytecode"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
