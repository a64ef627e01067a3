"""Reductions, sorts, windows and scatters: operations with a body."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from programs import arg

from cases.model import ROWS, SQUARE, Situation, X, case

A, V = "tensor<64x32xf32>", "tensor<64xf32>"


def reading_outside(operation: str, result: str, bound: str = "stablehlo.constant dense<0.5> : tensor<f32>") -> str:
    """A program whose operation has a body that reads %bound from outside."""
    return f"""func.func public @main(%a: {A}) -> ({result}, tensor<f32>) {{
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %bound = {bound}
      {operation}
      return %0, %bound : {result}, tensor<f32>
    }}"""


_ADDING = """^bb0(%x: tensor<f32>, %y: tensor<f32>):
        %m = stablehlo.maximum %y, %bound : tensor<f32>
        %s = stablehlo.add %x, %m : tensor<f32>
        stablehlo.return %s : tensor<f32>"""
_COMPARING = """^bb0(%x: tensor<f32>, %y: tensor<f32>):
        %c = stablehlo.compare GE, %x, %y : (tensor<f32>, tensor<f32>) -> tensor<i1>
        stablehlo.return %c : tensor<i1>"""
_COMPARING_OUTSIDE = """^bb0(%x: tensor<f32>, %y: tensor<f32>):
        %m = stablehlo.maximum %x, %bound : tensor<f32>
        %n = stablehlo.maximum %y, %bound : tensor<f32>
        %c = stablehlo.compare LT, %m, %n : (tensor<f32>, tensor<f32>) -> tensor<i1>
        stablehlo.return %c : tensor<i1>"""
_WINDOW = "window_dimensions = array<i64: 1, 2>, window_strides = array<i64: 1, 2>"
_SCATTER = """scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0],
    scatter_dims_to_operand_dims = [0], index_vector_dim = 1>"""
REDUCE = f"""%0 = "stablehlo.reduce"(%a, %zero) <{{dimensions = array<i64: 1>}}> ({{
  {_ADDING} }}) : ({A}, tensor<f32>) -> {V}"""
OUTSIDE = {
    "reduce": (REDUCE, V),
    "sort": (f'%0 = "stablehlo.sort"(%a) <{{dimension = 1 : i64}}> ({{ {_COMPARING_OUTSIDE} }}) : ({A}) -> {A}', A),
    "map": (
        f"""%0 = "stablehlo.map"(%a) <{{dimensions = array<i64: 0, 1>}}> ({{
          ^bb0(%x: tensor<f32>):
            %m = stablehlo.maximum %x, %bound : tensor<f32>
            stablehlo.return %m : tensor<f32> }}) : ({A}) -> {A}""",
        A,
    ),
    "reduce_window": (
        f"""%0 = "stablehlo.reduce_window"(%a, %zero) <{{{_WINDOW}}}> ({{
          {_ADDING} }}) : ({A}, tensor<f32>) -> tensor<64x16xf32>""",
        "tensor<64x16xf32>",
    ),
    "select_and_scatter": (
        f"""%u = stablehlo.slice %a [0:64, 0:16] : ({A}) -> tensor<64x16xf32>
          %0 = "stablehlo.select_and_scatter"(%a, %u, %zero) <{{{_WINDOW}}}> ({{ {_COMPARING} }}, {{
          {_ADDING} }}) : ({A}, tensor<64x16xf32>, tensor<f32>) -> {A}""",
        A,
    ),
    "scatter": (
        f"""%i = stablehlo.constant dense<[[3], [1]]> : tensor<2x1xi32>
          %u = stablehlo.slice %a [0:2, 0:32] : ({A}) -> tensor<2x32xf32>
          %0 = "stablehlo.scatter"(%a, %i, %u) <{{{_SCATTER}}}> ({{
          {_ADDING} }}) : ({A}, tensor<2x1xi32>, tensor<2x32xf32>) -> {A}""",
        A,
    ),
    "reduce in a loop": (
        f"""%n = stablehlo.constant dense<3> : tensor<i32>
          %i = stablehlo.constant dense<0> : tensor<i32>
          %0:2 = stablehlo.while(%k = %i, %acc = %a) : tensor<i32>, {A} cond {{
            %c = stablehlo.compare LT, %k, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
            stablehlo.return %c : tensor<i1>
          }} do {{
            %one = stablehlo.constant dense<1> : tensor<i32>
            %sum = "stablehlo.reduce"(%acc, %zero) <{{dimensions = array<i64: 1>}}> ({{
              {_ADDING} }}) : ({A}, tensor<f32>) -> {V}
            %b = stablehlo.broadcast_in_dim %sum, dims = [0] : ({V}) -> {A}
            %next = stablehlo.tanh %b : {A}
            %j = stablehlo.add %k, %one : tensor<i32>
            stablehlo.return %j, %next : tensor<i32>, {A}
          }}
          %r = stablehlo.negate %0#1 : {A}""".replace("%0:2", "%w:2")
        .replace("%0#1", "%w#1")
        .replace("%r =", "%0 ="),
        A,
    ),
}


