"""The best plans that differ in meaning: what counts as different, what is reported, what a compiler makes of them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from checking import toast
from programs import SAMPLES

from toast_cli import pipeline
from toast_cli.ask_xla.compile import collectives_after_partitioning
from toast_cli.candidates.ask_compiler import known_strategies
from toast_cli.hardware import load_spec
from toast_cli.pipeline import Outcome
from toast_cli.plan.decision_space import decision_space
from toast_cli.plan.decisions import Plan, Replicate
from toast_cli.price.evaluator import Evaluator
from toast_cli.report.comparison import compare, with_compiled
from toast_cli.request import Request
from toast_cli.search.alternatives import (
    DIFFERENT,
    axis_swaps,
    best_plans,
    difference,
    different_plans,
    simplest,
    spent,
)
from toast_cli.tactics import strategies, strategy

DOT = """
func.func @main(%x: tensor<64x32xf32>, %w: tensor<32x64xf32>) -> tensor<64x64xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<64x32xf32>, tensor<32x64xf32>) -> tensor<64x64xf32>
  return %0 : tensor<64x64xf32>
}
"""
MLP = str(SAMPLES / "mlp_tiny.mlir")


@cache
def outcome() -> Outcome:
    return pipeline.partition(Request(MLP, "v5e-16", mesh_shape="data=4,model=4", iterations=100, best=4))


@cache
def best() -> list[Plan]:
    return best_plans(outcome().evaluator, outcome().result, 4)


def apart(evaluator: Evaluator, one: Plan, other: Plan) -> float:
    return difference(spent(evaluator, one), spent(evaluator, other))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"a": 6.0, "b": 4.0}, {"a": 6.0, "b": 4.0}, 0.0),
        ({"a": 6.0, "b": 4.0}, {"a": 6.0, "c": 2.0}, 0.6),  # 4 and 2 seconds of what only one has, of 10
        ({"a": 6.0}, {"b": 6.0}, 1.0),  # nothing in common is all of it, not twice that
        ({"a": 99.0, "b": 1.0}, {"a": 99.0}, 0.01),  # a bagatelle
        ({}, {}, 0.0),
    ],
)
def test_how_far_plans_differ(one: dict[str, float], other: dict[str, float], expected: float) -> None:
    assert difference(one, other) == difference(other, one) == pytest.approx(expected)


def test_the_best_plans_differ_from_each_other() -> None:
    evaluator = outcome().evaluator
    assert len(best()) == 4
    assert best()[0] == outcome().result.plan
    for one, other in combinations(best(), 2):
        peaks = sorted(evaluator.exact_cost(plan).peak_bytes for plan in (one, other))
        assert apart(evaluator, one, other) >= DIFFERENT or peaks[0] <= (1.0 - DIFFERENT) * peaks[1]
    seconds = [evaluator.exact_cost(plan).step_seconds for plan in best()]
    assert seconds == sorted(seconds)


def test_spellings_of_one_plan_are_not_different() -> None:
    evaluator = outcome().evaluator
    problem = evaluator.problem
    plan = strategy(problem, "data-parallel x megatron")
    swapped = problem.canonical(tuple(d._replace(axis=1 - d.axis) for d in plan))
    idle = next(
        (*plan, d) for d in decision_space(problem).choices if isinstance(d, Replicate) and d.axis == 0
    )  # nothing rests so
    assert evaluator.parts(swapped) != evaluator.parts(plan)
    for same in (plan, swapped, idle):
        assert different_plans(evaluator, [plan], [same], 1) == []
    assert simplest(evaluator, idle) == plan
    other = strategies(problem)["fsdp"]
    assert different_plans(evaluator, [plan], [swapped, idle, other], 3) == [other]


def test_a_compiler_is_asked_about_further_strategies_that_differ() -> None:
    evaluator = outcome().evaluator
    usual = strategies(evaluator.problem)
    named = known_strategies(evaluator, [usual["fsdp"], usual["data-parallel"]])
    assert list(named)[: len(usual)] == list(usual)
    further = {name: plan for name, plan in named.items() if name not in usual}
    assert len(further) == 2  # as many as plans found
    for name, plan in further.items():
        assert simplest(evaluator, strategy(evaluator.problem, name)) == plan
        assert different_plans(evaluator, list(usual.values()), [plan], 1) == [plan]


def test_axes_change_places_only_where_they_are_alike() -> None:
    assert axis_swaps(load_spec("v4-32").mesh({"data": 8, "model": 2})) == [(0, 1)]
    assert axis_swaps(load_spec("v4-32").mesh({"data": 4, "model": 4})) == [(0, 1), (1, 0)]
    # A ring of four and a square: it does make a difference which of them the gradients are added up over.
    evaluator = Evaluator(replace(outcome().problem, mesh=load_spec("v4-32").mesh({"data": 4, "model": 4})))
    plan = strategy(evaluator.problem, "data-parallel x megatron")
    swapped = evaluator.problem.canonical(tuple(d._replace(axis=1 - d.axis) for d in plan))
    assert different_plans(evaluator, [plan], [swapped], 1) == [swapped]


def test_xla_partitions_them_differently() -> None:
    """Plans said to differ are programs whose collectives differ, by XLA's partitioner."""
    of = outcome()
    axes = dict(zip(of.problem.mesh.names, of.problem.mesh.sizes, strict=True))
    seen = set()
    for plan in best()[:2]:
        each = replace(of, result=replace(of.result, plan=plan))
        content = each.emit("bytecode").content
        found = collectives_after_partitioning(content, "stablehlo", axes)
        assert isinstance(found, list)
        seen.add(frozenset(Counter((one.kind, one.axes, one.bytes) for one in found).items()))
    assert len(seen) == 2


