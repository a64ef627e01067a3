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

UNARY = (
    "abs cbrt ceil cosine exponential exponential_minus_one floor log_plus_one logistic negate round_nearest_afz "
    "round_nearest_even sign sine tan tanh"
)
BINARY = "add atan2 maximum minimum multiply subtract power remainder divide"


def text_of(names: str, operands: str, dialect: str = "stablehlo", more: str = "") -> str:
    """A program of elementwise operations, each of the argument."""
    kind = "tensor<16x8xf32>"
    each = names.split()
    lines = [f"%a{k} = {dialect}.{name} {operands.format('x')} : {kind}{more}" for k, name in enumerate(each)]
    results = ", ".join(f"%a{k}" for k in range(len(each)))
    kinds = ", ".join([kind] * len(each))
    body = "\n".join(lines)
    return f"func.func public @main(%x: {kind}, %w: {kind}) -> ({kinds}) {{\n{body}\nreturn {results} : {kinds} }}"


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
        func.func public @main(%x: tensor<16x8xf32>, %y: tensor<8x16xf32>) -> (tensor<16x16xf32>, tensor<16x8xf32>) {
          %0 = stablehlo.dot %x, %y : (tensor<16x8xf32>, tensor<8x16xf32>) -> tensor<16x16xf32>
          %1 = "stablehlo.map"(%x, %x) <{dimensions = array<i64: 0, 1>}> ({
            ^bb0(%a: tensor<f32>, %b: tensor<f32>):
              %m = stablehlo.multiply %a, %b : tensor<f32>
              stablehlo.return %m : tensor<f32>
            }) : (tensor<16x8xf32>, tensor<16x8xf32>) -> tensor<16x8xf32>
          return %0, %1 : tensor<16x16xf32>, tensor<16x8xf32>
        }""",
    "functions of one number": text_of(UNARY + " sqrt rsqrt log", "%{0}"),
    "functions of two": text_of(BINARY, "%{0}, %w"),
    "bits of integers": """
        func.func public @main(%x: tensor<16x8xi32>, %y: tensor<16x8xi32>) -> (tensor<16x8xi32>, tensor<16x8xi32>) {
          %0 = stablehlo.not %x : tensor<16x8xi32>
          %1 = stablehlo.popcnt %0 : tensor<16x8xi32>
          %2 = stablehlo.count_leading_zeros %y : tensor<16x8xi32>
          %3 = stablehlo.shift_left %2, %1 : tensor<16x8xi32>
          %4 = stablehlo.shift_right_arithmetic %3, %1 : tensor<16x8xi32>
          %5 = stablehlo.shift_right_logical %3, %1 : tensor<16x8xi32>
          return %4, %5 : tensor<16x8xi32>, tensor<16x8xi32>
        }""",
    "parts of complex numbers": """
        func.func public @main(%x: tensor<16x8xf32>, %y: tensor<16x8xf32>) -> (tensor<16x8xf32>, tensor<16x8xf32>,
            tensor<16x8xi1>) {
          %0 = stablehlo.complex %x, %y : tensor<16x8xcomplex<f32>>
          %1 = stablehlo.negate %0 : tensor<16x8xcomplex<f32>>
          %2 = stablehlo.real %1 : (tensor<16x8xcomplex<f32>>) -> tensor<16x8xf32>
          %3 = stablehlo.imag %1 : (tensor<16x8xcomplex<f32>>) -> tensor<16x8xf32>
          %4 = stablehlo.is_finite %3 : (tensor<16x8xf32>) -> tensor<16x8xi1>
          return %2, %3, %4 : tensor<16x8xf32>, tensor<16x8xf32>, tensor<16x8xi1>
        }""",
    "batch normalisation": """
        func.func public @main(%x: tensor<8x4x16xf32>, %s: tensor<4xf32>, %o: tensor<4xf32>, %g: tensor<8x4x16xf32>)
            -> (tensor<8x4x16xf32>, tensor<8x4x16xf32>, tensor<8x4x16xf32>, tensor<4xf32>) {
          %0:3 = "stablehlo.batch_norm_training"(%x, %s, %o) <{epsilon = 1.0e-2 : f32, feature_index = 1 : i64}>
            : (tensor<8x4x16xf32>, tensor<4xf32>, tensor<4xf32>) -> (tensor<8x4x16xf32>, tensor<4xf32>, tensor<4xf32>)
          %1 = "stablehlo.batch_norm_inference"(%x, %s, %o, %0#1, %0#2)
            <{epsilon = 1.0e-2 : f32, feature_index = 1 : i64}>
            : (tensor<8x4x16xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) -> tensor<8x4x16xf32>
          %2:3 = "stablehlo.batch_norm_grad"(%x, %s, %0#1, %0#2, %g) <{epsilon = 1.0e-2 : f32, feature_index = 1 : i64}>
            : (tensor<8x4x16xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<8x4x16xf32>)
            -> (tensor<8x4x16xf32>, tensor<4xf32>, tensor<4xf32>)
          return %0#0, %1, %2#0, %2#1 : tensor<8x4x16xf32>, tensor<8x4x16xf32>, tensor<8x4x16xf32>, tensor<4xf32>
        }""",
    "older operations": """
        func.func public @main(%x: tensor<16x8xf32>, %y: tensor<8x16xf32>, %i: tensor<4xi32>, %p: tensor<i1>)
            -> (tensor<16x16xf32>, tensor<4x8xf32>, tensor<2x16x8xf32>, tensor<16x8xf32>) {
          %0 = "stablehlo.einsum"(%x, %y) <{einsum_config = "ab,bc->ac"}>
            : (tensor<16x8xf32>, tensor<8x16xf32>) -> tensor<16x16xf32>
          %2 = "stablehlo.torch_index_select"(%x, %i) <{batch_dims = 0 : i64, dim = 0 : i64}>
            : (tensor<16x8xf32>, tensor<4xi32>) -> tensor<4x8xf32>
          %3 = stablehlo.broadcast %x, sizes = [2] : (tensor<16x8xf32>) -> tensor<2x16x8xf32>
          %4 = "stablehlo.if"(%p) ({
            stablehlo.return %x : tensor<16x8xf32>
          }, {
            %n = stablehlo.negate %x : tensor<16x8xf32>
            stablehlo.return %n : tensor<16x8xf32>
          }) : (tensor<i1>) -> tensor<16x8xf32>
          return %0, %2, %3, %4
            : tensor<16x16xf32>, tensor<4x8xf32>, tensor<2x16x8xf32>, tensor<16x8xf32>
        }""",
    "shapes that are given as arrays": """
        func.func public @main(%x: tensor<16x8xf32>)
            -> (tensor<8x16xf32>, tensor<16x8xf32>, tensor<8x4xf32>, tensor<18x8xf32>) {
          %s = stablehlo.constant dense<[8, 16]> : tensor<2xi32>
          %t = stablehlo.constant dense<[16, 8]> : tensor<2xi32>
          %z = stablehlo.constant dense<0> : tensor<2xi32>
          %o = stablehlo.constant dense<1> : tensor<2xi32>
          %e = stablehlo.constant dense<[8, 4]> : tensor<2xi32>
          %l = stablehlo.constant dense<[1, 0]> : tensor<2xi32>
          %f = stablehlo.constant dense<2.0> : tensor<f32>
          %0 = stablehlo.dynamic_reshape %x, %s : (tensor<16x8xf32>, tensor<2xi32>) -> tensor<8x16xf32>
          %r = stablehlo.slice %x [0:1, 0:8] : (tensor<16x8xf32>) -> tensor<1x8xf32>
          %1 = stablehlo.dynamic_broadcast_in_dim %r, %t, dims = [0, 1]
            : (tensor<1x8xf32>, tensor<2xi32>) -> tensor<16x8xf32>
          %i = stablehlo.dynamic_iota %t, dim = 0 : (tensor<2xi32>) -> tensor<16x8xf32>
          %m = stablehlo.add %1, %i : tensor<16x8xf32>
          %2 = stablehlo.real_dynamic_slice %x, %z, %e, %o
            : (tensor<16x8xf32>, tensor<2xi32>, tensor<2xi32>, tensor<2xi32>) -> tensor<8x4xf32>
          %3 = stablehlo.dynamic_pad %x, %f, %l, %l, %z
            : (tensor<16x8xf32>, tensor<f32>, tensor<2xi32>, tensor<2xi32>, tensor<2xi32>) -> tensor<18x8xf32>
          return %0, %m, %2, %3 : tensor<8x16xf32>, tensor<16x8xf32>, tensor<8x4xf32>, tensor<18x8xf32>
        }""",
    "functions of CHLO": text_of(
        "acos asin atan bessel_i1e conj cosh erfc lgamma sinh square tan digamma",
        "%{0}",
        "chlo",
        " -> tensor<16x8xf32>",
    ),
}
