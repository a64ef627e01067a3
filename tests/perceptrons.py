"""One small program for tests of whole searches: a perceptron's training step, and its evaluators."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from programs import arg, case_of

from toast_cli.dimensions import analyse
from toast_cli.hardware import Mesh
from toast_cli.plan.problem import make_problem
from toast_cli.price.evaluator import Evaluator


def perceptron(p: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    loss = lambda p: jnp.sum((x + jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)  # noqa: E731
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p))


CASE = case_of(perceptron, {"down": arg(512, 256), "up": arg(256, 512)}, arg(64, 256), donate=(0,))
DIMENSIONS = analyse(CASE.program)


def evaluator_of(mesh: Mesh) -> Evaluator:
    return Evaluator(make_problem(CASE.program, DIMENSIONS, mesh))
