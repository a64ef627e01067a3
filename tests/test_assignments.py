"""Which mesh axes the tactics of a strategy get: every way that makes a difference, and the best of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from programs import LINK_BYTES_PER_SECOND, ROUND_CHIP, SAMPLES, Case, arg, case_of, round_mesh, sample

from toast_cli import pipeline
from toast_cli.hardware.model import Axis, Link, Mesh
from toast_cli.plan.decisions import Shard
from toast_cli.plan.problem import Problem, make_problem
from toast_cli.plan.reshard import PERMUTE
from toast_cli.price.evaluator import Evaluator
from toast_cli.report.comparison import PIPELINE
from toast_cli.request import Request
from toast_cli.search.run import Settings, run_search
from toast_cli.tactics import parse_tactics, priced_strategies, priced_strategy, starting_plans, strategy
from toast_cli.tactics.strategies import baselines, plans_of_strategy

SLOW = LINK_BYTES_PER_SECOND / 10
WEIGHT_BYTES = 1024 * 1024 * 4


def tiers(**sizes: int) -> Mesh:
    """Axes of these sizes, those called node over a network with a tenth of a switch's rate."""
    axes = []
    for name, size in sizes.items():
        link = ("network", SLOW) if name.startswith("node") else ("switch", LINK_BYTES_PER_SECOND)
        axes.append(Axis(name, size, (Link(link[0], size, link[1], 0.0, name),)))  # type: ignore[arg-type]
    return Mesh("tiers", ROUND_CHIP, tuple(axes), 2**40)


def train(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jax.nn.relu(x @ w)))(w)


@cache
def trained(**axes: int) -> Case:
    """One layer: 4 MiB of weights, 4096 examples."""
    return case_of(train, arg(1024, 1024), arg(4096, 1024), donate=(0,), mesh=tiers(**(axes or {"node": 2, "gpu": 4})))


# axes of the mesh, strategy -> assignments of axes, the first (unnamed) with the fastest axes first
ASSIGNED: list[tuple[dict[str, int], str, list[str]]] = [
    ({"gpu": 8}, "fsdp", [""]),
    ({"node": 2, "gpu": 4}, "fsdp", [""]),  # the fastest first, which is the largest
    ({"gpu": 4, "node": 2}, "fsdp", [""]),
    ({"gpu": 2, "node": 4}, "fsdp", ["", "fsdp:node,gpu"]),  # the fastest first, or the largest
    ({"a": 4, "b": 4}, "fsdp", [""]),  # alike
    ({"node": 2, "gpu": 4}, "fsdp x megatron", ["", "fsdp:gpu + megatron:node"]),
    ({"a": 4, "b": 4}, "fsdp x megatron", [""]),
    ({"a": 2, "b": 2, "c": 2}, "fsdp x megatron", ["", "fsdp:a + megatron:b,c"]),
    ({"node": 2, "gpu": 4}, "fsdp:node + megatron:gpu", [""]),  # as the user says
    ({"node": 2, "gpu": 4}, "fsdp:node,gpu", ["", "fsdp:node,gpu"]),  # the fastest first, or as the user says
    ({"gpu": 4, "node": 2}, "fsdp:gpu,node", [""]),
    ({"node": 2, "gpu": 4, "c": 2}, "fsdp:gpu + megatron", ["", "fsdp:gpu + megatron:node,c"]),
    ({"node": 4, "gpu": 2, "c": 1}, "fsdp", ["", "fsdp:node,gpu"]),  # an axis of one device is nobody's
]  # fmt: skip


@pytest.mark.parametrize(("axes", "name", "assigned"), ASSIGNED, ids=[f"{a} {n}" for a, n, _ in ASSIGNED])
def test_axes_are_assigned_in_the_ways_that_differ(axes: dict[str, int], name: str, assigned: list[str]) -> None:
    assert list(plans_of_strategy(trained(**axes).problem, name)) == assigned


def test_a_companion_takes_the_axes_of_the_tactic_before_it() -> None:
    source, dimensions = sample("t2b_tiny")
    problem = make_problem(source.program, dimensions, tiers(node=2, gpu=4))
    other = "fsdp:gpu + megatron:node + sequence"
    plans = plans_of_strategy(problem, "fsdp x megatron+sequence")
    assert list(plans) == ["", other]
    assert strategy(problem, other) == plans[other]


