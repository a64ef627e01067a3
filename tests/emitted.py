"""What the tests of written files share: small programs, plans for them by name, and what XLA:CPU makes of them.

Compiled for 8 virtual CPU devices. XLA:CPU makes no reduce-scatters: where one is planned, it all-reduces and slices.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from programs import Case, arg, case_of
from run_here import run_program

from toast_cli import xla
from toast_cli.ask_xla.collectives import CompiledCollective, collectives_in
from toast_cli.ask_xla.compile import Dialect, as_stablehlo, collectives_after_partitioning
from toast_cli.ask_xla.numbers import input_sets, relative_error
from toast_cli.emit import emit_hlo, write
from toast_cli.emit.annotations import Annotations
from toast_cli.emit.stablehlo import choose
from toast_cli.frontend import Source
from toast_cli.plan.decisions import Plan
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding

DEVICES = 8


def emit(source: Source, lowered: PartitionedProgram, form: str) -> bytes:
    """The content of a written file."""
    return write(source, lowered, form).content


def emit_shardy(
    source: Source, lowered: PartitionedProgram, *, binary: bool = False, annotate: str = "minimal"
) -> bytes:
    """The content of StableHLO, as text or bytecode."""
    return write(source, lowered, "bytecode" if binary else "stablehlo", annotate).content


def shardy_annotations(source: Source, lowered: PartitionedProgram, annotate: str = "minimal") -> Annotations:
    """The annotations of StableHLO."""
    return choose(source, lowered, annotate)[0]


Collectives = list[tuple[str, tuple[str, ...], float, float]]

N, D, F = 8, 16, 64  # batch, model, hidden
WEIGHTS = {"down": arg(F, D), "up": arg(D, F)}


def loss(p: Any, x: Any) -> Any:
    return jnp.sum((x + jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)


def sgd(p: Any, x: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p, x))


def scanned(ws: Any, x: Any) -> Any:
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), jnp.sum(c)), x, ws)


def branched(p: Any, x: Any, w: Any) -> Any:
    return lax.cond(p, lambda: jnp.tanh(x @ w), lambda: x[:, :1] * jnp.ones((N, F)))


def looked_up(table: Any, w: Any, i: Any) -> Any:
    return lax.erf_inv(jnp.tanh(table[i] @ w)), lax.top_k(table @ w, 2)[0]


@cache
def trained() -> Case:
    return case_of(sgd, WEIGHTS, arg(N, D), donate=(0,))


@cache
def looped() -> Case:
    return case_of(scanned, arg(5, D, D), arg(N, D))


def compiled(case: Case, plan: Plan, form: str, annotate: str = "minimal") -> Any:
    lowered = case.lowered(plan)
    if form == "hlo":
        program = as_stablehlo(emit_hlo(case.source, lowered), "hlo")
    else:
        program = emit_shardy(case.source, lowered, annotate=annotate)
    return xla.compile_program(program, xla.cpu_devices(DEVICES), shardy=form == "stablehlo")


def collectives(case: Case, executable: Any) -> Collectives:
    """(kind, axes, bytes of the result per device, count), equal ones together, sorted; as `Case.collectives`."""
    mesh = case.problem.mesh
    found: dict[tuple[str, tuple[str, ...], float], float] = defaultdict(float)
    for one in collectives_in(xla.compiled_text(executable), mesh.names, mesh.sizes):
        found[one.kind, one.axes, float(one.bytes)] += one.count
    return sorted((*key, count) for key, count in found.items())


def on_cpu(case: Case, planned: Collectives) -> Collectives:
    """What XLA:CPU makes of planned collectives: each reduce-scatter is an all-reduce of as many times the bytes."""
    sizes = dict(zip(case.problem.mesh.names, case.problem.mesh.sizes, strict=True))
    found: dict[tuple[str, tuple[str, ...], float], float] = defaultdict(float)
    for kind, axes, size, count in planned:
        if kind == "reduce-scatter":
            kind, size = "all-reduce", size * prod(sizes[a] for a in axes)
        found[kind, axes, size] += count
    return sorted((*key, count) for key, count in found.items())


def worst_error(source: Source, lowered: PartitionedProgram, form: str) -> float:
    """The largest relative error of any result, partitioned against whole."""
    inputs = input_sets(source.module, 1, 1)[0]
    shapes = [tuple(kind.shape) for kind in xla.main_function(source.module).type.results]
    program = emit_shardy(source, lowered) if form == "stablehlo" else as_stablehlo(emit_hlo(source, lowered), "hlo")
    whole = run_program(xla.write_bytecode(source.module), inputs, shapes, 1, shardy=True)
    split = run_program(program, inputs, shapes, prod(lowered.axis_sizes), shardy=form == "stablehlo")
    return max(relative_error(a, b) for a, b in zip(whole, split, strict=True))


def partitioned(case: Case, plan: Plan, form: Dialect = "stablehlo") -> list[CompiledCollective]:
    """The collectives of the written program as XLA's partitioner leaves it."""
    mesh, written = case.problem.mesh, emit(case.source, case.lowered(plan), form)
    found = collectives_after_partitioning(written, form, dict(zip(mesh.names, mesh.sizes, strict=True)))
    assert isinstance(found, list), found
    return found