def test_the_best_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`partition`, `compare` and `check` ask the same compiler about the same programs: it answers once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TOAST_CACHE", "on")
    program, out = tmp_path / "dot.mlir", tmp_path / "out.json"
    program.write_text(DOT)
    words = [str(program), "--mesh", "v4-32", "--iterations", "20", "--confirm", "2", "--confirm-with", "cpu"]
    assert toast("partition", *words, "--json", str(out)) == 0
    rows = json.loads(out.read_text())["confirmation"]["plans"]
    names = [row["name"] for row in rows]
    assert {row["peak_bytes"] for row in rows} == {None}  # a partitioner knows no memory
    assert names[:2] == ["search", "search 2"]
    assert toast("compare", *words, "--json", str(out)) == 0
    facts = json.loads(out.read_text())
    assert facts["compiler"] == "XLA's partitioner"
    asked = {one["name"]: one["compiled"] for one in facts["contenders"] if one["compiled"]}
    assert {"search", "search 2"} <= asked.keys()
    compiled = {name: one["step_seconds"] for name, one in asked.items() if one["step_seconds"]}
    (best,) = [one["name"] for one in facts["contenders"] if one["best"]]
    assert compiled[best] <= 1.001 * min(compiled.values())
    assert toast("check", *words, "--max-step-time", "1s", "--output-format", f"json={out}") == 0
    (verdict,) = json.loads(out.read_text())["checks"]
    told = {check["name"]: check["found"].endswith(" compiled") for check in verdict["checks"]}
    assert told.pop("fits") is False and all(told.values())


def test_the_compiler_names_the_best() -> None:
    from toast_cli.ask_xla.confirm import Compiled, Confirmation, ConfirmedRow, PlanToCompile

    of = outcome()
    found = compare(of.evaluator, of.report, best())
    assert found.contenders[0].best
    rows = []
    for one in found.contenders[:3]:
        plan: Plan = one.plan
        answer = Compiled("compiled", "", 1.0 - 0.1 * len(rows), 0.0, 0.0, 10)
        rows.append(ConfirmedRow(PlanToCompile(one.name, plan, of.evaluator.exact_cost(plan)), answer))
    by_word = with_compiled(of.evaluator, found, Confirmation("tpu", tuple(rows), 2, 2**30))
    assert by_word.best is not None
    assert by_word.best.name == found.contenders[2].name
    none = with_compiled(
        of.evaluator,
        found,
        Confirmation(
            "tpu",
            tuple(ConfirmedRow(row.candidate, Compiled("out of memory", "too large")) for row in rows),
            None,
            2**30,
        ),
    )
    assert none.best is None
