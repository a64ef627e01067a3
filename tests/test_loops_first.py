"""What may run before a loop or after it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from programs import PLAIN, arg, evaluator_of, round_mesh, source_of

from toast_cli.program.ops import DOT_GENERAL


def test_a_product_waits_for_a_loop_inside_another_loop_as_well() -> None:
    """The gradient of an output projection, beside the backward loop of one microbatch."""

    def microbatch(x: Any, w: Any) -> Any:
        first, second = jnp.sort(x @ w), jnp.sort(jnp.tanh(x @ w))
        gradient = x.T @ jnp.sort(jnp.cos(x))
        total = lax.fori_loop(0, 5, lambda _, c: jnp.sin(c @ first @ second), x)
        return gradient + total.T @ total, total

    def run(x: Any, w: Any) -> Any:
        return lax.fori_loop(0, 3, lambda _, c: microbatch(c[1], w), (x, x))

    evaluator = evaluator_of(source_of(run, arg(64, 64), arg(64, 64)), round_mesh(data=2), profile=PLAIN)
    program, times = evaluator.problem.program, evaluator.items.lives.times
    (inner,) = [loop for loop in program.loops if loop.parent >= 0]
    products = [n for n, op in enumerate(program.ops) if op.name == DOT_GENERAL and n < inner.first]
    assert [times[n] >= 2 * inner.last for n in products] == [False, False, True]
