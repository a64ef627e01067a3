"""A program read from HLO is the program that it was made from: its plans mean the same, and cost the same memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from programs import Case, arg, evaluator_of, round_mesh, source_of_text

from toast_cli import xla
from toast_cli.frontend import load
from toast_cli.tactics import strategies

N = 16  # batch, width and hidden units: arrays of all are of one shape


def loss(p: Any, x: Any) -> Any:
    for layer in p["layers"]:
        x = x + jax.nn.relu(jax.nn.relu(x @ layer["up"]) @ layer["down"])
    return jnp.mean(jax.nn.relu(x) ** 2)


def step(p: Any, m: Any, x: Any) -> Any:
    g = jax.grad(loss)(p, x)
    m = jax.tree.map(lambda a, b: jnp.where(jnp.isnan(b), 0.0, 0.9 * a + b), m, g)
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, m), m


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """The step as JAX lowers it, and as it is read from the HLO that is made of that."""
    p = {"layers": [{"up": arg(N, N), "down": arg(N, N)} for _ in range(3)]}
    module = jax.jit(step, donate_argnums=(0, 1)).lower(p, p, arg(N, N)).compiler_ir("stablehlo")
    hlo = xla.stablehlo_to_hlo_text(xla.write_bytecode(module))
    sources = [source_of_text(module.operation.get_asm(enable_debug_info=True)), load("x.hlo", content=hlo.encode())]
    return [Case(source, evaluator_of(source, round_mesh(data=4, model=2))) for source in sources]


def test_arguments_have_their_paths(cases: list[Case]) -> None:
    paths = [[argument.path for argument in case.program.arguments] for case in cases]
    assert paths[0] == paths[1] and "p['layers'][0]['up']" in paths[0]


def test_strategies_communicate_alike(cases: list[Case]) -> None:
    """XLA makes one array of all zeros of one shape, which would tie the batch to the width."""
    found = [{name: case.collectives(plan) for name, plan in strategies(case.problem).items()} for case in cases]
    assert found[0] == found[1] and found[0]["fsdp"]


def test_strategies_hold_alike(cases: list[Case]) -> None:
    """XLA prints every gradient where its weight is updated, behind all that the updates before it need."""
    peaks = [
        {name: case.evaluator.cost(plan).peak_bytes for name, plan in strategies(case.problem).items()}
        for case in cases
    ]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.15)
