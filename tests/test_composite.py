"""What the search finds on full-sized programs, given the known strategies: what experts would use, or better."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from programs import Case, arg, case_of, round_mesh, sample
from sweeps import sweep

from toast_cli.hardware import load_spec
from toast_cli.plan.decisions import Plan, Shard
from toast_cli.plan.problem import make_problem
from toast_cli.plan.sharding import shards
from toast_cli.price.cost import Cost
from toast_cli.price.evaluator import Evaluator
from toast_cli.program.roles import INPUTS, STATE, WEIGHTS
from toast_cli.search.incumbent import SearchResult
from toast_cli.search.run import Settings, run_search
from toast_cli.tactics import starting_plans, strategies


@cache
def found(name: str, seeds: int = 1, **shape: int) -> tuple[Case, SearchResult]:
    """The plan that MCTS finds for a stored sample on v4-32 with a short budget, the best of so many seeds."""
    source, dimensions = sample(name)
    mesh = load_spec("v4-32").mesh(shape or None)
    case = Case(source, Evaluator(make_problem(source.program, dimensions, mesh)))
    starts = starting_plans(case.problem)
    results = [run_search(case.evaluator, Settings(seed=seed, evaluations=80), starts) for seed in range(seeds)]
    return case, min(results, key=lambda result: result.cost.step_seconds)


def sharded(case: Case, plan: Plan) -> set[str]:
    """Names of the groups that a plan splits."""
    return {case.problem.dimensions.groups[d.group].name for d in plan if isinstance(d, Shard)}


def fitting_strategies(case: Case) -> dict[str, Cost]:
    """Known strategies that fit."""
    costs = {name: case.evaluator.exact_cost(plan) for name, plan in strategies(case.problem).items()}
    return {name: cost for name, cost in costs.items() if cost.peak_bytes <= case.problem.mesh.limit_bytes}


def share_at_rest(case: Case, plan: Plan, role: str) -> float:
    """The part of all bytes of a role's arguments that one device keeps."""
    lowered, program, problem = case.lowered(plan), case.program, case.problem
    local = whole = 0.0
    for argument, number in zip(program.arguments, problem.argument_role, strict=True):
        if problem.roles[number] == role:
            size = program.values[argument.value].bytes
            whole += size
            local += size / shards(lowered.shardings[argument.value], problem.mesh.sizes)
    return local / whole


@pytest.mark.parametrize("name", sweep(["t2b_train", "block_train", "gns_train", "long_train"], "t2b_train"))
def test_the_search_is_no_worse_than_the_best_expert_plan(name: str) -> None:
    case, result = found(name)
    assert result.fits
    best = min(fitting_strategies(case).values(), key=lambda cost: cost.step_seconds)
    assert result.cost.step_seconds <= best.step_seconds
    assert result.cost.peak_bytes == case.evaluator.exact_cost(result.plan).peak_bytes


def test_experts_of_a_training_step_are_what_their_names_say() -> None:
    case, _ = found("t2b_train")
    plans = strategies(case.problem)
    assert set(plans) == {"data-parallel", "fsdp", "megatron", "data-parallel x megatron", "fsdp x megatron"}
    assert sharded(case, plans["data-parallel"]) == {"batch"}
    assert {"batch", "embed", "vocab"} <= sharded(case, plans["fsdp"])
    assert {"heads", "ff"} <= sharded(case, plans["megatron"])
    assert not {"batch", "embed"} & sharded(case, plans["megatron"])
    costs = {name: case.evaluator.exact_cost(plan) for name, plan in plans.items()}
    # 2.5e9 parameters, three times in f32: 28 GiB whole. Data parallelism alone does not fit in 29 GiB, the others do.
    assert set(plans) - set(fitting_strategies(case)) == {"data-parallel"}
    assert costs["fsdp"].argument_bytes < costs["data-parallel"].argument_bytes / 15


def test_t2b_training_rests_with_weights_and_optimizer_state_split() -> None:
    case, result = found("t2b_train")
    assert share_at_rest(case, result.plan, WEIGHTS) <= 1 / 8
    assert share_at_rest(case, result.plan, STATE) <= 1 / 8
    assert share_at_rest(case, result.plan, INPUTS) <= 1 / 8
    assert "batch" in sharded(case, result.plan)


