"""A small program for each kind of op, so that each can be split along every dimension it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from programs import arg

X = arg(16, 8)
ROWS = arg(8, dtype=jnp.int32)
PLACES = arg(2, dtype=jnp.int32)
IMAGES, KERNEL = arg(8, 4, 16, 8), arg(8, 4, 3, 3)
BATCH = arg(4, 8, 8)
KEY = arg(4, dtype=jnp.uint32)


def conv(padding: Any, strides: tuple[int, int] = (1, 1), **more: Any) -> Callable[..., jax.Array]:
    return lambda a, k: lax.conv_general_dilated(a, k, strides, padding, **more)


def loss(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda *arguments: jnp.sum(function(*arguments) ** 2)


def pool(size: int, stride: int, padding: str) -> Callable[..., jax.Array]:
    return lambda a: lax.reduce_window(a, -jnp.inf, lax.max, (size, size), (stride, stride), padding)


def total(a: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
    """Two arrays reduced together by a body of several operations."""

    def body(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] + right[1]

    return tuple(lax.reduce((a, b), (jnp.float32(1), jnp.float32(0)), body, (0,)))


def carried(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A loop that stacks what it finds and reads a slice of an array in each trip."""

    def step(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = jnp.tanh(carry @ w + row)
        return carry, carry.sum(0)

    return lax.scan(step, x, jnp.stack([x, 2 * x, 3 * x]))


OPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "elementwise": (lambda x, y: jnp.where(x > y, jnp.exp(x), lax.clamp(-1.0, y, 1.0)), (X, X)),
    "elementwise of CHLO": (lambda x: lax.erf_inv(jnp.tanh(x)) + lax.asinh(x), (X,)),
    "select by one": (lambda p, x, y: lax.select(p[0] > 0, x, y), (arg(1), X, X)),
    "complex": (lambda x, y: jnp.abs(lax.complex(x, y) * 2), (X, X)),
    "complex sum": (lambda x, y: jnp.abs(jnp.sum(lax.complex(x, y), 0)), (X, X)),
    "complex product": (lambda x, y: jnp.abs(lax.complex(x, y) @ lax.complex(y, x).T), (X, X)),
    "complex mixed": (
        lambda x, y: jnp.abs(
            jnp.cumsum(lax.complex(x, y).at[jnp.array([3, 1])].add(2j), 0)[1:]
            * jnp.pad(lax.complex(y, x), ((1, 0), (2, 0)))[:-2, 2:]
        ),
        (X, X),
    ),
    "bits": (lambda x: lax.bitcast_convert_type(x, jnp.uint8), (X,)),
    "fewer bits": (lambda x: lax.reduce_precision(x, 5, 10), (X,)),
    "product": (lambda x, y: x @ y, (X, arg(8, 16))),
    "batched product": (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), (BATCH, BATCH)),
    "outer product": (lambda x, y: jnp.einsum("ij,k->ijk", x, y), (X, arg(4))),
    "transpose": (lambda x: jnp.transpose(jnp.sin(x), (2, 0, 1)), (BATCH,)),
    "merged": (lambda x: jnp.sin(x).reshape(32, 8), (BATCH,)),
    "merged from the right": (lambda x: jnp.sin(x).reshape(4, 64), (BATCH,)),
    "split up": (lambda x: jnp.sin(x).reshape(4, 4, 8), (X,)),
    "cut across": (lambda x: jnp.sin(x).reshape(8, 16), (X,)),
    "broadcast": (lambda x: jnp.broadcast_to(x[:, None, :], (16, 4, 8)) + 1, (X,)),
    "stretched": (lambda x: jnp.broadcast_to(x, (16, 8)) + 1, (arg(16, 1),)),
    "sum": (lambda x: (x.sum(0), x.sum(1), x.sum()), (X,)),
    "largest and least": (lambda x: (x.max(0), x.min(1)), (X,)),
    "product of all": (lambda x: jnp.prod(x, 0), (X,)),
    "all, any, parity": (lambda x: ((x > 0).all(0), (x > 1).any(1), lax.reduce_xor(x > 0, (0,))), (X,)),
    "starts at 3": (lambda x: lax.reduce(x, jnp.float32(3), lax.add, (0,)), (X,)),
    "argmax": (lambda x: (jnp.argmax(x, 0), jnp.argmin(x, 1)), (X,)),
    "several at once": (total, (X, X)),
    "counting": (lambda x: x * lax.broadcasted_iota(jnp.float32, (16, 8), 0) + jnp.arange(8.0), (X,)),
    "table": (lambda x: x * jnp.arange(128.0).reshape(16, 8), (X,)),
    "random bits": (lambda k, x: x * jax.random.uniform(jax.random.wrap_key_data(k, impl="rbg"), (16, 8)), (KEY, X)),
    "threefry": (lambda k, x: x * jax.random.uniform(jax.random.wrap_key_data(k[:2]), (16, 8)), (KEY, X)),
    "concatenated": (lambda x, y: lax.concatenate([x, 2 * y], 0), (X, X)),
    "sorted": (lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), (X, X)),
    "top": (lambda x: lax.top_k(x, 3), (X,)),
    "backwards": (lambda x: lax.rev(x, (0, 1)), (X,)),
    "slice": (lambda x: (x[4:12], x[::2, 1:7:3], x[8:]), (X,)),
    "first is left out": (lambda x: x[1:, 1:], (arg(17, 9),)),
    "padded": (lambda x: (jnp.pad(x, ((8, 0), (0, 4)), constant_values=2.0), jnp.pad(x, ((4, 4), (2, 2)))), (X,)),
    "holes": (lambda x: lax.pad(x, 2.0, ((1, 0, 1), (1, 0, 1))), (X,)),
    "holes in what is whole": (
        lambda x, y: lax.pad(lax.sort(x, dimension=0), 2.0, ((0, 1, 1), (0, 0, 0))) * y,
        (arg(8, 8), X),
    ),
    "shifted": (lambda x: (lax.pad(x, 0.0, ((1, -1, 0), (-2, 2, 0))), jnp.roll(x, 3, 0)), (X,)),
    "rolled": (lambda x: (jnp.roll(x, (-5, 1), (0, 1)), jnp.concatenate([x[:1], x[:-1]])), (X,)),
    "convolution": (conv("SAME"), (IMAGES, KERNEL)),
    "convolution, stride 2": (conv("SAME", (2, 2)), (IMAGES, KERNEL)),
    "convolution, padded on one side": (conv(((2, 0), (0, 2))), (IMAGES, KERNEL)),
    "convolution, wide": (conv("SAME", rhs_dilation=(2, 2)), (IMAGES, KERNEL)),
    "transposed convolution": (conv(((1, 2), (2, 1)), lhs_dilation=(2, 2)), (IMAGES, KERNEL)),
    "convolution in groups": (conv("SAME", feature_group_count=4), (arg(8, 8, 16, 8), arg(8, 2, 3, 3))),
    "convolution by channel": (conv("SAME", feature_group_count=8), (arg(8, 8, 16, 8), arg(8, 1, 3, 3))),
    "gradient of a convolution in groups": (
        jax.grad(loss(conv("SAME", feature_group_count=4)), (0, 1)),
        (arg(8, 8, 16, 8), arg(8, 2, 3, 3)),
    ),
    "convolution of groups of images": (conv("SAME", batch_group_count=4), (arg(8, 4, 16, 8), arg(8, 4, 3, 3))),
    "gradient of a convolution": (jax.grad(loss(conv("SAME", (2, 2))), (0, 1)), (IMAGES, KERNEL)),
    "pooling": (lambda x: (pool(2, 1, "SAME")(x), pool(2, 2, "VALID")(x), pool(3, 2, "SAME")(x)), (X,)),
    "average": (lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 3), (1, 1), "SAME"), (X,)),
    "running sum": (lambda x: (lax.cumsum(x, 0), lax.cummax(x, 1)), (X,)),
    "gradient of a pooling": (jax.grad(loss(pool(2, 2, "VALID"))), (X,)),
    "gradient of a pooling that overlaps": (jax.grad(loss(pool(2, 1, "VALID"))), (X,)),
    "gradient of a wide pooling": (jax.grad(loss(pool(3, 2, "SAME"))), (X,)),
    "look-up": (lambda x, i: x[i], (X, ROWS)),
    "look-up of pairs": (lambda x, i: x[i, i % 8], (X, ROWS)),
    "look-up along": (lambda x, i: jnp.take_along_axis(x, i, 0), (X, arg(4, 8, dtype=jnp.int32))),
    "gradient of a look-up": (jax.grad(loss(lambda x, i: x[i])), (X, ROWS)),
    "added": (lambda x, i, u: x.at[i].add(u), (X, ROWS, arg(8, 8))),
    "set": (lambda x, i, u: x.at[i].set(u), (X, ROWS, arg(8, 8))),
    "largest kept": (lambda x, i, u: x.at[i].max(u), (X, ROWS, arg(8, 8))),
    "columns added": (lambda x, i, u: x.at[:, i].add(u), (arg(8, 16), ROWS, arg(8, 8))),
    "taken from somewhere": (lambda x, i: lax.dynamic_slice(x, (i[0], i[1]), (4, 8)), (X, PLACES)),
    "put somewhere": (lambda x, u, i: lax.dynamic_update_slice(x, u, (i[0], i[1])), (X, arg(4, 3), PLACES)),
    "rows put somewhere": (lambda x, u, i: lax.dynamic_update_slice(x, u, (i[0], 0)), (X, arg(4, 8), PLACES)),
    "Cholesky": (lambda x: lax.linalg.cholesky(x @ x.mT + 50 * jnp.eye(8)), (BATCH,)),
    "solved": (lambda x, b: lax.linalg.triangular_solve(x + 50 * jnp.eye(8), b, left_side=True), (BATCH, BATCH)),
    "Fourier": (lambda x: jnp.abs(jnp.fft.fft(jnp.sin(x))), (X,)),
    "loop": (carried, (X, arg(8, 8))),
    "branches": (lambda x, y: lax.cond(x[0, 0] > 0, lambda: x @ y, lambda: jnp.sin(x) @ y), (X, arg(8, 8))),
    "barrier": (lambda x, y: lax.optimization_barrier((jnp.sin(x), y))[0] * 2, (X, X)),
}

