"""Searched plans against the best of all shardings, which is found without plans; see `brute_force`."""

from __future__ import annotations

from itertools import product

import jax.numpy as jnp
import pytest
from brute_force import best_of_all
from programs import arg, case_of, case_on, mesh_of, round_mesh
from random_programs import MORE_STEPS, source_by
from small_programs import PROGRAMS, block
from sweeps import sweep

from toast_cli.hardware import load_spec
from toast_cli.plan.decisions import ASIDE, NONE, SUMMED, Replicate, Shard
from toast_cli.search.run import Settings, run_search
from toast_cli.tactics import starting_plans, strategies, strategy

BEHIND = 1.01
MESHES = {"one axis": {"data": 4}, "two axes": {"data": 4, "model": 2}}
REACHED = (
    "three sorts", "four sorts", "attention, batch", "perceptron", "perceptron, wide", "convolution", "scatter",
    "fourier", "encoder and decoder",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mesh"),
    sweep(
        product(REACHED, MESHES),
        *product(("four sorts", "scatter", "encoder and decoder"), ["two axes"]),
        ("attention, batch", "one axis"),
    ),
)
def test_the_search_finds_the_best_of_all_shardings(name: str, mesh: str) -> None:
    small = PROGRAMS[name]
    case = case_of(small.run, *small.shapes, donate=small.donate, mesh=round_mesh(**MESHES[mesh]))
    best = best_of_all(case.problem)
    assert best.seconds <= best.least * 1.0005  # what it is measured against is the best
    found = run_search(case.evaluator, Settings(evaluations=600), starts=starting_plans(case.problem))
    assert best.least <= found.cost.step_seconds * (1.0 + 1e-6)
    assert found.cost.step_seconds <= best.seconds * BEHIND


@pytest.mark.parametrize("name", sweep(["attention, short", "attention, long", "block"], "block"))
def test_heads_where_tokens_attend_and_the_sequence_elsewhere(name: str) -> None:
    """Heads have the axis until they are summed over, the sequence has it from there on, and the input rests whole."""
    small = PROGRAMS[name]
    case = case_of(small.run, *small.shapes, mesh=round_mesh(data=4))
    found = run_search(case.evaluator, Settings(evaluations=1000), starts=starting_plans(case.problem))
    assert found.cost.step_seconds <= best_of_all(case.problem).seconds * BEHIND
    assert any(isinstance(d, Shard) and d.unless == SUMMED for d in found.plan)
    assert any(isinstance(d, Replicate) for d in found.plan)


@pytest.mark.parametrize("spec", ["h100-8", "v4-32", "v5e-16"])
def test_heads_where_tokens_attend_are_found_on_chips(spec: str) -> None:
    """One sequence of 16,384 tokens: faster than to split the sequence everywhere. On TPUs no single change of the plan
    that splits it leads there: attention left alone is computed whole."""
    shapes = (2048, 2048), (2048, 2048), (2048, 2048), (2048, 2048), (2048, 8192), (8192, 2048)
    x, *weights = (arg(*shape, dtype=jnp.bfloat16) for shape in ((1, 16384, 2048), *shapes))
    mesh = mesh_of(spec, {"sequence": load_spec(spec).devices})
    case = case_of(lambda x, a, b: block(block(x, *a, heads=16), *b, heads=16), x, weights, weights, mesh=mesh)
    named = {name: case.evaluator.cost(plan).step_seconds for name, plan in strategies(case.problem).items()}
    assert min(named, key=named.__getitem__) == "context"
    found = run_search(case.evaluator, Settings(evaluations=300), starts=starting_plans(case.problem))
    assert found.cost.step_seconds < 0.95 * named["context"]
    assert any(isinstance(d, Shard) and (ASIDE in d.sides or d.unless != NONE) for d in found.plan)


@pytest.mark.parametrize("number", sweep(range(12), 0, 1, 5))
def test_no_plan_beats_the_best_of_all_shardings(number: int) -> None:
    """The bound holds and its assignment can be had: else the yardstick is wrong."""
    case = case_on(source_by(number, MORE_STEPS))
    best = best_of_all(case.problem)
    found = run_search(case.evaluator, Settings(evaluations=300))
    assert best.least * (1.0 - 1e-6) <= min(best.seconds, found.cost.step_seconds)


@pytest.mark.parametrize("name", sweep(["three sorts", "four sorts"], "three sorts"))
def test_every_combination_of_sides_is_reached(name: str) -> None:
    """Each array is sorted along an axis of its own, so that each takes a side of its own."""
    small = PROGRAMS[name]
    case = case_of(small.run, *small.shapes, mesh=round_mesh(data=4))
    found = run_search(case.evaluator, Settings(evaluations=600))
    assert len({side for d in found.plan if isinstance(d, Shard) for side in d.sides}) > 1
    assert found.cost.step_seconds <= best_of_all(case.problem).seconds * 1.0001


@pytest.mark.parametrize("first", [0, 1])
def test_a_conflict_left_alone_is_left_to_other_decisions(first: int) -> None:
    """Rows have the axis, but not where they attend to each other or the softmax adds them up: columns have it."""
    small = PROGRAMS["axial attention"]
    case = case_of(small.run, *small.shapes, mesh=round_mesh(data=4))
    rows, columns = (case.group(f"x.{dim}") for dim in (1, 2)[:: 1 - 2 * first])
    sides = (ASIDE,) * len(case.problem.dimensions.groups[rows].resolutions)
    plan = (Shard(rows, 0, sides), Shard(columns, 0, sides))
    assert {kind for kind, *_ in case.collectives(plan)} == {"all-to-all"}
    shardings = case.lowered(plan).shardings
    scores = [case.text(shardings[case.program.ops[op].results[0]]) for op in case.ops("exponential")]
    assert scores == ["-|data|-|-", "-|-|-|data"]  # rows by rows, then columns by columns


def test_a_search_starts_from_products_of_strategies() -> None:
    small = PROGRAMS["block"]
    case = case_of(small.run, *small.shapes, mesh=round_mesh(data=4, model=2))
    assert strategy(case.problem, "context x megatron") in starting_plans(case.problem)