def test_a_megatron_shaped_problem_recovers_megatron() -> None:
    """Two blocks of width 8192 on one sequence of 512: 12 times as many weights in a block as numbers in 64
    activations.
    """
    case, result = found("block_train", model=16)
    program = case.program
    activation = 512 * 8192 * 2  # bytes: bfloat16[1, 512, 8192]
    weights = {
        a.value
        for a, k in zip(program.arguments, case.problem.argument_role, strict=True)
        if case.problem.roles[k] == WEIGHTS
    }
    reductions = gathers = 0.0
    for use in case.evaluator.collectives(result.plan):
        whole = use.bytes * (16 if use.kind == "reduce-scatter" else 1)
        if whole >= activation / 4:
            assert use.value not in weights, "no weight moves"
            reductions += use.count * (use.kind in ("all-reduce", "reduce-scatter"))
            gathers += use.count * (use.kind == "all-gather")
    # Two a block and direction; what goes back into the first block's input has no reader.
    assert 2 * 2 * 2 - 1 <= reductions <= 2 * 2 * 2
    assert gathers <= 2 * 2 * 2  # with sequence parallelism each reduction's other half
    megatron = case.evaluator.exact_cost(strategies(case.problem)["megatron"])
    assert result.cost.step_seconds <= megatron.step_seconds
    assert share_at_rest(case, result.plan, WEIGHTS) <= 1 / 15


def test_a_graph_network_is_split_along_its_edges() -> None:
    case, result = found("gns_train")
    assert "edges" in sharded(case, result.plan)
    edges = next(
        d for d in result.plan if isinstance(d, Shard) and case.problem.dimensions.groups[d.group].name == "edges"
    )
    assert case.problem.mesh.names[edges.axis] in ("data", "model")
    scatters = set(case.ops("scatter"))
    reduced = {u.op for u in case.evaluator.collectives(result.plan) if u.kind in ("all-reduce", "reduce-scatter")}
    assert scatters & reduced  # messages of the devices are summed where they are received


def test_a_long_sequence_takes_a_side_of_the_attention_conflict() -> None:
    case, result = found("long_train")
    groups = case.problem.dimensions.groups
    (seq,) = (number for number, group in enumerate(groups) if group.resolutions)
    assert groups[seq].name == "seq"
    assert groups[seq].size == 32768
    assert any(isinstance(d, Shard) and d.group == seq for d in result.plan)


def kinds(case: Case, plan: Plan) -> dict[str, float]:
    """Collective -> seconds."""
    found: dict[str, float] = {}
    for use in case.evaluator.collectives(plan):
        found[use.kind] = found.get(use.kind, 0.0) + use.seconds
    return found


def on(case: Case, plan: Plan, axis: str) -> set[str]:
    """Names of the groups that a plan splits over one axis."""
    problem = case.problem
    number = problem.mesh.names.index(axis)
    return {problem.dimensions.groups[d.group].name for d in plan if isinstance(d, Shard) and d.axis == number}


def weight_groups(case: Case) -> set[str]:
    return {case.problem.dimensions.groups[g].name for g in case.problem.weight_bytes}


@pytest.mark.parametrize("name", sweep(["t2b_train", "t7b_train"], "t2b_train"))
def test_transformers_train_with_batch_tensor_and_optimizer_sharding_together(name: str) -> None:
    case, result = found(name)
    split = sharded(case, result.plan)
    assert "batch" in split
    # Some product is computed with its weight's own dimension split: tensor parallelism, beside what is only stored
    # split.
    tensor = {
        case.problem.dimensions.groups[g].name
        for number, op in enumerate(case.program.ops)
        if op.name == "stablehlo.dot_general"
        for pattern in [case.problem.op_pattern[number]]
        for g, axes in zip(
            case.problem.patterns[pattern].groups,
            case.problem.op_sharding(pattern, result.plan).factor_axes,
            strict=True,
        )
        if axes
    }
    assert tensor & weight_groups(case)
    assert share_at_rest(case, result.plan, WEIGHTS) <= 1 / 8
    assert share_at_rest(case, result.plan, STATE) <= 1 / 8


def test_experts_go_to_different_devices_and_tokens_travel_to_them() -> None:
    case, result = found("moe_train")
    assert "experts" in sharded(case, result.plan)
    assert kinds(case, result.plan).get("all-to-all", 0.0) > 0.0
    assert share_at_rest(case, result.plan, WEIGHTS) <= 1 / 8


