"""Small programs of one op or a few, at many shapes: what `calibrate_ops.py` compiles and `toast` predicts.

Out: `CASES`, name -> `Case`. A case belongs to the fit set or to the test set: families of several ops (softmax,
layer norm, attention, ...) are test only; of the single ops every third shape is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

Shape = tuple[int, ...]
BF16, F32, S32 = "bfloat16", "float32", "int32"


@dataclass(frozen=True)
class Case:
    """A function of arrays. `arguments`: (shape, dtype) of each."""

    family: str
    name: str
    function: Callable[..., Any]
    arguments: tuple[tuple[Shape, str], ...]
    test: bool


def cases() -> dict[str, Case]:
    """Every case by name; imports jax."""
    found: dict[str, Case] = {}
    for family, make in FAMILIES.items():
        for number, (name, function, arguments) in enumerate(make()):
            full = f"{family} {name}"
            found[full] = Case(family, full, function, tuple(arguments), family in TEST_FAMILIES or number % 3 == 2)
    return found


Made = Iterator[tuple[str, Callable[..., Any], list[tuple[Shape, str]]]]


def _matmul() -> Made:
    sizes = [
        (8192, 8192, 8192), (4096, 4096, 4096), (2048, 2048, 2048), (1024, 1024, 1024), (512, 512, 512),
        (256, 256, 256), (128, 128, 128), (8, 128, 128), (8192, 64, 8192), (8192, 8192, 64), (64, 8192, 8192),
        (8192, 128, 8192), (8192, 8192, 128), (128, 8192, 8192), (4096, 192, 4096), (4096, 4096, 192),
        (4096, 320, 4096), (4096, 4096, 320), (16384, 2048, 512), (16384, 512, 2048), (2048, 16384, 256),
        (1, 4096, 4096), (8, 4096, 16384), (16, 8192, 8192), (32, 4096, 4096), (256, 4096, 16384), (65536, 256, 256),
        (65536, 64, 64), (2048, 2048, 32768), (8192, 1000, 1000), (4096, 2048, 50304), (100, 3000, 700),
        (32768, 32, 128), (1024, 65536, 128),
    ]  # fmt: skip
    for dtype in (BF16, F32):
        for m, k, n in sizes:
            yield f"{m}x{k}x{n} {dtype}", lambda x, y: x @ y, [((m, k), dtype), ((k, n), dtype)]
    for m, k, n in [(4096, 4096, 4096), (8192, 2048, 512), (512, 8192, 1024), (128, 16384, 4096)]:
        yield f"x {m}x{k}x{n} y transposed", lambda x, y: x @ y.T, [((m, k), BF16), ((n, k), BF16)]
        yield f"x transposed {m}x{k}x{n} y", lambda x, y: x.T @ y, [((k, m), BF16), ((k, n), BF16)]


def _products() -> Made:
    import jax.numpy as jnp

    for b, s, t, d in [
        (128, 1024, 1024, 64), (64, 1024, 1024, 128), (32, 1024, 1024, 256), (16, 2048, 2048, 64),
        (16, 2048, 2048, 128), (256, 128, 128, 64), (256, 128, 128, 128), (512, 64, 64, 64), (8, 4096, 4096, 128),
        (32, 512, 512, 32), (64, 1, 2048, 128), (256, 8, 1024, 128), (2048, 16, 16, 64),
    ]:  # fmt: skip
        for dtype in (BF16, F32) if s > 8 else (BF16,):
            label = f"{b}x{s}x{t}x{d} {dtype}"
            yield (
                f"scores {label}",
                lambda q, k: jnp.einsum("bsd,btd->bst", q, k),
                [((b, s, d), dtype), ((b, t, d), dtype)],
            )
            yield (
                f"mixed {label}",
                lambda p, v: jnp.einsum("bst,btd->bsd", p, v),
                [((b, s, t), dtype), ((b, t, d), dtype)],
            )
    for e, c, m, f in [(16, 1024, 1024, 4096), (64, 128, 512, 2048), (8, 4096, 512, 512)]:
        yield (
            f"experts {e}x{c}x{m}x{f}",
            lambda x, w: jnp.einsum("ecm,emf->ecf", x, w),
            [((e, c, m), BF16), ((e, m, f), BF16)],
        )
    for b, s, h, d, e in [(8, 1024, 16, 64, 1024), (8, 1024, 16, 128, 2048), (4, 2048, 8, 256, 2048)]:
        yield (
            f"to heads {b}x{s}x{e} {h}x{d}", lambda x, w: jnp.einsum("bse,ehd->bshd", x, w),
            [((b, s, e), BF16), ((e, h, d), BF16)],
        )  # fmt: skip
        yield (
            f"from heads {b}x{s}x{e} {h}x{d}", lambda x, w: jnp.einsum("bshd,hde->bse", x, w),
            [((b, s, h, d), BF16), ((h, d, e), BF16)],
        )  # fmt: skip
        yield (
            f"weight gradient {b}x{s}x{e} {h}x{d}", lambda x, y: jnp.einsum("bse,bshd->ehd", x, y),
            [((b, s, e), BF16), ((b, s, h, d), BF16)],
        )  # fmt: skip


def _convolution() -> Made:
    from jax import lax

    def conv(strides: int, groups: int) -> Callable[..., Any]:
        return lambda x, w: lax.conv_general_dilated(
            x, w, (strides, strides), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
        )

    for b, s, c, k, o, stride, groups in [
        (32, 224, 3, 7, 64, 2, 1), (32, 56, 64, 3, 64, 1, 1), (32, 56, 64, 1, 256, 1, 1), (32, 28, 128, 3, 128, 1, 1),
        (32, 28, 512, 1, 128, 1, 1), (32, 14, 256, 3, 256, 1, 1), (32, 14, 256, 1, 1024, 1, 1),
        (32, 7, 512, 3, 512, 1, 1), (32, 56, 256, 1, 512, 2, 1), (8, 64, 128, 3, 128, 1, 1), (8, 64, 320, 3, 320, 1, 1),
        (16, 56, 96, 7, 96, 1, 96), (16, 28, 192, 3, 192, 1, 192), (4, 112, 32, 3, 32, 1, 32),
        (128, 56, 64, 3, 64, 1, 1), (2, 64, 1280, 3, 1280, 1, 1),
        (16, 128, 3, 3, 128, 1, 1),
    ]:  # fmt: skip
        for dtype in (BF16, F32):
            label = f"{b}x{s}x{s}x{c} by {k}x{k} to {o}, stride {stride}, {groups} groups {dtype}"
            yield label, conv(stride, groups), [((b, s, s, c), dtype), ((k, k, c // groups, o), dtype)]


SQUARES: list[Shape] = [
    (8192, 8192),
    (2048, 2048),
    (512, 512),
    (64, 128),
    (16, 1024, 1024),
    (65536, 64),
    (65536, 320),
    (1000, 1000, 10),
]


def _elementwise() -> Made:
    import jax
    import jax.numpy as jnp

    chains: dict[str, tuple[int, Callable[..., Any]]] = {
        "add": (2, lambda x, y: x + y),
        "scale": (1, lambda x: x * 3),
        "tanh": (1, jnp.tanh),
        "exp": (1, jnp.exp),
        "gelu": (1, lambda x: jax.nn.gelu(x)),
        "silu": (1, jax.nn.silu),
        "divide": (2, lambda x, y: x / y),
        "rsqrt": (1, jax.lax.rsqrt),
        "log": (1, jnp.log),
        "polynomial": (1, lambda x: ((((x * 2 + 1) * x + 3) * x + 4) * x + 5) * x + 6),
        "select": (2, lambda x, y: jnp.where(x > y, x, 2 * y)),
        "twenty exps": (1, lambda x: _repeat(jnp.exp, x, 20)),
        "thirty multiplies": (1, lambda x: _repeat(lambda y: y * x + 1, x, 30)),
        "convert": (1, lambda x: x.astype(F32 if x.dtype == BF16 else BF16)),
        "adam": (4, lambda p, g, m, v: p - 1e-3 * (0.9 * m + 0.1 * g) / (jnp.sqrt(0.99 * v + 0.01 * g * g) + 1e-8)),
    }
    for label, (count, function) in chains.items():
        for shape in SQUARES if label in ("add", "tanh") else SQUARES[:3]:
            for dtype in (BF16, F32):
                yield f"{label} {_x(shape)} {dtype}", function, [(shape, dtype)] * count
    for shape in SQUARES[:4]:
        yield f"bias {_x(shape)}", lambda x, b: x + b, [(shape, F32), (shape[-1:], F32)]


def _repeat(function: Callable[[Any], Any], x: Any, times: int) -> Any:
    for _ in range(times):
        x = function(x)
    return x


def _reduction() -> Made:
    import jax.numpy as jnp

    for shape in [*SQUARES, (8, 16, 1024, 1024), (64, 56, 56, 64)]:
        for dtype in (F32, BF16):
            yield f"sum of minor {_x(shape)} {dtype}", lambda x: jnp.sum(x, -1), [(shape, dtype)]
            yield f"sum of major {_x(shape)} {dtype}", lambda x: jnp.sum(x, 0), [(shape, dtype)]
        yield f"max of minor {_x(shape)}", lambda x: jnp.max(x, -1), [(shape, F32)]
        yield f"sum of all {_x(shape)}", lambda x: jnp.sum(x * x), [(shape, F32)]
        yield f"argmax {_x(shape)}", lambda x: jnp.argmax(x, -1), [(shape, F32)]


def _movement() -> Made:
    import jax.numpy as jnp
    from jax import lax

    for shape in SQUARES:
        for dtype in (F32, BF16):
            yield f"transpose {_x(shape)} {dtype}", lambda x: jnp.swapaxes(x, -1, -2), [(shape, dtype)]
    for shape in [(8, 1024, 16, 64), (8, 1024, 16, 128), (8, 2048, 8, 256)]:
        yield f"heads out {_x(shape)}", lambda x: jnp.transpose(x, (0, 2, 1, 3)), [(shape, BF16)]
        yield f"heads minor {_x(shape)}", lambda x: jnp.transpose(x, (0, 1, 3, 2)), [(shape, BF16)]
    for shape in SQUARES[:5]:
        yield f"concatenate major {_x(shape)}", lambda x, y: jnp.concatenate([x, y], 0), [(shape, BF16)] * 2
        yield f"concatenate minor {_x(shape)}", lambda x, y: jnp.concatenate([x, y], -1), [(shape, BF16)] * 2
        yield f"slice minor {_x(shape)}", lambda x: x[..., : x.shape[-1] // 2], [(shape, F32)]
        yield f"pad {_x(shape)}", lambda x: jnp.pad(x, [(1, 1)] * x.ndim), [(shape, F32)]
        yield f"reshape {_x(shape)}", lambda x: x.reshape(-1, x.shape[-1] // 2) * 2, [(shape, F32)]
    for shape, part in [
        ((8, 2048, 16, 128), (8, 1, 16, 128)),
        ((64, 16, 4096, 128), (64, 16, 1, 128)),
        ((8192, 8192), (1024, 8192)),
    ]:
        yield (
            f"update {_x(part)} in {_x(shape)}",
            lambda x, y, i: lax.dynamic_update_slice(x * 2, y, (i,) + (0,) * (x.ndim - 1)),
            [(shape, BF16), (part, BF16), ((), S32)],
        )  # fmt: skip
        yield (
            f"take {_x(part)} of {_x(shape)}",
            lambda x, y, i: lax.dynamic_slice(x, (i,) + (0,) * (x.ndim - 1), y.shape) + y,
            [(shape, BF16), (part, BF16), ((), S32)],
        )  # fmt: skip


def _lookup() -> Made:
    import jax.numpy as jnp

    for rows, width, count in [
        (50304, 1024, 8192), (256000, 2048, 4096), (32000, 4096, 512), (1000, 128, 65536), (8192, 64, 8192),
        (100000, 16, 100000),
    ]:  # fmt: skip
        for dtype in (F32, BF16):
            label = f"{count} of {rows}x{width} {dtype}"
            yield (
                f"look up {label}",
                lambda t, i: jnp.take(t, i, axis=0, mode="clip"),
                [((rows, width), dtype), ((count,), S32)],
            )
            yield (
                f"add to rows {label}", lambda t, i, u: t.at[i].add(u),
                [((rows, width), dtype), ((count,), S32), ((count, width), dtype)],
            )  # fmt: skip
    for rows, width, edges in [(20000, 128, 80000), (2048, 512, 16384)]:
        yield (
            f"segment sum {edges}x{width} to {rows}",
            lambda u, i, n=rows: jnp.zeros((n, u.shape[1]), u.dtype).at[i].add(u),
            [((edges, width), F32), ((edges,), S32)],
        )  # fmt: skip


def _softmax() -> Made:
    import jax

    for shape in [
        (8, 16, 1024, 1024),
        (128, 512, 512),
        (64, 8, 128, 128),
        (2048, 50304),
        (16, 8, 2048, 2048),
        (256, 64),
    ]:
        for dtype in (F32, BF16):
            yield f"{_x(shape)} {dtype}", jax.nn.softmax, [(shape, dtype)]
        yield f"loss {_x(shape)}", lambda x: -jax.nn.log_softmax(x)[..., 0].mean(), [(shape, F32)]


def _norm() -> Made:
    import jax.numpy as jnp
    from jax import lax

    def layer(x: Any, g: Any, b: Any) -> Any:
        y = x.astype(F32)
        y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
        return (y * g + b).astype(x.dtype)

    def root(x: Any, g: Any, b: Any) -> Any:
        y = x.astype(F32)
        return (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * g + b).astype(x.dtype)

    for shape in [(8, 1024, 1024), (16, 2048, 2048), (65536, 256), (128, 4096), (8, 1024, 768), (64, 56, 56, 96)]:
        for dtype in (F32, BF16):
            for label, function in (("layer", layer), ("root", root)):
                yield f"{label} {_x(shape)} {dtype}", function, [(shape, dtype), (shape[-1:], F32), (shape[-1:], F32)]


def _attention() -> Made:
    import jax
    import jax.numpy as jnp

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(F32) / q.shape[-1] ** 0.5
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        return jnp.einsum("bhst,bthd->bshd", weights, v)

    def gradients(q: Any, k: Any, v: Any) -> Any:
        return jax.grad(lambda *a: attend(*a).astype(F32).sum(), argnums=(0, 1, 2))(q, k, v)

    for shape in [(8, 1024, 16, 64), (8, 1024, 16, 128), (4, 2048, 8, 256), (32, 128, 12, 64), (2, 4096, 4, 128)]:
        for dtype in (BF16, F32):
            yield f"forward {_x(shape)} {dtype}", attend, [(shape, dtype)] * 3
            yield f"gradients {_x(shape)} {dtype}", gradients, [(shape, dtype)] * 3
    for b, t, h, d in [(8, 2048, 16, 128), (64, 1024, 32, 64)]:
        yield f"decode {b}x{t}x{h}x{d}", attend, [((b, 1, h, d), BF16), ((b, t, h, d), BF16), ((b, t, h, d), BF16)]


def _block() -> Made:
    import jax
    import jax.numpy as jnp

    def perceptron(x: Any, w: Any, v: Any) -> Any:
        return x + jax.nn.gelu(x @ w) @ v

    def gradients(x: Any, w: Any, v: Any) -> Any:
        return jax.grad(lambda *a: (perceptron(*a).astype(F32) ** 2).mean(), argnums=(0, 1, 2))(x, w, v)

    def gated(x: Any, w: Any, v: Any) -> Any:
        a, b = jnp.split(x @ w, 2, axis=-1)
        return x + (jax.nn.silu(a) * b) @ v[: a.shape[-1]]

    for n, m, f in [(8192, 1024, 4096), (16384, 2048, 8192), (2048, 512, 2048), (16, 4096, 16384), (65536, 128, 512)]:
        for dtype in (BF16, F32):
            arguments = [((n, m), dtype), ((m, f), dtype), ((f, m), dtype)]
            yield f"perceptron {n}x{m}x{f} {dtype}", perceptron, arguments
            yield f"gated {n}x{m}x{f} {dtype}", gated, arguments
            yield f"perceptron gradients {n}x{m}x{f} {dtype}", gradients, arguments


def _convolution_gradient() -> Made:
    import jax
    from jax import lax

    def forward(x: Any, w: Any) -> Any:
        return jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))

    def gradients(x: Any, w: Any) -> Any:
        return jax.grad(lambda *a: (forward(*a).astype(F32) ** 2).mean(), argnums=(0, 1))(x, w)

    for b, s, c, k, o in [
        (32, 56, 64, 3, 64),
        (32, 28, 128, 3, 128),
        (32, 14, 1024, 1, 256),
        (16, 32, 320, 3, 320),
        (64, 7, 512, 3, 512),
    ]:
        for dtype in (BF16, F32):
            yield (
                f"{b}x{s}x{s}x{c} by {k}x{k} to {o} {dtype}",
                gradients,
                [((b, s, s, c), dtype), ((k, k, c, o), dtype)],
            )


def _convolution_step() -> Made:
    """Steps of whole small networks, where arrays lie as convolutions want them: strided ones, down to few pixels, and
    transposed ones back up to the image."""
    import jax
    from jax import lax

    order = ("NHWC", "HWIO", "NHWC")

    def network(x: Any, down: list[Any], up: list[Any]) -> Any:
        for w in down:
            x = jax.nn.relu(lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=order))
        for w in up:
            x = jax.nn.relu(lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=order))
        return x

    def step(count: int) -> Callable[..., Any]:
        def run(x: Any, *weights: Any) -> Any:
            def loss(weights: Any) -> Any:
                made = network(x, weights[:count], weights[count:])
                return ((made - x) ** 2).mean() if len(weights) > count else (made**2).mean()

            return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]

        return run

    for b, s, widths in [(16, 128, (3, 64, 128, 256)), (4, 128, (3, 64, 128, 256)), (16, 64, (128, 128, 256, 512))]:
        down = [(3, 3, c, o) for c, o in pairwise(widths)]
        back = [(3, 3, c, o) for c, o in pairwise(reversed(widths))]
        image = ((b, s, s, widths[0]), F32)
        title = f"{b}x{s}x{s}x{widths[0]} to {'x'.join(map(str, widths[1:]))}"
        yield f"encoder {title}", step(len(down)), [image, *((w, F32) for w in down)]
        yield f"autoencoder {title}", step(len(down)), [image, *((w, F32) for w in (*down, *back))]


def _convolution_network() -> Made:
    """Steps of the beginnings of well-known networks, whose schedules nobody looked into."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def convolved(x: Any, w: Any, stride: int = 1, groups: int = 1, spread: int = 1, padding: Any = "SAME") -> Any:
        rank = w.ndim - 2
        order = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC")}[rank]
        return lax.conv_general_dilated(
            x, w.astype(x.dtype), (stride,) * rank, padding, rhs_dilation=(spread,) * rank, dimension_numbers=order,
            feature_group_count=groups,
        )  # fmt: skip

    def widened(x: Any, w: Any) -> Any:
        return lax.conv_transpose(x, w.astype(x.dtype), (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def step(network: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Any, *weights: Any) -> Any:
            def loss(weights: Any) -> Any:
                return (network(x, *weights).astype(F32) ** 2).mean()

            return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]

        return run

    def stem(x: Any, a: Any, b: Any, c: Any) -> Any:
        x = jax.nn.relu(convolved(x, a, 2))
        return x[:, ::2, ::2] + convolved(jax.nn.relu(convolved(x, b, 2)), c)

    def decoder(x: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        for w in (a, b, c):
            x = jax.nn.relu(widened(x, w))
        return jax.nn.sigmoid(convolved(x, d))

    def separable(x: Any, a: Any, *weights: Any) -> Any:
        x = convolved(x, a, 4)
        for deep, out, back in zip(weights[::3], weights[1::3], weights[2::3], strict=True):
            y = convolved(x, deep, groups=x.shape[-1])
            x = x + convolved(jax.nn.gelu(convolved(y, out)), back)
        return x

    def mobile(x: Any, a: Any, *weights: Any) -> Any:
        x = jax.nn.relu(convolved(x, a, 2))
        for number, (deep, out) in enumerate(zip(weights[::2], weights[1::2], strict=True)):
            x = jax.nn.relu(convolved(x, deep, 1 + number % 2, groups=x.shape[-1]))
            x = jax.nn.relu(convolved(x, out))
        return x

    def gated(x: Any, *weights: Any) -> Any:
        skip = jnp.zeros((), x.dtype)
        for number, (one, other, back) in enumerate(zip(weights[::3], weights[1::3], weights[2::3], strict=True)):
            past = [((one.shape[0] - 1) << number, 0)]
            y = jnp.tanh(convolved(x, one, spread=1 << number, padding=past))
            y = y * jax.nn.sigmoid(convolved(x, other, spread=1 << number, padding=past))
            skip, x = skip + y, x + convolved(y, back)
        return skip

    def front(x: Any, a: Any, b: Any) -> Any:
        return jax.nn.gelu(convolved(jax.nn.gelu(convolved(x, a)), b, 2))

    blocks = [w for _ in range(2) for w in ((7, 7, 1, 96), (1, 1, 96, 384), (1, 1, 384, 96))]
    layers = [w for _ in range(4) for w in ((2, 64, 64), (2, 64, 64), (1, 64, 64))]
    pairs = [w for c, o in pairwise((32, 64, 128, 128)) for w in ((3, 3, 1, c), (1, 1, c, o))]
    networks: list[tuple[str, Callable[..., Any], Shape, list[Shape]]] = [
        ("stem", stem, (32, 224, 224, 3), [(7, 7, 3, 64), (3, 3, 64, 64), (3, 3, 64, 64)]),
        ("decoder", decoder, (32, 8, 8, 256), [(4, 4, 256, 128), (4, 4, 128, 64), (4, 4, 64, 32), (3, 3, 32, 3)]),
        ("decoder", decoder, (64, 7, 7, 128), [(3, 3, 128, 64), (3, 3, 64, 64), (3, 3, 64, 16), (3, 3, 16, 1)]),
        ("separable", separable, (16, 112, 112, 3), [(4, 4, 3, 96), *blocks]),
        ("mobile", mobile, (64, 96, 96, 3), [(3, 3, 3, 32), *pairs]),
        ("gated", gated, (8, 2048, 64), layers),
        ("front", front, (8, 3000, 80), [(3, 80, 384), (3, 384, 384)]),
    ]  # fmt: skip
    for label, network, image, weights in networks:
        for dtype in (BF16, F32):
            yield f"{label} {_x(image)} {dtype}", step(network), [(image, dtype), *((w, F32) for w in weights)]


def _x(shape: Shape) -> str:
    return "x".join(map(str, shape))


FAMILIES: dict[str, Callable[[], Made]] = {
    "matmul": _matmul, "products": _products, "convolution": _convolution, "elementwise": _elementwise,
    "reduction": _reduction, "movement": _movement, "lookup": _lookup, "softmax": _softmax, "norm": _norm,
    "attention": _attention, "block": _block,
    "convolution gradient": _convolution_gradient, "convolution step": _convolution_step,
    "convolution network": _convolution_network,
}  # fmt: skip
TEST_FAMILIES = frozenset(
    {"softmax", "norm", "attention", "block", "convolution gradient", "convolution step", "convolution network"}
)


def elements(case: Case) -> int:
    """Of all arguments: how large a case is."""
    return sum(prod(shape) for shape, _ in case.arguments)
