"""Loops and branches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from programs import arg

from cases.model import ONE, SQUARE, Situation, X, case


def until_small(x: jax.Array, w: jax.Array) -> Any:
    """Ends when a sum over all of it is small, which nobody knows beforehand."""
    return lax.while_loop(lambda s: jnp.sum(s * s) > 1.0, lambda s: 0.5 * jnp.tanh(s @ w), x)


def conjugate_gradients(a: jax.Array, b: jax.Array) -> Any:
    product = a @ a.T + 32 * jnp.eye(32)
    return jax.scipy.sparse.linalg.cg(lambda v: product @ v, b, maxiter=4)[0]


def stacked(x: jax.Array, ws: jax.Array) -> Any:
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum(0)), x, ws)


def heavy_branches(x: jax.Array, w: jax.Array, i: jax.Array) -> Any:
    return lax.switch(i, [lambda v: v @ w, lambda v: jnp.sort(v, 0), lambda v: v - v.mean(0)], x)


CONTROL: dict[str, Situation] = {
    "loop of known length": case(lambda x, w: lax.fori_loop(0, 5, lambda _, c: jnp.tanh(c @ w), x), X, SQUARE),
    "loop of unknown length": case(lambda x, n: lax.fori_loop(0, n % 4, lambda _, c: jnp.sin(c), x), X, ONE),
    "loop until a sum is small": case(until_small, X, SQUARE),
    "loop that never runs": case(lambda x: lax.fori_loop(3, 3, lambda _, c: jnp.sin(c), x), X),
    "scan over weights": case(stacked, X, arg(4, 32, 32)),
    "scan backwards": case(lambda x: lax.scan(lambda c, r: (c + r, c * r), x[0], x, reverse=True), X),
    "scan that carries nothing": case(lambda x: lax.map(lambda r: jnp.sin(r) * r.sum(), x), X),
    "scan in a scan": case(
        lambda x, ws: lax.scan(
            lambda c, w: (lax.scan(lambda d, _: (jnp.tanh(d @ w), None), c, None, length=2)[0], None), x, ws
        )[0],
        X,
        arg(3, 32, 32),
    ),
    "gradient of a scan": case(
        jax.grad(lambda ws, x: sum(jnp.sum(y**2) for y in stacked(x, ws))), arg(4, 32, 32), X
    ),
    "gradient of a rematerialised scan": case(
        jax.grad(
            lambda ws, x: jnp.sum(lax.scan(jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None)), x, ws)[0] ** 2)
        ),
        arg(4, 32, 32),
        X, large=True),
    "one of three": case(heavy_branches, X, SQUARE, ONE),
    "either in a scan": case(
        lambda x, ws: lax.scan(
            lambda c, w: (lax.cond(c[0, 0] > 0, lambda v: v @ w, lambda v: -v, c), None), x, ws
        )[0],
        X,
        arg(4, 32, 32),
    ),
    "gradient of either": case(
        jax.grad(lambda w, x: jnp.sum(lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: jnp.sin(x)) ** 2)), SQUARE, X,
    ),
    "branch that returns an argument": case(
        lambda x, y, p: lax.cond(p > 0, lambda: (x, y), lambda: (y, x)), X, X, ONE
    ),
    "branch without results of its own": case(
        lambda x, i: lax.switch(i, [lambda: jnp.zeros((64, 32)), lambda: x]), X, ONE
    ),
    "either for each of a batch": case(jax.vmap(lambda r: lax.cond(r[0] > 0, jnp.sin, jnp.cos, r)), X),
    "loop for each of a batch": case(
        jax.vmap(lambda r: lax.while_loop(lambda s: jnp.max(s) > 0.1, lambda s: s * 0.5, r)), X
    ),
    "power iteration": case(
        lambda w: lax.fori_loop(0, 4, lambda _, v: (w @ v) / jnp.linalg.norm(w @ v), jnp.ones(32)), SQUARE, large=True),
    "conjugate gradients": case(conjugate_gradients, SQUARE, arg(32)),
    "Newton's steps": case(
        lambda x: lax.fori_loop(0, 3, lambda _, y: y - jax.vmap(jax.grad(lambda t: jnp.sum(jnp.cosh(t))))(y), x), X
    ),
    "carries that go round": case(
        lambda x, y: lax.fori_loop(0, 4, lambda _, c: (c[1], jnp.sin(c[0]), c[2]), (x, y, x * y)), X, X
    ),
    "a counter alone": case(lambda n: lax.while_loop(lambda i: i < 10, lambda i: i + 1 + n * 0, n * 0), ONE),
    "random numbers in a loop": case(
        lambda k, x: lax.fori_loop(
            0, 3, lambda i, c: c + jax.random.normal(jax.random.fold_in(jax.random.wrap_key_data(k), i), c.shape), x
        ),
        arg(2, dtype="uint32"),
        X, large=True),
    "Hessian times a vector": case(
        lambda x, v: jax.jvp(jax.grad(lambda y: jnp.sum(jnp.tanh(y @ y.T))), (x,), (v,))[1], X, X
    ),
    "Jacobian": case(lambda w, x: jax.jacfwd(lambda v: jnp.tanh(w @ v))(x), SQUARE, arg(32)),
}  # fmt: skip
