"""Programs and helpers for the tests of what a module looks like once it is normalised."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from toast_cli import xla
from toast_cli.frontend.convert import CONVERSIONS
from toast_cli.frontend.formats import recognise
from toast_cli.frontend.normalise import Normalised, normalise

F32 = jnp.float32
MESH = AbstractMesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)


def array(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def parsed(text: str) -> Any:
    """The module of MLIR or HLO text. These programs are sound: no need for a child process to read them."""
    data = text.encode()
    if recognise(data) == "hlo-text":
        data = CONVERSIONS["hlo-text"](data)
    return xla.parse_module(xla.make_context(), data)


def normalised(text: str, keep: bool = False) -> Normalised:
    """The outcome for a program in any text format; it verifies, and `main` is its only function."""
    outcome = normalise(parsed(text), "model", keep)
    assert outcome.module.operation.verify()
    functions = [op.name.value for op in outcome.module.body.operations if op.operation.name == "func.func"]
    assert functions == ["main"]
    return outcome


def main_of(module: Any) -> Any:
    return next(op for op in module.body.operations if op.operation.name == "func.func" and op.name.value == "main")


def names(module: Any) -> list[str]:
    """Names of the operations of `main`, nested ones included, in program order; without terminators."""
    found: list[str] = []

    def visit(operation: Any) -> Any:
        if operation.name not in ("func.func", "func.return", "stablehlo.return", "sdy.return"):
            found.append(operation.name.removeprefix("stablehlo."))
        return xla.ir.WalkResult.ADVANCE

    main_of(module).operation.walk(visit, xla.ir.WalkOrder.PRE_ORDER)
    return found


def with_collectives(x: jax.Array) -> jax.Array:
    def body(block: jax.Array) -> jax.Array:
        return lax.psum(block, "data") * lax.axis_index("model")

    rows = PartitionSpec("data", "model")
    return jax.shard_map(body, mesh=MESH, in_specs=rows, out_specs=PartitionSpec(None, "model"))(x * 2) + 1