def test_experts_take_the_last_axis_of_the_tokens_where_they_take_one() -> None:
    """By an all-to-all alone; the first axis of the tokens is moved to the end before."""

    def step(w: jax.Array, router: jax.Array, x: jax.Array) -> jax.Array:
        chosen = jax.lax.top_k(jax.nn.softmax(x @ router), 1)[1][..., 0]
        taken = jax.nn.one_hot(chosen, 4, dtype=jnp.int32)
        places = jax.nn.one_hot(jnp.cumsum(taken, 1) - 1, 16) * taken[..., None]
        arrived = jnp.einsum("gsec,gsd->egcd", places, x)
        return jnp.einsum("gsec,egcf->gsf", places, jnp.einsum("egcd,edf->egcf", arrived, w))

    shapes = arg(4, 512, 512), arg(512, 4), arg(16, 64, 512)
    evaluator = Evaluator(case_of(step, *shapes, mesh=tiers(node=4, gpu=4)).problem)
    plans = plans_of_strategy(evaluator.problem, "fsdp+expert")
    moved = {name for name, plan in plans.items() if any(c.kind == PERMUTE for c in evaluator.collectives(plan))}
    assert moved == {"", "fsdp:node,gpu + expert"}
    assert plans.keys() - moved == {"fsdp:gpu,node + expert:node,gpu", "fsdp:node,gpu + expert:gpu,node"}


def test_gradients_are_summed_over_the_fast_axis_before_they_cross_the_slow_one() -> None:
    """A reduce-scatter of V bytes over p devices takes (p-1)/p V / rate, and leaves V/p for the next axis."""
    case = trained()
    summed = {
        axes: sum(use.seconds for use in case.evaluator.collectives(plan) if use.kind == "reduce-scatter")
        for axes, plan in plans_of_strategy(case.problem, "fsdp:node,gpu").items()
    }
    fast, slow = 3 / 4 / LINK_BYTES_PER_SECOND, 1 / 2 / SLOW
    assert summed[""] == pytest.approx(WEIGHT_BYTES * fast + WEIGHT_BYTES / 4 * slow)  # 84 ms
    assert summed["fsdp:node,gpu"] == pytest.approx(WEIGHT_BYTES * slow + WEIGHT_BYTES / 2 * fast)  # 225 ms


# Tactics on node=2, gpu=4 -> the same with the axes in the best order
@pytest.mark.parametrize("tactic", ["fsdp", "fsdp:node,gpu", "zero3:node,gpu", "data-parallel:node,gpu"])
def test_tactics_take_the_fast_axis_first(tactic: str) -> None:
    problem = trained().problem
    best = strategy(problem, f"{tactic.split(':')[0]}:gpu,node")
    assert parse_tactics(strategy=tactic).state(problem).fixed == best
    assert parse_tactics([tactic]).state(problem).fixed == best


@pytest.mark.parametrize("axes", ["", ":node,gpu", ":gpu,node"])
def test_hsdp_keeps_weights_whole_over_the_network(axes: str) -> None:
    problem = trained().problem
    plans = plans_of_strategy(problem, f"hsdp{axes}").values()
    over = [sorted(problem.mesh.names[d.axis] for d in plan if isinstance(d, Shard)) for plan in plans]
    assert all(names == ["gpu", "gpu", "node"] for names in over) and over  # the batch over both, weights over gpu


@pytest.mark.parametrize(
    ("name", "batch", "assigned"),
    [
        ("fsdp", 4, ["", "fsdp:gpu"]),
        ("fsdp", 8, [""]),
        ("fsdp:gpu,node", 4, [""]),  # as the user says
        ("data-parallel", 4, [""]),  # the same plan
    ],
)
def test_weights_stay_whole_over_an_axis_that_the_batch_does_not_fill(
    name: str, batch: int, assigned: list[str]
) -> None:
    case = case_of(train, arg(1024, 1024), arg(batch, 1024), donate=(0,), mesh=tiers(gpu=4, node=2))
    assert list(plans_of_strategy(case.problem, name)) == assigned


def test_a_plan_that_fits_is_better_than_a_faster_one_that_does_not() -> None:
    source, dimensions = sample("t2b_tiny")
    roomy = Evaluator(make_problem(source.program, dimensions, tiers(node=2, gpu=4)))
    costs = {axes: roomy.exact_cost(plan) for axes, plan in plans_of_strategy(roomy.problem, "fsdp x megatron").items()}
    fastest = min(costs, key=lambda axes: costs[axes].step_seconds)
    smallest = min(costs, key=lambda axes: costs[axes].peak_bytes)
    assert fastest != smallest
    mesh = Mesh("tight", ROUND_CHIP, roomy.problem.mesh.axes, int(costs[smallest].peak_bytes) + 1)
    tight = Evaluator(make_problem(source.program, dimensions, mesh))
    assert priced_strategy(roomy, "fsdp x megatron").axes == fastest
    assert priced_strategy(tight, "fsdp x megatron").axes == smallest


