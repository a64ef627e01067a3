"""What may run before a loop or after it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from programs import PLAIN, arg, evaluator_of, round_mesh, source_of

from toast_cli.program.ops import DOT_GENERAL, REDUCE


def runs(after: Any) -> list[bool]:
    """Whether each sum or product outside of the loop runs before it. `after`: what the program does behind the loop
    with what was made before it, logits [64, 512]."""

    def run(x: Any, w: Any, v: Any) -> Any:
        logits = jnp.sort(x @ v)
        looped = lax.fori_loop(0, 5, lambda _, c: jnp.sin(c @ w), x)
        return looped, after(looped, x, logits)

    evaluator = evaluator_of(source_of(run, arg(64, 64), arg(64, 64), arg(64, 512)), round_mesh(data=2), profile=PLAIN)
    program, lives = evaluator.problem.program, evaluator.items.lives
    (loop,), ops = program.loops, program.ops
    return [
        lives.times[number] < 2 * loop.first
        for number, op in enumerate(ops)
        if number >= loop.last and op.name in (DOT_GENERAL, REDUCE)
    ]


def test_what_frees_more_than_it_makes_runs_before_a_loop_that_it_does_not_need() -> None:
    assert runs(lambda looped, x, logits: logits.max()) == [True]
    assert runs(lambda looped, x, logits: logits @ logits.T) == [True]
    assert runs(lambda looped, x, logits: x @ (logits @ logits.T @ x)) == [True, False, False]
    assert runs(lambda looped, x, logits: jnp.tanh(logits @ logits.T).T) == [True]  # with its epilogue
    assert runs(lambda looped, x, logits: (logits @ logits.T) * looped) == [False]  # its epilogue needs the loop
    assert runs(lambda looped, x, logits: logits @ logits.T + looped @ x) == [False, False]  # its sum needs the loop
    assert runs(lambda looped, x, logits: logits.T @ logits) == [False]  # it makes [512, 512]
    assert runs(lambda looped, x, logits: looped.T @ logits) == [False]  # it needs the loop
    assert runs(lambda looped, x, logits: (logits.max(), looped.T @ logits)) == [False, False]  # still read after it


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
