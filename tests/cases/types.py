"""Element types, and programs of unusual shape: nothing in them, one number, very many arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from programs import arg

from cases.model import ONE, SQUARE, Situation, X, Y, case


def of_type(dtype: str) -> Situation:
    """A product in a narrow type, and a sum of what it makes."""
    return case(lambda x, w: ((x @ w).sum(0), jnp.sin(x)), arg(64, 32, dtype=dtype), arg(32, 64, dtype=dtype))


def stored_as(dtype: str) -> Situation:
    """Weights that are stored in a narrow type and multiplied in another."""
    return case(lambda x, w: x @ w.astype(jnp.float32), X, arg(32, 64, dtype=dtype))


TYPES: dict[str, Situation] = {
    "bf16": of_type("bfloat16"),
    "f16": of_type("float16"),
    "fp8 weights": stored_as("float8_e4m3fn"),
    "fp8 gradients": stored_as("float8_e5m2"),
    "int8 weights": stored_as("int8"),
    "int4 weights": stored_as("int4"),
    "unsigned int4 weights": stored_as("uint4"),
    "written as fp8": case(lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32), X),
    "scaled weights of blocks": case(
        lambda x, w, s: x @ (w.astype(jnp.float32).reshape(4, 8, 64) * s[:, None]).reshape(32, 64),
        X, arg(32, 64, dtype="int8"), arg(4, 64),
    ),
    "masks": case(lambda x, m: jnp.where(m & ~m[::-1], x, 0.0).any(0), X, arg(64, 32, dtype="bool")),
    "bytes": case(lambda i: (i ^ (i >> 1)).sum(1, dtype=jnp.int32), arg(64, 32, dtype="uint8")),
    "complex": case(lambda x, w: jnp.abs(lax.complex(x, -x) @ lax.complex(w, w)), X, SQUARE),
    "complex arguments": case(lambda z: (z.real, jnp.conj(z), jnp.angle(z)), arg(64, 32, dtype="complex64")),
    "f64": case(
        """func.func public @main(%x: tensor<64x32xf64>, %w: tensor<32x64xf64>) -> tensor<64x64xf64> {
          %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
            : (tensor<64x32xf64>, tensor<32x64xf64>) -> tensor<64x64xf64>
          %1 = stablehlo.tanh %0 : tensor<64x64xf64>
          return %1 : tensor<64x64xf64>
        }"""
    ),
    "i64": case(
        """func.func public @main(%x: tensor<64x32xi64>) -> tensor<64xi64> {
          %z = stablehlo.constant dense<0> : tensor<i64>
          %0 = stablehlo.reduce(%x init: %z) applies stablehlo.add across dimensions = [1]
            : (tensor<64x32xi64>, tensor<i64>) -> tensor<64xi64>
          return %0 : tensor<64xi64>
        }"""
    ),
    "nothing in an argument": case(lambda x, e: (x * 2, e + 1), X, arg(0, 32)),
    "nothing is added": case(lambda x: jnp.concatenate([x, jnp.zeros((0, 32))]) @ x.T, X),
    "a sum over nothing": case(lambda e, x: e.sum(0) + x, arg(0, 32), X),
    "one number": case(lambda x: jnp.sin(x), arg()),
    "numbers alone": case(lambda x, i: (x + i, i * 2, x > 0), arg(), ONE),
    "ones": case(lambda x, y: x * y + 1, arg(1, 1, 64), arg(1, 32, 1)),
    "sizes that nothing divides": case(lambda x, w: jnp.tanh(x @ w), arg(17, 13), arg(13, 7)),
    "six dimensions": case(lambda x: jnp.transpose(jnp.sin(x), (5, 3, 1, 0, 2, 4)), arg(2, 4, 2, 4, 2, 4)),
    "no arguments": case(lambda: jnp.arange(64.0).reshape(8, 8) @ jnp.ones((8, 8))),
    "no results": case("func.func public @main(%x: tensor<64xf32>) { return }"),
    "no operations": case(lambda x, y: (y, x), X, Y),
    "an argument as it is": case(lambda x, w: (x, x @ w), X, SQUARE),
    "an argument twice": case(lambda x: (x, x), X),
    "a result twice": case(lambda x: (jnp.sin(x),) * 3, X),
    "a result that is a constant": case(lambda x: (x + 1, jnp.ones((8, 8)), 3.0), X),
    "arguments that nobody reads": case(lambda x, y, i: jnp.cos(x), X, Y, ONE),
    "donated": case(lambda p, g: p - 0.1 * g, X, X, donate=(0,)),
    "donated and returned as it is": case(lambda p, g: (p, g.sum()), X, X, donate=(0,)),
    "donated for another shape": case(lambda p: p.T + 1, X, donate=(0,)),
    "donated to several": case(lambda p, q: (q + 1, p + 1, p * q), X, X, donate=(0, 1)),
    "many results": case(lambda x: tuple(x * k for k in range(40)), X, large=True),
    "many arguments": case(lambda *xs: sum(xs), *[X] * 40, large=True),
    "optimizer": case(
        lambda p, m, v, g: (p - 0.1 * m / (jnp.sqrt(v) + 1e-8), 0.9 * m + g, 0.99 * v + g * g), *[X] * 4, donate=(0, 1)
    ),
    "a table as a constant": case(lambda x: x @ (jnp.arange(1024.0).reshape(32, 32) % 7), X),
    "random bits": case(
        lambda k: jax.random.normal(jax.random.wrap_key_data(k), (64, 32)), arg(2, dtype="uint32"), large=True),
    "random bits of the device": case(
        lambda k: jax.random.bits(jax.random.wrap_key_data(k, impl="rbg"), (64, 32)), arg(4, dtype="uint32")
    ),
    "dropout": case(
        lambda k, x, w: jnp.where(jax.random.bernoulli(jax.random.wrap_key_data(k), 0.9, (64, 32)), x, 0) @ w,
        arg(2, dtype="uint32"), X, SQUARE,
    ),
    "permutation": case(
        lambda k, x: jax.random.permutation(jax.random.wrap_key_data(k), x), arg(2, dtype="uint32"), X, large=True),
}  # fmt: skip