def two_moments(x: jax.Array) -> tuple[Any, ...]:
    """Counts, means and squared deviations reduced together (Welford)."""

    def join(a: Any, b: Any) -> Any:
        count = a[0] + b[0]
        delta = b[1] - a[1]
        safe = jnp.maximum(count, 1.0)
        return count, a[1] + delta * b[0] / safe, a[2] + b[2] + delta * delta * a[0] * b[0] / safe

    zero = jnp.float32(0)
    return tuple(lax.reduce((jnp.ones_like(x), x, jnp.zeros_like(x)), (zero, zero, zero), join, (1,)))


def largest_with_place(x: jax.Array) -> tuple[Any, ...]:
    places = lax.broadcasted_iota(jnp.int32, x.shape, 1)

    def join(a: Any, b: Any) -> Any:
        left = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return jnp.where(left, a[0], b[0]), jnp.where(left, a[1], b[1])

    return tuple(lax.reduce((x, places), (jnp.float32(-jnp.inf), jnp.int32(2**30)), join, (1,)))


BODIES: dict[str, Situation] = {
    **{f"{name} reads a constant from outside": case(reading_outside(*OUTSIDE[name])) for name in OUTSIDE},
    "reduce reads what is computed of constants": case(
        reading_outside(*OUTSIDE["reduce"], bound="stablehlo.cosine %zero : tensor<f32>")
    ),
    "sorted downwards": case(lambda x: jnp.sort(x, descending=True), X),
    "argsort": case(lambda x: jnp.argsort(x, 0), X),
    "sorted by two keys": case(lambda x, y: lax.sort((x, y, x + y), num_keys=2, dimension=1), X, X),
    "median": case(lambda x: jnp.median(x, 1), X),
    "places in a sorted array": case(lambda x, y: jnp.searchsorted(jnp.sort(x[:, 0]), y[:, 0]), X, X),
    "different values": case(lambda i: jnp.unique(i, size=8, fill_value=0), ROWS, large=True),
    "sorted in a loop": case(lambda x: lax.scan(lambda c, r: (jnp.sort(c + r), None), x[0], x)[0], X),
    "two moments at once": case(two_moments, X),
    "largest with its place": case(largest_with_place, X),
    "largest with its place, of a column": case(lambda x: largest_with_place(x.T), X),
    "argmax of products": case(lambda x, w: jnp.argmax(x @ w, -1), X, SQUARE),
    "logsumexp": case(lambda x: jax.nn.logsumexp(x, 1), X),
    "softmax": case(lambda x: jax.nn.softmax(x, 0), X),
    "mean and variance": case(lambda x: (x.mean(0), x.var(1)), X),
    "norms": case(lambda x: (jnp.linalg.norm(x), jnp.abs(x).max()), X),
    "starts where an argument says": case(lambda x, s: lax.reduce(x, s, lax.add, (0,)), X, arg()),
    "bits and, or": case(lambda i: (lax.reduce_and(i, (0,)), lax.reduce_or(i, (1,))), arg(64, 32, dtype="int32")),
    "running product, backwards": case(lambda x: lax.cumprod(jnp.tanh(x), 0, reverse=True), X),
    "running logsumexp": case(lambda x: lax.cumlogsumexp(x, 1), X),
    "associative scan": case(lambda x: lax.associative_scan(jnp.maximum, x), X),
    "dilated windows": case(
        lambda x: lax.reduce_window(
            x, 0.0, lax.add, (2, 2), (1, 1), ((1, 0), (0, 1)), base_dilation=(1, 2), window_dilation=(2, 1)
        ),
        X,
    ),
    "counts of values": case(lambda i: jnp.bincount(i, length=32), ROWS),
    "histogram": case(lambda x: jnp.histogram(x, bins=8, range=(-2.0, 2.0))[0], X, large=True),
    "sum by segment": case(lambda x, i: jax.ops.segment_sum(x[:16], i, 8), X, ROWS),
    "largest by segment": case(lambda x, i: jax.ops.segment_max(x[:16], i, 8), X, ROWS),
    "top, about": case(lambda x: lax.approx_max_k(x, 4), X),
    "least, about, of products": case(lambda x, w: lax.approx_min_k(x @ w, 4)[0], X, SQUARE),
}  # fmt: skip
