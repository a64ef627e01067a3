"""Calls: functions, custom calls, callbacks, tokens, feeds, manual regions, shardings of the program's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from programs import arg

from cases.model import ONE, SQUARE, Situation, X, case

P = PartitionSpec
MESH = AbstractMesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
A, W = "tensor<64x32xf32>", "tensor<32x32xf32>"
ANYWHERE = "XLA's partitioner refuses it here"
CALLBACK: dict[str, Any] = {"runs": False, "compiles": False}
FEED: dict[str, Any] = {"runs": False, "compiles": False}


def read_text(body: str, results: str = A) -> str:
    return f"""func.func public @main(%x: {A}, %w: {W}) -> {results} {{
      {body}
    }}"""


def printing(x: jax.Array, w: jax.Array) -> jax.Array:
    y = x @ w
    jax.debug.print("{}", y.sum())
    return jnp.sin(y)


def ordered(x: jax.Array, w: jax.Array) -> jax.Array:
    def step(c: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        io_callback(np.add, jax.ShapeDtypeStruct((), jnp.int32), i, i, ordered=True)
        return jnp.tanh(c @ w), None

    return lax.scan(step, x, jnp.arange(4))[0]


def asked(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct((64, 32), jnp.float32), x @ w) + x


def by_hand(body: Any, ins: Any, outs: Any) -> Any:
    return jax.shard_map(body, mesh=MESH, in_specs=ins, out_specs=outs, check_vma=False)


def row_parallel(x: jax.Array, w: jax.Array) -> jax.Array:
    spec = P("data", "model")
    return by_hand(lambda a, b: lax.psum(a @ b, "model"), (spec, P("model", None)), P("data", None))(x, w) * 2


def either_by_hand(x: jax.Array, w: jax.Array) -> jax.Array:
    def body(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.cond(b[0, 0] > 0, lambda: lax.psum(a @ b, "model"), lambda: lax.psum(a, "model")[:, :1] + a @ b)

    return by_hand(body, (P("data", "model"), P("model", None)), P("data", None))(x, w)


def constrained_by_hand(x: jax.Array, w: jax.Array) -> jax.Array:
    """A constraint in a region, over an axis that the region leaves to the compiler."""

    def body(a: jax.Array) -> jax.Array:
        return 2 * lax.with_sharding_constraint(jnp.sin(a), NamedSharding(MESH, P(None, "model")))

    return (
        jax.shard_map(body, mesh=MESH, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=False)(x)
        @ w
    )


def nested_by_hand(x: jax.Array, w: jax.Array) -> jax.Array:
    over = P(None, "model")

    def body(a: jax.Array) -> jax.Array:
        return 2 * jax.shard_map(
            lambda b: b + lax.psum(b, "model"), in_specs=over, out_specs=over, axis_names={"model"}, check_vma=False
        )(jnp.sin(a))

    return (
        jax.shard_map(body, mesh=MESH, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=False)(x)
        @ w
    )


MANUAL: dict[str, Any] = {"mesh": "4x2"}


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -1, 1)


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (g * jnp.cos(x),))


def scoped(x: jax.Array, w: jax.Array) -> jax.Array:
    """Scopes that hold operations, and scopes that do."""
    with jax.named_scope("f"):
        x = x @ w
        with jax.named_scope("g"):
            x = jnp.sin(x) @ w
            with jax.named_scope("h"):
                x = jnp.cos(x @ w)
        return x + 1


CALLS: dict[str, Situation] = {
    "functions that call functions": case(
        lambda x, w: jax.jit(jax.jit(lambda y: y @ w))(x) + jax.jit(jnp.sin)(x), X, SQUARE
    ),
    "a derivative by hand": case(jax.grad(lambda x, w: jnp.sum(clipped(x @ w))), X, SQUARE),
    "scopes in scopes": case(scoped, X, SQUARE),
    "composite": case(
        f"""func.func public @main(%x: {A}) -> {A} {{
          %0 = stablehlo.composite "my.gelu" %x {{composite_attributes = {{approximate = true}},
            decomposition = @impl, version = 1 : i32}} : ({A}) -> {A}
          return %0 : {A}
        }}
        func.func private @impl(%x: {A}) -> {A} {{
          %0 = stablehlo.tanh %x : {A}
          return %0 : {A}
        }}"""
    ),
    "custom call nobody knows": case(
        read_text(
            f"""%0 = stablehlo.custom_call @mine(%x, %w) {{backend_config = "a"}} : ({A}, {W}) -> {A}
            return %0 : {A}"""
        ),
        runs=False,
        compiles=False,
    ),
    "custom call with an effect": case(
        read_text(
            f"""%0 = stablehlo.custom_call @mine(%x) {{has_side_effect = true}} : ({A}) -> tensor<f32>
            %1 = stablehlo.sine %x : {A}
            return %1 : {A}"""
        ),
        refused={"stablehlo": ANYWHERE},
        runs=False,
        compiles=False,
    ),
    "shardings of its own": case(
        lambda x, w: lax.with_sharding_constraint(x @ w, NamedSharding(MESH, P("data", None))) + 1, X, SQUARE
    ),
    "region by hand": case(
        row_parallel, X, SQUARE, **MANUAL,
    ),
    "branches by hand": case(
        either_by_hand, X, SQUARE, **MANUAL,
    ),
    "constraint in a region by hand": case(constrained_by_hand, X, SQUARE, **MANUAL),
    "region in a region by hand": case(
        nested_by_hand, X, SQUARE, mesh="4x2", refused={"hlo": ".shard_map. in another one"}
    ),
    "printing": case(printing, X, SQUARE, **CALLBACK),
    "ordered callback in a loop": case(ordered, X, SQUARE, **CALLBACK),
    "result of a callback": case(asked, X, SQUARE, **CALLBACK),
    "tokens": case(
        read_text(
            f"""%t = stablehlo.create_token : !stablehlo.token
            %u = stablehlo.after_all %t, %t : !stablehlo.token
            %0 = stablehlo.sine %x : {A}
            return %0 : {A}"""
        )
    ),
    "token in and out": case(
        f"""func.func public @main(%t: !stablehlo.token, %x: {A}) -> (!stablehlo.token, {A}) {{
          %0 = stablehlo.sine %x : {A}
          return %t, %0 : !stablehlo.token, {A}
        }}""",
        runs=False,
    ),
    "infeed": case(
        read_text(
            f"""%t = stablehlo.create_token : !stablehlo.token
            %0:2 = "stablehlo.infeed"(%t) <{{infeed_config = "", layout = [[1, 0]]}}>
              : (!stablehlo.token) -> ({A}, !stablehlo.token)
            %1 = stablehlo.add %0#0, %x : {A}
            return %1 : {A}"""
        ),
        refused={"stablehlo": ANYWHERE},
        **FEED,
    ),
    "outfeed": case(
        read_text(
            f"""%t = stablehlo.create_token : !stablehlo.token
            %0 = stablehlo.sine %x : {A}
            %u = "stablehlo.outfeed"(%0, %t) <{{outfeed_config = ""}}> : ({A}, !stablehlo.token) -> !stablehlo.token
            return %0 : {A}"""
        ),
        refused={"stablehlo": ANYWHERE},
        **FEED,
    ),
    "random numbers of the device": case(
        read_text(
            f"""%a = stablehlo.constant dense<0.0> : tensor<f32>
            %b = stablehlo.constant dense<1.0> : tensor<f32>
            %s = stablehlo.constant dense<[64, 32]> : tensor<2xi64>
            %0 = stablehlo.rng %a, %b, %s, distribution = UNIFORM : (tensor<f32>, tensor<f32>, tensor<2xi64>) -> {A}
            %1 = stablehlo.add %0, %x : {A}
            return %1 : {A}"""
        ),
        runs=False,
    ),
    "number of a device": case(
        read_text(
            f"""%p = stablehlo.partition_id : tensor<ui32>
            %r = stablehlo.replica_id : tensor<ui32>
            %s = stablehlo.add %p, %r : tensor<ui32>
            %q = stablehlo.convert %s : (tensor<ui32>) -> tensor<f32>
            %b = stablehlo.broadcast_in_dim %q, dims = [] : (tensor<f32>) -> {A}
            %0 = stablehlo.add %b, %x : {A}
            return %0 : {A}"""
        )
    ),
    "size of a dimension": case(
        read_text(
            f"""%n = stablehlo.get_dimension_size %x, dim = 0 : ({A}) -> tensor<i32>
            %f = stablehlo.convert %n : (tensor<i32>) -> tensor<f32>
            %b = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> {A}
            %0 = stablehlo.divide %x, %b : {A}
            return %0 : {A}"""
        )
    ),
    "index from a call": case(lambda x, i: x[jnp.clip(i, 0, 63)] + jnp.float32(i), X, ONE),
    "a batch of calls": case(jax.vmap(lambda r: jax.jit(lambda v: v / v.sum())(r)), arg(64, 32)),
}  # fmt: skip
