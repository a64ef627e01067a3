"""What manual regions (`shard_map`) do by hand is in the figures: compute, collectives, memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from toast_cli.ask_xla.compile import collectives_after_partitioning
from toast_cli.ask_xla.verdict import compare_traffic
from toast_cli.base.errors import InputError
from toast_cli.hardware import load_spec
from toast_cli.pipeline import Outcome, partition
from toast_cli.plan.decisions import Shard
from toast_cli.price.collectives import collective_seconds
from toast_cli.price.cost import BY_HAND
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.kernel_pricing import RegionPrice
from toast_cli.price.manual_regions import region_prices
from toast_cli.report.model import Report
from toast_cli.request import Request

P = PartitionSpec
MESH = AbstractMesh((4, 4), ("data", "model"), (AxisType.Auto,) * 2)
AXES = {"data": 4, "model": 4}
ROUND = [(k, (k + 1) % 4) for k in range(4)]
TRIPS = 4
Function = Callable[..., Any]
Shape = tuple[int, ...]


def by_hand(body: Function, ins: Any, outs: Any) -> Function:
    return jax.shard_map(body, mesh=MESH, in_specs=ins, out_specs=outs, check_vma=False)


def ring_attention(x: Any, w: Any) -> Any:
    def ring(q: Any, k: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            k, out = carry
            scores = jnp.einsum("bqd,bkd->bqk", q, k)
            return (lax.ppermute(k, "model", ROUND), out + jnp.einsum("bqk,bkd->bqd", jnp.tanh(scores), k)), None

        return lax.scan(step, (k, jnp.zeros_like(q)), length=TRIPS)[0][1]

    spec = P("data", "model")
    return by_hand(ring, (spec, spec), spec)(x, x @ w) @ w


def experts(x: Any, w: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        sent = lax.all_to_all(x, "model", 1, 0, tiled=True)
        return lax.all_to_all(jax.nn.relu(sent @ w), "model", 0, 1, tiled=True)

    return by_hand(layer, (P("data"), P(None, None)), P("data"))(x, w)


def tensor_parallel(x: Any, w: Any) -> Any:
    def mlp(x: Any, w: Any) -> Any:
        return lax.psum(jnp.tanh(x @ w) @ w.T, "model")

    return x + by_hand(mlp, (P("data"), P(None, "model")), P("data"))(x, w)


def fsdp(x: Any, w: Any) -> Any:
    def layers(x: Any, w: Any) -> Any:
        def layer(x: Any, _: Any) -> Any:
            whole = lax.all_gather(w, "data", axis=0, tiled=True)
            piece = lax.psum_scatter(x @ whole, "model", scatter_dimension=2, tiled=True)
            return lax.all_gather(jnp.tanh(piece), "model", axis=2, tiled=True), None

        return lax.scan(layer, x, length=TRIPS)[0]

    return by_hand(layers, (P("data"), P("data", None)), P("data"))(x, w)


def halves(x: Any, w: Any) -> Any:
    """Groups that are no axes: pairs of neighbours."""

    def add(x: Any) -> Any:
        return lax.psum(x, "model", axis_index_groups=[[0, 1], [2, 3]])

    return by_hand(add, P("data", None, "model"), P("data", None, "model"))(x @ w)


def nothing_sent(x: Any, w: Any) -> Any:
    return by_hand(jnp.tanh, P("data", "model"), P("data", "model"))(x @ w)


def over_one_axis(body: Function, ins: Any, outs: Any) -> Function:
    """By hand over "model"; "data" is left to the partitioner."""
    return jax.shard_map(body, mesh=MESH, in_specs=ins, out_specs=outs, axis_names={"model"}, check_vma=False)


def partly(x: Any, w: Any) -> Any:
    def mlp(x: Any, w: Any) -> Any:
        return lax.psum(jnp.tanh(x @ w) @ w.T, "model")

    return x + over_one_axis(mlp, (P(), P(None, "model")), P())(x, w)


def pipeline(x: Any, w: Any) -> Any:
    """Four stages, each with columns of the weight; the batch is not split by hand."""

    def stages(x: Any, w: Any) -> Any:
        def step(x: Any, _: Any) -> Any:
            return lax.ppermute(jnp.tanh(x @ w @ w.T), "model", ROUND), None

        return lax.psum(lax.scan(step, x, length=TRIPS)[0], "model")

    return over_one_axis(stages, (P(), P(None, "model")), P())(x, w)


def gathered(x: Any, w: Any) -> Any:
    """What is gathered by hand XLA does not split further: rows of the weight, and what is made of them."""

    def mlp(x: Any, w: Any) -> Any:
        return jnp.tanh(lax.all_gather(x @ w, "model", axis=2, tiled=True))

    return x + over_one_axis(mlp, (P(), P(None, "model")), P())(jnp.sin(x), w)


def gradient(function: Function) -> Function:
    def step(x: Any, w: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: (function(x, w) ** 2).mean())(w)

    return step


PROGRAMS: dict[str, Function] = {
    "ring attention": ring_attention,
    "experts": experts,
    "tensor parallel": tensor_parallel,
    "fsdp": fsdp,
    "halves": halves,
    "nothing sent": nothing_sent,
    "ring attention's gradient": gradient(ring_attention),
    "experts' gradient": gradient(experts),
    "tensor parallel's gradient": gradient(tensor_parallel),
    "fsdp's gradient": gradient(fsdp),
    "partly": partly,
    "partly's gradient": gradient(partly),
    "pipeline": pipeline,
    "gathered": gathered,
}
X, W = (16, 64, 128), (128, 128)


@cache
def outcome_of(name: str, machine: str = "v4-32") -> Outcome:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (X, W)]
    text = jax.jit(PROGRAMS[name]).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text(debug_info=True)
    request = Request("regions.mlir", machine, "data=4,model=4", iterations=30, content=text.encode())
    return partition(request)


def region_of(outcome: Outcome) -> int:
    return next(k for k, op in enumerate(outcome.problem.program.ops) if op.region is not None)


def price_of(outcome: Outcome) -> RegionPrice:
    """Of a region over all axes."""
    return region_prices(outcome.problem, outcome.evaluator.profile).price[region_of(outcome)](())


@pytest.mark.parametrize("name", PROGRAMS)
def test_collectives_are_as_promised(name: str) -> None:
    outcome = outcome_of(name)
    found = collectives_after_partitioning(outcome.emit("stablehlo").content, "stablehlo", AXES)
    assert isinstance(found, list)
    promised = [one.as_written() for one in outcome.report.collectives]
    assert any(one.by_hand for one in promised) == (name != "nothing sent")
    rows = compare_traffic(promised, found, AXES).rows
    assert {(row.kind, row.axes): (row.promised_count, row.promised_bytes) for row in rows} == {
        (row.kind, row.axes): (row.compiled_count, row.compiled_bytes) for row in rows
    }


@pytest.mark.parametrize(
    ("name", "rows", "axes"), [("partly", 16, ["data"]), ("partly's gradient", 64, ["model", "data"])]
)
def test_what_a_region_leaves_to_the_partitioner_is_split_by_the_plan(name: str, rows: int, axes: list[str]) -> None:
    """The batch of 16 over 4 devices: a psum of 4 x 64 x 128 f32, and each kernel does a quarter. What is kept for the
    gradient is split by hand, and further."""
    outcome = outcome_of(name)
    problem, number = outcome.problem, region_of(outcome)
    batch = next(k for k, group in enumerate(problem.dimensions.groups) if group.role == "batch")
    evaluator, plan = outcome.evaluator, problem.canonical((Shard(batch, 0),))
    whole, split = ([use for use in evaluator.kernels(p) if number in use.ops] for p in ((), plan))
    assert sum(use.flops for use in split) == pytest.approx(sum(use.flops for use in whole) / 4, rel=0.01)
    sums = {use.bytes for use in evaluator.collectives(plan) if use.reason == BY_HAND}
    assert sums == {4 * 64 * 128 * 4}
    by_model = problem.canonical((Shard(batch, 1),))  # an axis that the region has by hand
    assert problem.op_sharding(problem.op_pattern[number], by_model).operands[0] == ((), (), ())
    lowered = evaluator.lowered(plan)
    result = next(r for r in problem.program.ops[number].results if problem.program.values[r].shape[0] == rows)
    assert [problem.mesh.names[axis] for axis in lowered.shardings[result][0]] == axes


def test_rules_of_regions() -> None:
    """Rows and features of what comes in are split by the plan, what is split by hand further; a region over all axes
    takes what it says."""
    (mlp,) = [op for op in outcome_of("partly").problem.program.ops if op.region is not None]
    assert (mlp.rule.sizes, mlp.rule.operands) == ((16, 64, 128, 32), (((0,), (1,), (2,)), ((2,), (3,))))
    assert mlp.rule.results == (((0,), (1,), (2,)),) and not mlp.rule.reduction
    (whole,) = [op for op in outcome_of("tensor parallel").problem.program.ops if op.region is not None]
    assert whole.rule.sizes == ()


def test_a_ring_is_priced_trip_by_trip() -> None:
    """Keys of 16/4 x 64/4 x 128 f32 go around four times; products of a trip on a device: 2 x 4 x 16 x 16 x 128 x 2."""
    outcome = outcome_of("ring attention")
    (ring,) = [one for one in outcome.report.collectives if one.by_hand]
    size = 4 * 16 * 128 * 4
    each = collective_seconds(outcome.problem.mesh, "collective-permute", size, (1,))
    assert (ring.kind, ring.axes, ring.bytes, ring.count) == ("collective-permute", ["model"], size, TRIPS)
    assert ring.seconds == pytest.approx(TRIPS * each)
    assert ring.location.startswith("test_manual_regions.py") and "ppermute" in ring.location
    price = price_of(outcome)
    products = [kernel for kernel in price.kernels if kernel.name == "stablehlo.dot_general"]
    assert sum(kernel.runs for kernel in products) == 2 * TRIPS
    assert sum(kernel.flops for kernel in products) >= TRIPS * 2 * 2 * 4 * 16 * 16 * 128
    assert outcome.problem.program.ops[region_of(outcome)].flops >= 16 * TRIPS * 2 * 2 * 4 * 16 * 16 * 128


def without_regions(outcome: Outcome) -> Evaluator:
    """What evaluates the same program as if its regions took nothing."""
    problem = outcome.problem
    bare = replace(problem.program, ops=tuple(replace(op, region=None) for op in problem.program.ops))
    return Evaluator(replace(problem, program=bare))


@pytest.mark.parametrize("name", ["ring attention", "fsdp", "nothing sent"])
def test_figures_include_what_regions_take(name: str) -> None:
    outcome = outcome_of(name)
    evaluator, plan, number = outcome.evaluator, outcome.result.plan, region_of(outcome)
    price = price_of(outcome)
    cost, without = evaluator.exact_cost(plan), without_regions(outcome).exact_cost(plan)
    assert price.seconds > 0.0
    sent = sum(one.seconds for one in price.collectives)
    assert cost.communication_seconds == pytest.approx(without.communication_seconds + sent)
    assert sum(use.seconds for use in evaluator.kernels(plan) if number in use.ops) == pytest.approx(price.seconds)
    assert cost.compute_seconds == pytest.approx(sum(use.seconds for use in evaluator.kernels(plan)))


def test_memory_inside_counts_while_a_region_runs() -> None:
    """The gathered weight of a layer and its activations; an A100 keeps none of them on the chip."""
    outcome = outcome_of("fsdp", "a100-16")
    plan = outcome.result.plan
    price = price_of(outcome)
    assert price.bytes >= 128 * 128 * 4
    more = outcome.evaluator.memory_profile(plan) - without_regions(outcome).memory_profile(plan)
    assert sorted(set(more)) == [0.0, price.bytes]
    roles = outcome.evaluator.memory_by(plan, lambda value, role: role)
    assert roles["inside"].max() > 0.0 and sum(roles["inside"] > 0.0) == 1


REGION = """
sdy.mesh @mesh = <["data"=4, "model"=4]>
func.func @main(%x: tensor<16x64xf32>) -> tensor<16x64xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"data"}, {"model"}]>]
      out_shardings=[<@mesh, [{"data"}, {"model"}]>] manual_axes={"data", "model"} (%a: tensor<4x16xf32>) {
    %1 = "stablehlo.all_reduce"(%a) <{replica_groups = GROUPS}> ({
    ^bb0(%b: tensor<f32>, %c: tensor<f32>):
      %2 = stablehlo.add %b, %c : tensor<f32>
      stablehlo.return %2 : tensor<f32>
    }) : (tensor<4x16xf32>) -> tensor<4x16xf32>
    sdy.return %1 : tensor<4x16xf32>
  } : (tensor<16x64xf32>) -> tensor<16x64xf32>
  return %0 : tensor<16x64xf32>
}
"""
GROUPS = [
    ("dense<> : tensor<0x0xi64>", ["data", "model"]),
    ("dense<[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]> : tensor<4x4xi64>", ["model"]),
    ("dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>", ["groups of 2"]),
    ("dense<[[0, 1, 2], [3, -1, -1]]> : tensor<2x3xi64>", ["groups of 3"]),
    ("dense<[[0], [1]]> : tensor<2x1xi64>", None),
]


def report_of(groups: str) -> Report:
    request = Request("regions.mlir", "v4-32", "data=4,model=4", content=REGION.replace("GROUPS", groups).encode())
    return partition(request).report


@pytest.mark.parametrize(("groups", "axes"), GROUPS)
def test_groups(groups: str, axes: list[str] | None) -> None:
    assert [one.axes for one in report_of(groups).collectives if one.by_hand] == ([] if axes is None else [axes])


def test_devices_that_the_mesh_has_not() -> None:
    with pytest.raises(InputError, match="name device 16; the mesh has 16"):
        report_of(f"dense<[{list(range(17))}]> : tensor<1x17xi64>")


def test_ragged_exchanges_are_all_to_alls() -> None:
    """They are custom calls, with their groups in the configuration."""

    def send(x: Any, sizes: Any) -> Any:
        return lax.ragged_all_to_all(x, jnp.zeros_like(x), sizes, sizes, sizes, sizes, axis_name="model")

    arguments = [jax.ShapeDtypeStruct((256, 128), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)]
    function = by_hand(send, (P(("data", "model")), P(("data", "model"))), P(("data", "model")))
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    report = partition(Request("ragged.mlir", "v4-32", "data=4,model=4", content=text.encode())).report
    sent = [(one.kind, one.axes, one.bytes) for one in report.collectives if one.by_hand]
    assert sent == [("all-to-all", ["model"], 16 * 128 * 4)]


@pytest.mark.parametrize(("machine", "devices", "updates"), [("h100:8", 8, 8), ("h100:8", 8, 64), ("gb200:16", 16, 8)])
def test_a_block_of_threads_does_each_update_of_a_ragged_exchange(machine: str, devices: int, updates: int) -> None:
    """On GPUs of one host: 32 MiB on each device in blocks of 2.7 GB/s, until that is as fast as NCCL."""

    def send(x: Any, sizes: Any) -> Any:
        return lax.ragged_all_to_all(x, jnp.zeros_like(x), sizes, sizes, sizes, sizes, axis_name="data")

    rows, offsets = (devices * 65536, 128), (devices * updates,)
    arguments = [jax.ShapeDtypeStruct(rows, jnp.float32), jax.ShapeDtypeStruct(offsets, jnp.int32)]
    mesh = AbstractMesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    function = jax.shard_map(send, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    report = partition(Request("ragged.mlir", machine, mesh_shape=f"data={devices}", content=text.encode())).report
    (sent,) = [one for one in report.collectives if one.by_hand]
    in_blocks = 65536 * 128 * 4 / (updates * 2.7e9) if devices == 8 else 0.0
    nccl = collective_seconds(load_spec(machine).mesh({"data": devices}), "all-to-all", 65536 * 128 * 4, (0,))
    assert sent.seconds == pytest.approx(max(in_blocks, nccl))
    assert any("leaves them to NCCL" in note for note in report.analysis.notes) == (in_blocks > nccl)


def test_groups_that_are_no_axes_are_named() -> None:
    (half,) = [one for one in outcome_of("halves").report.collectives if one.by_hand]
    assert (half.kind, half.axes, half.count) == ("all-reduce", ["groups of 2"], 1)


def test_equal_regions_of_layers_are_priced_alike() -> None:
    def two(x: Any, w: Any) -> Any:
        return tensor_parallel(tensor_parallel(x, w), w)

    PROGRAMS["two layers"] = two
    outcome = outcome_of("two layers")
    prices = region_prices(outcome.problem, outcome.evaluator.profile).price
    first, second = (price(()) for price in prices.values())
    assert first.seconds == second.seconds and first.bytes == second.bytes
    assert [one.op for one in first.collectives] != [one.op for one in second.collectives]
    assert sum(one.count for one in outcome.report.collectives if one.by_hand) == 2
