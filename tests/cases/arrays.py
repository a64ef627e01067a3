"""Elementwise operations and changes of shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from programs import arg

from cases.model import SQUARE, Situation, X, Y, case

ARRAYS: dict[str, Situation] = {
    "special functions": case(
        lambda x: jax.scipy.special.gammaln(jnp.abs(x) + 1) + jax.scipy.special.erf(x) + jax.scipy.special.i0e(x), X
    ),
    "more special functions": case(
        lambda x: jnp.arcsinh(x) + jnp.arctan(x) + jax.scipy.special.digamma(jnp.abs(x) + 1) + jnp.sinh(x), X
    ),
    "is finite": case(lambda x: (jnp.isfinite(x), jnp.isnan(x), jnp.isinf(x)), X),
    "next number": case(lambda x: jnp.nextafter(x, x + 1), X),
    "repeated": case(lambda x: jnp.repeat(x, 2, 0) + jnp.tile(x, (2, 1)), X),
    "stacked": case(lambda x, y: jnp.stack([x, y, x * y], 1), X, X),
    "concatenated": case(lambda x, y: jnp.concatenate([x, y], 0) @ y.T, X, X),
    "diagonal": case(lambda w: (jnp.diag(w), jnp.trace(w), jnp.tril(w)), SQUARE),
    "grid": case(lambda x: x * jnp.linspace(0.0, 1.0, 32) + jnp.eye(64, 32), X),
    "perceptron": case(lambda x, u, d: jax.nn.gelu(x @ u) @ d, X, Y, X),
    "training step": case(
        lambda w, x: w - 0.1 * jax.grad(lambda v: jnp.mean(jnp.tanh(x @ v) ** 2))(w), SQUARE, X, donate=(0,)
    ),
    "layer normalisation": case(
        jax.grad(lambda s, x: jnp.sum(((x - x.mean(-1)[:, None]) * lax.rsqrt(x.var(-1)[:, None]) * s) ** 3)),
        arg(32), X,
    ),
    "experts by one-hot": case(
        lambda x, r, w: jnp.einsum("te,tef->tf", jax.nn.softmax(x @ r), jnp.einsum("td,edf->tef", x, w)),
        X, arg(32, 8), arg(8, 32, 16),
    ),
}  # fmt: skip
