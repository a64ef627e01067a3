"""Small programs on which the best of all shardings can be found: a few of each kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from programs import arg


@dataclass(frozen=True)
class Small:
    """A JAX function of abstract arguments; donate: numbers of those whose buffers results take over."""

    run: Callable[..., Any]
    shapes: tuple[Any, ...]
    donate: tuple[int, ...] = ()


def gram_sorts(*arrays: Any) -> list[Any]:
    """Each n by n product is sorted along an axis of its own: each wants the other one split."""
    return [jnp.sort(x @ x.T, axis=k % 2) for k, x in enumerate(arrays)]


def summed_sorts(*arrays: Any) -> Any:
    return sum(jnp.sort(x @ x.T, axis=k % 2).sum() for k, x in enumerate(arrays))


def attention(x: Any, wq: Any, wk: Any, wv: Any, wo: Any, heads: int = 4) -> Any:
    q, k, v = ((x @ w).reshape(*x.shape[:2], heads, -1) for w in (wq, wk, wv))
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ wo


def block(x: Any, wq: Any, wk: Any, wv: Any, wo: Any, up: Any, down: Any, heads: int = 4) -> Any:
    x = attention(x, wq, wk, wv, wo, heads)
    return x + jax.nn.relu(x @ up) @ down


def axial(x: Any, w: Any, v: Any) -> Any:
    """Attention along rows, then along columns."""
    q = x @ w
    x = x + jnp.einsum("brij,brjd->brid", jax.nn.softmax(jnp.einsum("brid,brjd->brij", q, q)), x)
    q = x @ v
    return x + jnp.einsum("brsc,bscd->brcd", jax.nn.softmax(jnp.einsum("brcd,bscd->brsc", q, q), axis=2), x)


def perceptron(x: Any, up: Any, down: Any) -> Any:
    return jax.nn.relu(x @ up) @ down


def training(up: Any, down: Any, x: Any) -> Any:
    gradients = jax.grad(lambda w: jnp.sum((x - perceptron(x, *w)) ** 2))((up, down))
    return up - 0.1 * gradients[0], down - 0.1 * gradients[1]


def recurrence(x: Any, h: Any, w: Any, u: Any) -> Any:
    """Gates and a hidden width, cut from and put together into arrays four times as wide."""

    def step(carry: tuple[Any, Any], at: Any) -> tuple[tuple[Any, Any], Any]:
        h, c = carry
        i, f, o, g = jnp.split(at @ w + h @ u, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(step, (h, jnp.zeros_like(h)), x)[1]


def convolution(x: Any, k: Any, l: Any) -> Any:  # noqa: E741 - the kernel after k
    for kernel in (k, l):
        x = jax.nn.relu(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return x.mean(axis=(1, 2))


def scatter(nodes: Any, w: Any, ends: Any) -> Any:
    return jnp.zeros_like(nodes).at[ends[1]].add((nodes @ w)[ends[0]])


def fourier(x: Any) -> Any:
    return jnp.abs(jnp.fft.fft(x.astype(jnp.complex64) * 2.0)).sum(axis=0)


def encoder_decoder(x: Any, y: Any, w: Any, u: Any, v: Any) -> Any:
    """Few long rows in, many short rows out, which share the width."""
    x = jnp.tanh(x @ w)
    return jnp.tanh(y @ u) @ v + x.sum(axis=0)


PROGRAMS: dict[str, Small] = {
    "three sorts": Small(gram_sorts, (arg(64, 64),) * 3),
    "four sorts": Small(summed_sorts, (arg(64, 64),) * 4),
    "attention, short": Small(attention, (arg(1, 64, 32), *(arg(32, 32),) * 4)),
    "attention, long": Small(attention, (arg(1, 1024, 32), *(arg(32, 32),) * 4)),
    "attention, batch": Small(attention, (arg(8, 64, 32), *(arg(32, 32),) * 4)),
    "block": Small(block, (arg(1, 256, 32), *(arg(32, 32),) * 4, arg(32, 128), arg(128, 32))),
    "axial attention": Small(axial, (arg(2, 64, 64, 16), arg(16, 16), arg(16, 16))),
    "perceptron": Small(perceptron, (arg(64, 32), arg(32, 128), arg(128, 32))),
    "perceptron, wide": Small(perceptron, (arg(16, 64), arg(64, 1024), arg(1024, 64))),
    "training": Small(training, (arg(64, 128), arg(128, 64), arg(256, 64)), (0, 1)),
    "recurrence": Small(recurrence, (arg(16, 8, 64), arg(8, 64), arg(64, 256), arg(64, 256))),
    "convolution": Small(convolution, (arg(4, 32, 32, 8), arg(3, 3, 8, 16), arg(3, 3, 16, 16))),
    "scatter": Small(scatter, (arg(64, 32), arg(32, 32), arg(2, 512, dtype=jnp.int32))),
    "fourier": Small(fourier, (arg(64, 256),)),
    "encoder and decoder": Small(encoder_decoder, (arg(8, 64), arg(512, 64), arg(64, 64), arg(64, 64), arg(64, 64))),
}