def text_of(source: Source) -> str:
    text: str = source.module.operation.get_asm(enable_debug_info=True)
    return text


def strategy(case: Case, *decisions: str) -> Plan:
    """`x.0=data` -> the plan that shards dimension 0 of argument x over data; in order."""
    return tuple(case.shard(*decision.split("=")) for decision in decisions)


UP_IN, UP_OUT = "p['up'].0", "p['up'].1"
TRAINED = {
    "data parallel": (["x.0=data"], [("all-reduce", ("data",), 4096.0, 2.0)]),
    "fsdp": (
        ["x.0=data", f"{UP_IN}=data"],
        [("all-gather", ("data",), 4096.0, 2.0), ("all-reduce", ("data",), 4096.0, 2.0)],
    ),
    "megatron": ([f"{UP_OUT}=model"], [("all-reduce", ("model",), 512.0, 1.0)]),
    "megatron, batch split between": (
        [f"{UP_OUT}=model", "x.0=model"],
        [("all-gather", ("model",), 512.0, 2.0), ("all-reduce", ("model",), 512.0, 1.0)],
    ),
    "fsdp x megatron": (
        ["x.0=data", f"{UP_OUT}=model", f"{UP_IN}=data"],
        [
            ("all-gather", ("data",), 2048.0, 2.0),
            ("all-reduce", ("data",), 2048.0, 2.0),
            ("all-reduce", ("model",), 128.0, 1.0),
        ],
    ),
}
LOOPED = {
    "carry split": (["x.0=data"], []),
    "weights gathered in the loop": (["x.0=data", "ws.1=data"], [("all-gather", ("data",), 1024.0, 5.0)]),
    "carry split twice": (["x.0=data", "x.1=model"], [("all-reduce", ("model",), 128.0, 5.0)]),
}

# A program for shardings by hand.
SMALL = """
module @jit_f attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<8x16xf32>, %arg1: tensor<16x32xf32>, %arg2: tensor<32x16xf32>) -> (tensor<8x16xf32>) {
    %0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0] : (tensor<8x16xf32>, tensor<16x32xf32>) -> tensor<8x32xf32>
    %1 = stablehlo.tanh %0 : tensor<8x32xf32>
    %2 = stablehlo.dot_general %1, %arg2, contracting_dims = [1] x [0] : (tensor<8x32xf32>, tensor<32x16xf32>) -> tensor<8x16xf32>
    %3 = stablehlo.add %2, %arg0 : tensor<8x16xf32>
    return %3 : tensor<8x16xf32>
  }
}
"""  # noqa: E501
# Values: 0 to 2 the arguments, then %0 to %3. Ops: 0 to 2 the arguments, 3 to 6 the operations, 7 the result.
BATCH, WHOLE, ROWS, COLUMNS = ((0,), ()), ((), ()), ((0,), ()), ((), (1,))


def by_hand(
    axes: dict[str, int],
    shardings: list[Sharding],
    computed: dict[int, Sharding] | None = None,
    required: dict[tuple[int, int], Sharding] | None = None,
) -> PartitionedProgram:
    return PartitionedProgram(tuple(axes), tuple(axes.values()), shardings, computed or {}, required or {})
