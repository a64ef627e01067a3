"""Collectives outside manual regions: those of one device are dropped, others are refused by whatever is written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emitted import emit
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxlib.mlir.dialects import stablehlo
from normalised_programs import names, normalised
from programs import Case, evaluator_of, round_mesh, source_of_text

from toast_cli.base.errors import InputError, UsageError

A = "tensor<4x8xf32>"
CHANNEL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>"
SUM = """({{
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }})"""
ONE = "replica_groups = dense<0> : tensor<1x1xi64>"
EACH = "replica_groups = dense<[[0], [1]]> : tensor<2x1xi64>"
BOTH = "replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>"
ALL = "replica_groups = dense<> : tensor<0x0xi64>"
GLOBAL = f"{CHANNEL}, use_global_device_ids"


def collective(name: str, attributes: str, body: str = "", partitions: int = 1, replicas: int = 1) -> str:
    text = body.format()
    return f"""module attributes {{mhlo.num_partitions = {partitions} : i32, mhlo.num_replicas = {replicas} : i32}} {{
  func.func @main(%x: {A}) -> {A} {{
    %0 = stablehlo.tanh %x : {A}
    %1 = "stablehlo.{name}"(%0) <{{{attributes}}}> {text} : ({A}) -> {A}
    %2 = stablehlo.sine %1 : {A}
    return %2 : {A}
  }}
}}"""


ALONE = [
    collective("all_reduce", f"{ONE}, {GLOBAL}", SUM),
    collective("all_reduce", f"{ONE}, {CHANNEL}", SUM),
    collective("all_reduce", ONE, SUM),
    collective("all_reduce", ALL, SUM),
    collective("all_reduce", ALL, SUM, partitions=2),
    collective("all_reduce", f"{EACH}, {GLOBAL}", SUM, partitions=2),
    collective("all_reduce", EACH, SUM, replicas=2),
    collective("all_gather", f"all_gather_dim = 0 : i64, {ONE}, {GLOBAL}"),
    collective("reduce_scatter", f"scatter_dimension = 0 : i64, {ONE}, {GLOBAL}", SUM),
    collective(
        "all_to_all",
        f"split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 1 : i64, {EACH}, {CHANNEL}",
        partitions=2,
    ),
    collective("collective_broadcast", f"{ONE}, {CHANNEL}"),
    collective("collective_permute", f"source_target_pairs = dense<0> : tensor<1x2xi64>, {CHANNEL}"),
    collective(
        "collective_permute",
        f"source_target_pairs = dense<[[1, 1], [0, 0]]> : tensor<2x2xi64>, {CHANNEL}",
        partitions=2,
    ),
    *([collective("collective_reduce", ONE, SUM)] if hasattr(stablehlo, "CollectiveReduceOp") else []),  # jaxlib 0.12
]


@pytest.mark.parametrize("text", ALONE)
def test_what_no_device_shares_is_dropped(text: str) -> None:
    outcome = normalised(text)
    assert names(outcome.module) == ["tanh", "sine"]
    assert not any("communicate" in notice for notice in outcome.notices)


def test_what_nobody_sends_is_zero() -> None:
    text = collective("collective_permute", f"source_target_pairs = dense<> : tensor<0x2xi64>, {CHANNEL}", partitions=2)
    assert "dense<0.000000e+00>" in str(normalised(text).module)
    assert "collective_permute" not in names(normalised(text).module)


TOGETHER = [
    collective("all_reduce", f"{BOTH}, {GLOBAL}", SUM, partitions=2),
    collective("all_reduce", BOTH, SUM, replicas=2),
    collective("all_reduce", ALL, SUM, replicas=2),
    collective("all_reduce", f"{ALL}, {CHANNEL}", SUM, partitions=2),
    collective("all_reduce", f"{ONE}, {CHANNEL}", SUM, partitions=2),
    collective("reduce_scatter", f"scatter_dimension = 0 : i64, {ONE}, {CHANNEL}", SUM, partitions=2),
    collective(
        "collective_permute",
        f"source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>, {CHANNEL}",
        partitions=2,
    ),
    collective(
        "collective_permute", f"source_target_pairs = dense<0> : tensor<1x2xi64>, {CHANNEL}", partitions=2
    ),  # device 1 has zeros
]


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
@pytest.mark.parametrize("text", TOGETHER[:2] + TOGETHER[-2:])
def test_what_devices_share_is_not_written(text: str, form: str) -> None:
    source = source_of_text(text)
    lowered = Case(source, evaluator_of(source, round_mesh(data=2))).lowered(())
    with pytest.raises(UsageError, match=r":\d+.* communicates outside manual regions;.*without pmap"):
        emit(source, lowered, form)


@pytest.mark.parametrize("text", TOGETHER)
def test_what_devices_share_is_mentioned(text: str) -> None:
    assert any(notice.startswith("1 operation communicates") for notice in normalised(text).notices)


def test_a_shape_that_one_device_cannot_make() -> None:
    text = collective("all_gather", f"all_gather_dim = 0 : i64, {ONE}, {GLOBAL}").replace(A, "tensor<8x8xf32>")
    text = text.replace("main(%x: tensor<8x8", "main(%x: tensor<4x8").replace(
        "tanh %x : tensor<8x8", "tanh %x : tensor<4x8"
    )
    text = text.replace(": (tensor<8x8", ": (tensor<4x8")
    with pytest.raises(InputError, match="changes the shape of what it is given"):
        normalised(text)


HLO = {
    "at once": "  a = f32[4] all-reduce(p), replica_groups={{0}}, to_apply=add",
    "scattered": "  a = f32[4] reduce-scatter(p), replica_groups={{0}}, dimensions={0}, to_apply=add",
    "two at once": """  t = (f32[4], f32[4]) all-reduce(p, p), replica_groups={}, to_apply=add
  a = f32[4] get-tuple-element(t), index=1""",
}


@pytest.mark.parametrize("name", HLO)
def test_hlo_text(name: str) -> None:
    text = f"""HloModule m
add {{
  l = f32[] parameter(0)
  r = f32[] parameter(1)
  ROOT s = f32[] add(l, r)
}}
ENTRY e {{
  p = f32[4] parameter(0)
{HLO[name]}
  ROOT n = f32[4] negate(a)
}}"""
    assert names(normalised(text).module) == ["negate"]


def test_shard_map_on_one_device() -> None:
    """Ring attention's steps, tensor parallelism and the place in the ring, as JAX writes them for a laptop."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    spec = PartitionSpec("data", "model")

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        y = lax.psum_scatter(lax.all_gather(x, "data", tiled=True) @ w, "model", tiled=True)
        y = lax.ppermute(lax.all_to_all(lax.pmean(y, "model"), "data", 0, 1, tiled=True), "data", [(0, 0)])
        return y * (1 + lax.axis_index(("data", "model")))

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16), (16, 16))]
    outcome = normalised(jax.jit(mapped).lower(*shapes).as_text())
    assert not {"partition_id", "all_reduce", "all_gather", "all_to_all"} & set(names(outcome.module))
    assert "dot_general" in names(outcome.module)