# What JAX leaves to libraries, or never writes.
TEXTS = {
    "linear algebra in StableHLO": """
        func.func public @main(%x: tensor<4x8x8xf32>, %b: tensor<4x8x8xf32>) -> (tensor<4x8x8xf32>, tensor<4x8x8xf32>) {
          %0 = stablehlo.dot_general %x, %x, batching_dims = [0] x [0], contracting_dims = [2] x [2]
            : (tensor<4x8x8xf32>, tensor<4x8x8xf32>) -> tensor<4x8x8xf32>
          %i = stablehlo.iota dim = 1 : tensor<4x8x8xi32>
          %j = stablehlo.iota dim = 2 : tensor<4x8x8xi32>
          %d = stablehlo.compare EQ, %i, %j : (tensor<4x8x8xi32>, tensor<4x8x8xi32>) -> tensor<4x8x8xi1>
          %fifty = stablehlo.constant dense<50.0> : tensor<4x8x8xf32>
          %more = stablehlo.add %0, %fifty : tensor<4x8x8xf32>
          %1 = stablehlo.select %d, %more, %0 : tensor<4x8x8xi1>, tensor<4x8x8xf32>
          %2 = stablehlo.cholesky %1, lower = true : tensor<4x8x8xf32>
          %3 = "stablehlo.triangular_solve"(%2, %b) <{left_side = true, lower = true, unit_diagonal = false,
            transpose_a = #stablehlo<transpose NO_TRANSPOSE>}> : (tensor<4x8x8xf32>, tensor<4x8x8xf32>) -> tensor<4x8x8xf32>
          return %2, %3 : tensor<4x8x8xf32>, tensor<4x8x8xf32>
        }""",  # noqa: E501
    "seldom written": """
        func.func public @main(%x: tensor<16x8xf32>, %y: tensor<8x16xf32>) -> (tensor<16x16xf32>, tensor<16x8xf32>, tensor<16x8xui32>) {
          %0 = stablehlo.dot %x, %y : (tensor<16x8xf32>, tensor<8x16xf32>) -> tensor<16x16xf32>
          %1 = "stablehlo.map"(%x, %x) <{dimensions = array<i64: 0, 1>}> ({
            ^bb0(%a: tensor<f32>, %b: tensor<f32>):
              %m = stablehlo.multiply %a, %b : tensor<f32>
              stablehlo.return %m : tensor<f32>
            }) : (tensor<16x8xf32>, tensor<16x8xf32>) -> tensor<16x8xf32>
          %p = stablehlo.partition_id : tensor<ui32>
          %r = stablehlo.replica_id : tensor<ui32>
          %q = stablehlo.add %p, %r : tensor<ui32>
          %2 = stablehlo.broadcast_in_dim %q, dims = [] : (tensor<ui32>) -> tensor<16x8xui32>
          return %0, %1, %2 : tensor<16x16xf32>, tensor<16x8xf32>, tensor<16x8xui32>
        }""",  # noqa: E501
}