def test_searches_start_from_every_assignment() -> None:
    problem = trained().problem
    starts = starting_plans(problem)
    assert set(plans_of_strategy(problem, "fsdp").values()) <= set(starts)
    best = min(one.cost.step_seconds for one in priced_strategies(trained().evaluator)[0].values())
    assert run_search(Evaluator(problem), Settings(evaluations=60), starts=starts).cost.step_seconds <= best


# sample -> what Megatron must split, of the dimensions that it may not leave whole
MEGATRON: list[tuple[str, set[str]]] = [
    ("block_train", {"heads", "ff"}),
    ("t2b_tiny", {"heads", "ff", "vocab"}),
    ("itx_prefill_tiny", {"heads", "ff", "vocab"}),  # eight heads of keys and values
    ("scan_train", {"heads", "ff", "vocab"}),  # layers are stacked, 24 of them
    ("moe_tiny", {"heads", "ff", "vocab", "experts"}),
    ("vit_tiny", {"heads", "ff", "labels"}),
    ("resnet50_tiny", {"channels", "labels"}),
    ("gns_tiny", {"ff"}),
]


@pytest.mark.parametrize(("name", "roles"), MEGATRON, ids=[name for name, _ in MEGATRON])
def test_megatron_splits_heads_and_hidden_widths_and_neither_head_widths_nor_layers(name: str, roles: set[str]) -> None:
    source, dimensions = sample(name)
    problem = make_problem(source.program, dimensions, round_mesh(model=4))
    plan = strategy(problem, "megatron")
    assert {problem.dimensions.groups[d.group].role for d in plan if isinstance(d, Shard)} == roles


def problems(program: str, mesh: str) -> list[Problem]:
    """One for each shape of the mesh."""
    shapes = pipeline.choose_meshes(pipeline.load_spec(mesh), Request(program, mesh, "auto"))
    return [pipeline.problem_of(program, mesh, ",".join(f"{a.name}={a.size}" for a in m.axes)) for m in shapes]


@pytest.mark.parametrize(
    ("mesh", "options", "shape"),
    [
        ("v4-32", {"strategy": "data-parallel"}, {"data": 16}),  # needs one axis
        ("v4-32", {"mesh_shape": "data=8,model=2"}, {"data": 8, "model": 2}),
        ("v4-32", {"pins": ("params/layers/*/w=None,model",)}, {"data": 8, "model": 2}),  # names an axis
        ("v4-32", {"strategy": "fsdp:data"}, {"data": 8, "model": 2}),
        ("v4-32", {"strategy": "data-parallel", "keep_shardings": True}, {"data": 8, "model": 2}),  # may name some
        ("v4-32", {"strategy": "data-parallel", "subject_to": ("communication[model]<=1s",)}, {"data": 8, "model": 2}),
        ("two.yaml", {}, {"a": 8, "b": 2}),  # a file with axes
    ],
)
def test_a_named_machine_leaves_the_axes_to_the_search(
    mesh: str, options: dict[str, Any], shape: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One axis, or those of the specification: whichever the chosen plan needs; a note tells of the other one."""
    monkeypatch.chdir(tmp_path)
    Path("two.yaml").write_text("chip: v4\ntopology: {torus: [2, 2, 4]}\naxes: {a: 8, b: 2}\n")
    outcome = pipeline.partition(Request(str(SAMPLES / "mlp_tiny.mlir"), mesh, iterations=10, **options))
    chosen = outcome.problem.mesh
    assert dict(zip(chosen.names, chosen.sizes, strict=True)) == shape
    noted = any("--mesh-shape data=8,model=2" in note for note in outcome.report.analysis.notes)
    assert noted == (shape == {"data": 16})


def test_rows_are_the_best_of_all_shapes_where_the_shape_is_open() -> None:
    program = str(SAMPLES / "mlp_tiny.mlir")
    outcome = pipeline.partition(Request(program, "a100-16", "auto", iterations=10))
    rows, own = dict(outcome.report.baselines), outcome.problem.mesh
    rows.pop(PIPELINE, None)
    found = [priced_strategies(Evaluator(problem), baselines(problem))[0] for problem in problems(program, "a100-16")]
    for name in {name for of in found for name in of}:
        best = min((of[name] for of in found if name in of), key=lambda one: one.rank)
        assert rows[name].step_seconds == best.cost.step_seconds
        elsewhere = rows[name].mesh or dict(zip(own.names, own.sizes, strict=True))
        assert dict(zip(best.mesh.names, best.mesh.sizes, strict=True)) == elsewhere
    assert any(row.mesh for row in rows.values())
    assert outcome.result.cost.step_seconds <= min(row.step_seconds for row in rows.values() if row.fits)
