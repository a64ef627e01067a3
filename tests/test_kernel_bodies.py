"""Bodies of kernels that are damaged, lie, or work in unusual ways, and kernels in loops and regions."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, PartitionSpec
from test_hand_written import (
    CAUSAL,
    GROUPED,
    HEADS,
    S,
    attention,
    free,
    gradient,
    kernels,
    lowered,
    on_mesh,
    read,
    splash,
)

from toast_cli import xla
from toast_cli.base.errors import InputError
from toast_cli.frontend.loading import load
from toast_cli.kernels.mosaic import main_of, parse_body, read_mosaic

BODY = re.compile(r"body\\22: \\22([A-Za-z0-9+/=]+)")


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: "",
        lambda body: body[: len(body) // 8 * 4],
        lambda body: "A" * 9_000_000,
        lambda body: "?",
        lambda body: base64.b64encode(b"module {}").decode(),
        lambda body: with_grid(body, [4, 8, 2, 10**15]),
        lambda body: with_grid(body, [1000, 8, 2, 2]),
        lambda body: with_grid(body, [-4, 8, 2, 2]),
        lambda body: with_grid(body, [4, 8]),
        lambda body: told(body, "window_bounds = array<i64: 1, 1", "window_bounds = array<i64: 0, 1"),
        lambda body: told(body, "window_bounds = array<i64: 1, 1", f"window_bounds = array<i64: {2**62}, {2**62}"),
        lambda body: told(body, "window_bounds = array<i64: 1,", "window_bounds = array<i64:"),
        lambda body: told(body, "transform_indices = @transform_0", "transform_indices = @nobody"),
        lambda body: told(body, "transform_indices = @transform_0", "transform_indices = @main"),
        lambda body: told(body, "scalar_prefetch = 0", "scalar_prefetch = 1000000000000"),
        lambda body: told(body, "iteration_bounds = array<i64", "iteration_bounds = array<f32"),
        lambda body: told(body, "iteration_bounds = array<i64: 4", f"iteration_bounds = array<i64: {2**62}"),
    ],
    ids=["empty", "cut", "large", "no base64", "no kernel", "endless", "too long", "negative", "few axes", "no window",
         "wide window", "flat window", "no map", "itself its map", "many operands", "broken grid", "all of it"],
)  # fmt: skip
def test_damaged_kernels_are_whole_or_an_error(damage: Callable[[str], str]) -> None:
    text = lowered(attention, *(HEADS,) * 3)
    (body,) = BODY.findall(text)
    try:
        source = load("k.mlir", content=text.replace(body, damage(body)).encode())
    except InputError:
        return
    (op,) = kernels(source)
    assert op.opaque or not free(op)[0].startswith("a")  # the batch is not what the grid says


def told(body: str, was: str, lie: str) -> str:
    """A body that says something else; MLIR may be text."""
    text = str(parse_body({"body": body}))
    assert was in text
    return base64.b64encode(text.replace(was, lie).encode()).decode()


def with_grid(body: str, grid: list[int]) -> str:
    module = parse_body({"body": body})
    main_of(module).attributes["iteration_bounds"] = xla.ir.DenseI64ArrayAttr.get(grid, module.context)
    return base64.b64encode(xla.write_bytecode(module)).decode()


@pytest.mark.parametrize("flops", ["1e999", "9" * 400, "-1", "true", '"x"', "[1]", "1e300"])
def test_estimates_that_cannot_be_are_not_believed(flops: str) -> None:
    text = lowered(partial(attention, causal=False), *(HEADS,) * 3)
    (counted,), (stated,) = (
        kernels(load("k.mlir", content=re.sub(r"(cost_estimate\\22: {)[^}]*}", made, text).encode()))
        for made in (r"\1}", r"\1\\22flops\\22: " + flops.replace('"', r"\\22") + "}")
    )
    assert counted.kernel is not None and counted.kernel == stated.kernel
    assert counted.kernel.products == 4 * 4 * 8 * 256 * 256 * 128


def test_bodies_with_more_integers_than_fit_into_memory() -> None:
    """A grid of four million steps, and 2,000 sums of its two indices, which would take 64 GB."""
    sums = "".join(f'%{k + 1} = "arith.addi"(%{k}, %i) : (i32, i32) -> i32\n' for k in range(2000))
    window = "{transform_indices = @map, window_bounds = array<i64: 8, 128>}"
    body = f"""module {{
      "func.func"() ({{ ^bb0(%i: i32, %j: i32, %x: memref<8x128xf32>, %y: memref<8x128xf32>):
        %0 = "arith.addi"(%i, %j) : (i32, i32) -> i32
        {sums} "func.return"() : () -> ()
      }}) {{function_type = (i32, i32, memref<8x128xf32>, memref<8x128xf32>) -> (), sym_name = "main",
           iteration_bounds = array<i64: 2000, 2000>, window_params = [{window}, {window}]}} : () -> ()
      "func.func"() ({{ ^bb0(%i: i32, %j: i32):
        "func.return"(%i, %j) : (i32, i32) -> ()
      }}) {{function_type = (i32, i32) -> (i32, i32), sym_name = "map"}} : () -> ()
    }}"""
    kernel = read_mosaic({"body": base64.b64encode(body.encode()).decode()})
    assert [index.count for index in kernel.windows[0].index] == [2000, 2000]  # type: ignore[union-attr]


# ---------------------------------------------------------------- unusual ones


def in_place(first: Any, x: Any, y: Any) -> Any:
    """Writes each window of the result where the first operand is."""

    def body(x_ref: Any, y_ref: Any, o_ref: Any) -> None:
        o_ref[...] = y_ref[...] * 2

    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(
        body, out_shape=x, grid=(8,), in_specs=[first or spec, spec], out_specs=spec, input_output_aliases={0: 0}
    )(x, y)


def shared_by_cores(semantics: str, x: Any) -> Any:
    def body(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((32, 128), lambda i: (i, 0))
    parameters = pltpu.CompilerParams(dimension_semantics=(semantics,))
    return pl.pallas_call(body, out_shape=x, grid=(2,), in_specs=[spec], out_specs=spec, compiler_params=parameters)(x)


ROWS = S((64, 128), jnp.float32)


@pytest.mark.parametrize(
    ("function", "arrays", "expected"),
    [
        (partial(in_place, None), 2, ["a.", "a.", "a."]),
        (partial(in_place, pl.BlockSpec(memory_space=pl.ANY)), 2, None),  # what is written has to be where that is
        (partial(shared_by_cores, pltpu.PARALLEL), 1, ["a.", "a."]),
        (partial(shared_by_cores, pltpu.CORE_PARALLEL), 1, None),  # as many steps as a chip has cores
    ],
    ids=["in place", "in place of a whole array", "parallel", "for each core"],
)  # fmt: skip
def test_unusual_kernels(function: Any, arrays: int, expected: list[str] | None) -> None:
    (op,) = kernels(read(function, *(ROWS,) * arrays))
    assert (None if op.opaque else free(op)) == expected


# ---------------------------------------------------------------- in loops and regions


@pytest.mark.parametrize("remat", [False, True])
def test_masks_that_a_loop_carries_are_known(remat: bool) -> None:
    """Layers of a scan: of 2 x 2 blocks of 128 a causal mask needs 3, forward and backward."""

    def layer(q: Any, kv: Any) -> Any:
        return splash(8, CAUSAL, q, *kv), None

    def layers(q: Any, k: Any, v: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(layer) if remat else layer, q, (k, v))[0]

    stacked = S((3, *GROUPED.shape), GROUPED.dtype)
    found = kernels(read(partial(gradient, layers), HEADS, stacked, stacked))
    block = 2 * 4 * 8 * 128 * 128 * 128
    products = {op.kernel.name: op.kernel.products / block for op in found if op.kernel}
    assert products == {
        "splash_mha_fwd_residuals": 2 * 3, "splash_mha_dkv_no_residuals": 4 * 3, "splash_mha_dq_no_residuals": 3 * 3
    }  # fmt: skip


def test_a_kernel_in_a_region_costs_what_it_costs_on_a_part() -> None:
    spec = PartitionSpec("data", "model")
    mesh = AbstractMesh((2, 4), ("data", "model"))

    def inside(q: Any, k: Any, v: Any) -> Any:
        return jax.shard_map(attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)(q, k, v)

    split = jax.ShapeDtypeStruct(HEADS.shape, HEADS.dtype, sharding=jax.NamedSharding(mesh, spec))
    whole, region = on_mesh(attention, *(HEADS,) * 3), on_mesh(inside, *(split,) * 3)
    (found,) = whole.evaluator.kernels((whole.shard("q.0", "data"), whole.shard("q.1", "model")))
    (expected,) = region.evaluator.kernels(())
    assert (found.flops, found.bytes, found.seconds) == (expected.flops, expected.bytes, expected.seconds)