def test_decoding_splits_the_cache() -> None:
    """Each device reads its part of the keys and values that are kept, by heads or by sequences."""
    case, result = found("itx_decode")
    assert share_at_rest(case, result.plan, STATE) <= 1 / 8


def convolutions(images: int) -> Case:
    """Three convolutions of 256 channels over 128 x 128 pixels, trained by plain gradient descent."""

    def step(params: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def loss(params: list[jax.Array]) -> jax.Array:
            y = x
            for w in params:
                y = jax.nn.relu(
                    jax.lax.conv_general_dilated(y, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
                )
            return jnp.mean(y**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    weights = [arg(3, 3, 256, 256) for _ in range(3)]
    return case_of(step, weights, arg(images, 128, 128, 256), donate=(0,), mesh="v4-32")


def test_few_images_are_split_along_channels_or_space() -> None:
    few, many = convolutions(2), convolutions(256)
    for case, enough in ((few, False), (many, True)):
        result = run_search(case.evaluator, Settings(evaluations=1500))
        groups = {d.group for d in result.plan if isinstance(d, Shard)}
        images = case.group("x.0")
        ways = len(case.problem.mesh.sizes)
        assert (sum(d.group == images for d in result.plan if isinstance(d, Shard)) == ways) == enough
        assert enough or groups - {images}
        assert result.cost.step_seconds < case.evaluator.cost(()).step_seconds / (14 if enough else 3.5)


def momentum_step(params: list[Any], mu: list[Any], x: jax.Array) -> tuple[list[Any], list[Any]]:
    def loss(params: list[Any]) -> jax.Array:
        y = x
        for w in params:
            y = y + jax.nn.relu(y @ w["up"]) @ w["down"]
        return jnp.sum(y**2)

    gradients = jax.grad(loss)(params)
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, mu, gradients)
    return jax.tree.map(lambda w, m: w - 0.1 * m, params, mu), mu


def test_little_memory_splits_weights_at_rest() -> None:
    weights = [{"down": arg(4096, 1024), "up": arg(1024, 4096)} for _ in range(4)]
    shapes = (weights, weights, arg(2**13, 1024))
    roomy = case_of(momentum_step, *shapes, donate=(0, 1), mesh=round_mesh(data=16))
    batch = (roomy.shard("x.0", "data"),)
    plain = roomy.evaluator.exact_cost(batch)
    limit = int(plain.peak_bytes - 0.4 * plain.argument_bytes)
    tight = case_of(momentum_step, *shapes, donate=(0, 1), mesh=round_mesh(limit, data=16))
    result = run_search(tight.evaluator, Settings(evaluations=1000))
    assert result.fits
    assert share_at_rest(tight, result.plan, WEIGHTS) <= 1 / 8
    assert share_at_rest(tight, result.plan, STATE) <= 1 / 8
    assert share_at_rest(roomy, batch, WEIGHTS) == 1.0


def test_much_memory_leaves_weights_whole_where_little_memory_splits_them_at_rest() -> None:
    """Layers in a scan gather split weights forwards and backwards, an all-gather more than what data parallelism
    moves.
    """

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            y, _ = jax.lax.scan(lambda y, w: (y + jax.nn.relu(y @ w["up"]) @ w["down"], None), x, params)
            return jnp.sum(y**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    shapes = ({"down": arg(4, 4096, 1024), "up": arg(4, 1024, 4096)}, arg(2**13, 1024))
    roomy = case_of(step, *shapes, donate=(0,), mesh=round_mesh(data=16))
    found = run_search(roomy.evaluator, Settings(evaluations=1000))
    assert roomy.shard("x.0", "data") in found.plan
    assert share_at_rest(roomy, found.plan, WEIGHTS) == 1.0
    limit = int(found.cost.peak_bytes - 0.4 * found.cost.argument_bytes)
    tight = case_of(step, *shapes, donate=(0,), mesh=round_mesh(limit, data=16))
    result = run_search(tight.evaluator, Settings(evaluations=1000))
    assert result.fits
    # Kinds of weights rest one by one: to split one of the two saves enough.
    assert share_at_rest(tight, result.plan, WEIGHTS) == (1 + 1 / 16) / 2
