"""Products, convolutions, Fourier transforms, decompositions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from programs import arg

from cases.model import SQUARE, Situation, X, Y, case

BATCH = arg(8, 16, 16)
IMAGES, KERNEL = arg(8, 16, 16, 8), arg(3, 3, 8, 16)
NHWC = ("NHWC", "HWIO", "NHWC")


def conv(padding: Any = "SAME", strides: Any = (1, 1), **more: Any) -> Any:
    return lambda x, k: lax.conv_general_dilated(x, k, strides, padding, dimension_numbers=NHWC, **more)


def positive(x: jax.Array) -> jax.Array:
    return x @ x.mT + 50 * jnp.eye(x.shape[-1])


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    masked = jnp.where(jnp.tril(jnp.ones((16, 16), bool)), scores, -1e9)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(masked), v)


LINEAR: dict[str, Situation] = {
    "products one after the other": case(lambda x, y, w: jnp.tanh(x @ y) @ x @ w, X, Y, SQUARE),
    "inner product": case(lambda x, y: jnp.vdot(x, y), X, X),
    "Kronecker product": case(lambda x, y: jnp.kron(x[:4, :4], y[:8, :8]), X, Y),
    "product with itself": case(lambda x: x @ x.T, X),
    "product of three": case(lambda x, y, z: jnp.einsum("ij,jk,kl->il", x, y, z), X, Y, X),
    "attention with a mask": case(attention, BATCH, BATCH, BATCH),
    "gradient of attention": case(
        jax.grad(lambda q, k, v: jnp.sum(attention(q, k, v) ** 2), (0, 1, 2)), BATCH, BATCH, BATCH
    ),
    "product in integers": case(
        lambda x, y: lax.dot(x, y, preferred_element_type=jnp.int32),
        arg(64, 32, dtype="int8"),
        arg(32, 64, dtype="int8"),
    ),
    "ragged product": case(
        lambda x, w: lax.ragged_dot(x, w, jnp.array([16, 16, 32], jnp.int32)), X, arg(3, 32, 16)
    ),
    "convolution along a line": case(
        lambda x, k: lax.conv_general_dilated(x, k, (1,), ((2, 0),), dimension_numbers=("NWC", "WIO", "NWC")),
        arg(8, 32, 8),
        arg(3, 8, 8),
    ),
    "convolution in space": case(
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1, 1), "SAME"), arg(4, 4, 8, 8, 8), arg(4, 4, 3, 3, 3)
    ),
    "convolution of one with itself": case(lambda x: jnp.convolve(x[:, 0], x[:8, 1], "same"), X),
    "batch normalisation": case(
        lambda x, s: (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5) * s, IMAGES, arg(8)
    ),
    "Fourier of columns": case(lambda x: jnp.abs(jnp.fft.fft(x, axis=0)), X),
    "Fourier, back": case(lambda x: jnp.fft.ifft(jnp.fft.fft(x)).real, X),
    "Fourier of reals": case(lambda x: jnp.fft.irfft(jnp.fft.rfft(x)), X),
    "Fourier in two dimensions": case(lambda x: jnp.abs(jnp.fft.fft2(x)), BATCH),
    "solved": case(lambda x, b: jnp.linalg.solve(positive(x), b), BATCH, BATCH, large=True),
    "solved by triangles, from the right": case(
        lambda x, b: lax.linalg.triangular_solve(positive(x), b, transpose_a=True), BATCH, BATCH
    ),
    "gradient of Cholesky": case(jax.grad(lambda x: jnp.sum(jnp.linalg.cholesky(positive(x)))), BATCH),
    "determinant and inverse": case(
        lambda x: (jnp.linalg.slogdet(positive(x))[1], jnp.linalg.inv(positive(x))), BATCH, large=True),
    "orthogonal triangles": case(lambda x: jnp.abs(jnp.linalg.qr(x)[1]), BATCH),
    "eigenvalues": case(lambda x: jnp.linalg.eigvalsh(positive(x)), BATCH),
    "singular values": case(lambda x: jnp.linalg.svd(x, compute_uv=False), BATCH),
    "matrix exponential": case(lambda x: jax.scipy.linalg.expm(0.01 * x), SQUARE, large=True),
}  # fmt: skip
