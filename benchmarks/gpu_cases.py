"""Small programs that judge what is predicted of GPUs: steps, gradients and pieces of models, several kernels each.

Out: `cases`, name -> `Case`, beside those of `op_cases.py`. They were predicted before they were measured; what they
showed (masks, ragged groups, gradients of f32 kernels, look-ups whose rows are all different) is in the model by now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.op_cases import BF16, F32, S32, Case, Shape

Made = Iterator[tuple[str, Callable[..., Any], list[tuple[Shape, str]]]]


def cases() -> dict[str, Case]:
    """Every case by name; imports jax."""
    return {
        f"{family} {name}": Case(family, f"{family} {name}", function, tuple(arguments), True)
        for family, make in FAMILIES.items()
        for name, function, arguments in make()
    }


def _block_step() -> Made:
    import jax
    import jax.numpy as jnp

    def step(heads: int, gate: bool) -> Callable[..., Any]:
        def block(x: Any, p: Any) -> Any:
            b, s, e = x.shape
            h = _root_norm(x, p[0])
            q, k, v = ((h @ w).reshape(b, s, heads, e // heads) for w in p[1:4])
            x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla").reshape(b, s, e) @ p[4]
            h = _root_norm(x, p[5])
            return x + (jax.nn.silu(h @ p[6]) * (h @ p[7]) if gate else jax.nn.gelu(h @ p[6])) @ p[8]

        def run(x: Any, *p: Any) -> Any:
            found = jax.grad(lambda p: (block(x, p).astype(jnp.float32) ** 2).mean())(p)
            return [w - 1e-3 * d for w, d in zip(p, found, strict=True)]

        return run

    for b, s, e, f, heads, dtype, gate in [
        (4, 2048, 2048, 5632, 16, BF16, True), (8, 1024, 1024, 4096, 16, BF16, True),
        (8, 512, 768, 3072, 12, F32, True), (16, 512, 1024, 4096, 16, BF16, False),
    ]:  # fmt: skip
        shapes: list[Shape] = [(b, s, e), (e,), *[(e, e)] * 4, (e,), (e, f), (e, f), (f, e)]
        yield f"{b}x{s}x{e} {dtype}", step(heads, gate), [(shape, dtype) for shape in shapes]


def _network_step() -> Made:
    import jax
    from jax import lax

    def convolved(x: Any, w: Any, stride: int = 1) -> Any:
        return lax.conv_general_dilated(x, w, (stride,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def normed(y: Any, scale: Any) -> Any:
        mean = y.mean((0, 1, 2))
        return (y - mean) * lax.rsqrt(((y - mean) ** 2).mean((0, 1, 2)) + 1e-5) * scale

    def classifier(x: Any, *weights: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = x
            for w, stride in zip(weights, (2, 1, 2, 1), strict=False):
                y = jax.nn.relu(convolved(y, w, stride))
            return ((y.mean((1, 2)) @ weights[-1]) ** 2).mean()

        return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]

    def residual(x: Any, a: Any, b: Any, s: Any, t: Any) -> Any:
        def loss(a: Any, b: Any) -> Any:
            return (jax.nn.relu(x + normed(convolved(jax.nn.relu(normed(convolved(x, a), s)), b), t)) ** 2).mean()

        return jax.grad(loss, argnums=(0, 1))(a, b)

    layers: list[Shape] = [(3, 3, c, o) for c, o in ((32, 64), (64, 64), (64, 128), (128, 128))]
    for dtype in (F32, BF16):
        yield f"classifier {dtype}", classifier, [(s, dtype) for s in [(64, 96, 96, 32), *layers, (128, 10)]]
        yield (
            f"residual {dtype}", residual,
            [(s, dtype) for s in [(64, 28, 28, 256), *[(3, 3, 256, 256)] * 2, (256,), (256,)]],
        )  # fmt: skip


def _experts() -> Made:
    import jax
    import jax.numpy as jnp
    from jax import lax

    def run(x: Any, w: Any, v: Any) -> Any:
        sizes = jnp.full((w.shape[0],), x.shape[0] // w.shape[0], jnp.int32)
        return lax.ragged_dot(jax.nn.silu(lax.ragged_dot(x, w, sizes)), v, sizes)

    yield "ragged 16x8192x1024x4096", run, [(s, BF16) for s in ((8192, 1024), (16, 1024, 4096), (16, 4096, 1024))]


def _masked_softmax() -> Made:
    import jax
    import jax.numpy as jnp

    def run(x: Any) -> Any:
        mask = jnp.tril(jnp.ones(x.shape[-2:], bool))
        return jax.nn.softmax(jnp.where(mask, x.astype(F32) * 0.1, -1e9), -1).astype(x.dtype)

    for shape, dtype in (((16, 16, 512, 512), BF16), ((4, 16, 2048, 2048), F32)):
        yield f"{'x'.join(map(str, shape))} {dtype}", run, [(shape, dtype)]


def _norm_pieces() -> Made:
    import jax
    from jax import lax

    def layer(x: Any, g: Any, b: Any) -> Any:
        y = x.astype(F32)
        mean = y.mean(-1, keepdims=True)
        y = (y - mean) * lax.rsqrt(((y - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
        return y.astype(x.dtype) * g + b

    def gradients(x: Any, g: Any, b: Any) -> Any:
        return jax.grad(lambda *a: (layer(*a).astype(F32) ** 2).mean(), argnums=(0, 1, 2))(x, g, b)

    def added(x: Any, y: Any, g: Any) -> Any:
        return x + y, _root_norm(x + y, g)

    for shape, dtype in (((16384, 1536), BF16), ((32768, 512), F32), ((2048, 8192), BF16)):
        label, row = f"{shape[0]}x{shape[1]} {dtype}", (shape[1:], dtype)
        yield f"gradients {label}", gradients, [(shape, dtype), row, row]
        yield f"added {label}", added, [(shape, dtype), (shape, dtype), row]


def _root_norm(x: Any, g: Any) -> Any:
    from jax import lax

    y = x.astype(F32)
    return (y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * g


def _loss() -> Made:
    import jax
    import jax.numpy as jnp

    def run(x: Any, w: Any, labels: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            logits = (x @ w).astype(F32)
            return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]).mean()

        return jax.grad(loss, argnums=(0, 1))(x, w)

    for n, e, v, dtype in ((4096, 1024, 32000, BF16), (8192, 512, 50304, F32)):
        yield f"{n}x{e}x{v} {dtype}", run, [((n, e), dtype), ((e, v), dtype), ((n,), S32)]


def _spread_lookup() -> Made:
    import jax
    import jax.numpy as jnp

    def spread(indices: Any, rows: int) -> Any:
        return (indices * 7919 + jnp.arange(indices.shape[0], dtype=jnp.int32) * 104729) % rows

    def found(table: Any, indices: Any) -> Any:
        return table[spread(indices, table.shape[0])]

    def gradient(table: Any, indices: Any) -> Any:
        return jax.grad(lambda table: (found(table, indices).astype(F32) ** 2).sum())(table)

    for dtype in (F32, BF16):
        yield f"rows 16384 of 128000x2048 {dtype}", found, [((128000, 2048), dtype), ((16384,), S32)]
        yield f"gradient 16384 of 32000x1024 {dtype}", gradient, [((32000, 1024), dtype), ((16384,), S32)]


def _causal_attention() -> Made:
    import jax

    def run(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")

    for b, s, h, g, d in ((4, 2048, 32, 8, 128), (8, 1024, 16, 16, 64)):
        yield f"{b}x{s}x{h}x{d} {g} groups", run, [(n, BF16) for n in ((b, s, h, d), (b, s, g, d), (b, s, g, d))]


def _pieces() -> Made:
    import jax
    import jax.numpy as jnp

    def perceptron(x: Any, w: Any, v: Any) -> Any:
        return jax.nn.gelu(x @ w, approximate=False) @ v

    def adam(p: Any, g: Any, m: Any, v: Any) -> Any:
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v

    yield "adam 8192x8192", adam, [((8192, 8192), F32)] * 4
    for n, e, f, dtype in ((8192, 2048, 8192, BF16), (4096, 768, 3072, F32)):
        yield f"perceptron {n}x{e}x{f} {dtype}", perceptron, [((n, e), dtype), ((e, f), dtype), ((f, e), dtype)]
    for m, k, n, dtype in (
        (3000, 5000, 7000, BF16), (1536, 1536, 1536, F32), (32, 8192, 28672, BF16), (16384, 256, 16384, BF16),
    ):  # fmt: skip
        yield f"matmul {m}x{k}x{n} {dtype}", lambda x, y: x @ y, [((m, k), dtype), ((k, n), dtype)]


FAMILIES: dict[str, Callable[[], Made]] = {
    "block step": _block_step, "network step": _network_step, "experts": _experts, "masked softmax": _masked_softmax,
    "norm pieces": _norm_pieces, "loss": _loss, "spread lookup": _spread_lookup, "causal attention": _causal_attention,
    "pieces": _pieces,
}  # fmt: skip
