"""Slices, look-ups and scatters, at places known and unknown."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from programs import arg

from cases.model import ONE, ROWS, Situation, X, case


def cached(cache: jax.Array, new: jax.Array, at: jax.Array) -> Any:
    return lax.dynamic_update_slice(cache, new, (0, at, 0))


CACHE = arg(16, 64, 32)
INDEXING: dict[str, Situation] = {
    "rolled by an unknown number": case(lambda x, i: jnp.roll(x, i, 0), X, ONE),
    "padded by reflection": case(lambda x: jnp.pad(x, ((2, 2), (2, 2)), mode="reflect"), X),
    "row at an unknown place": case(lambda x, i: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), X, ONE),
    "cache filled at an unknown place": case(cached, CACHE, arg(16, 1, 32), ONE, donate=(0,)),
    "cache filled for many tokens": case(cached, CACHE, arg(16, 32, 32), ONE, donate=(0,)),
    "updated at a known place": case(lambda x, u: lax.dynamic_update_slice(x, u, (8, 0)), X, arg(16, 32)),
    "updated along all": case(lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i)), X, arg(64, 1), ONE),
    "updated in a loop": case(
        lambda x: lax.fori_loop(0, 64, lambda i, c: c.at[i].set(jnp.tanh(c[i - 1])), x), X
    ),
    "look-up that fills": case(lambda x, i: x.at[i].get(mode="fill", fill_value=2.0), X, ROWS),
    "look-up that clips": case(lambda x, i: jnp.take(x, i, 0, mode="clip"), X, ROWS),
    "look-up of columns": case(lambda x, i: x[:, i], X, ROWS),
    "look-up of single numbers": case(lambda x, i: x[i, i], X, ROWS),
    "look-up of windows": case(
        lambda x, i: jax.vmap(lambda r, s: lax.dynamic_slice(r, (s,), (8,)))(x[:16], i), X, ROWS
    ),
    "look-up at places known": case(lambda x: x[jnp.array([5, 3, 60, 1])], X),
    "look-up by a product": case(lambda x, i: jax.nn.one_hot(i, 64) @ x, X, ROWS),
    "gradient of a look-up along": case(
        jax.grad(lambda x, i: jnp.sum(jnp.take_along_axis(x, i, 1) ** 2)), X, arg(64, 1, dtype="int32")
    ),
    "rows multiplied": case(lambda x, i, u: x.at[i].multiply(u), X, ROWS, arg(16, 32)),
    "rows set, others dropped": case(lambda x, i, u: x.at[i].set(u, mode="drop"), X, ROWS, arg(16, 32)),
    "rows changed by a function": case(lambda x, i: x.at[i].apply(jnp.sin), X, ROWS),
    "every second row set": case(lambda x, u: x.at[::2].set(u), X, arg(32, 32)),
    "numbers added one by one": case(lambda x, i: x.at[i, i].add(1.0), X, ROWS),
    "added to nothing": case(lambda i, u: jnp.zeros((64, 32)).at[i].add(u), ROWS, arg(16, 32)),
    "places of what is true": case(lambda x: jnp.nonzero(x[:, 0] > 0, size=16, fill_value=0), X),
    "two arrays scattered together": case(
        """func.func public @main(%a: tensor<64xf32>, %b: tensor<64xf32>, %i: tensor<16x1xi32>, %u: tensor<16xf32>)
            -> (tensor<64xf32>, tensor<64xf32>) {
          %0:2 = "stablehlo.scatter"(%a, %b, %i, %u, %u) <{scatter_dimension_numbers = #stablehlo.scatter<
            inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> ({
            ^bb0(%p: tensor<f32>, %q: tensor<f32>, %s: tensor<f32>, %t: tensor<f32>):
              %m = stablehlo.maximum %p, %s : tensor<f32>
              %n = stablehlo.minimum %q, %t : tensor<f32>
              stablehlo.return %m, %n : tensor<f32>, tensor<f32>
          }) : (tensor<64xf32>, tensor<64xf32>, tensor<16x1xi32>, tensor<16xf32>, tensor<16xf32>)
            -> (tensor<64xf32>, tensor<64xf32>)
          return %0#0, %0#1 : tensor<64xf32>, tensor<64xf32>
        }"""
    ),
}  # fmt: skip
