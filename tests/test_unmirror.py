"""One layer decided otherwise than the others: problems taken apart."""

from __future__ import annotations

import jax
import pytest
from programs import arg, evaluator_of, mesh_of, round_mesh, sample, source_of

from toast_cli.dimensions import analyse
from toast_cli.plan.decision_space import decision_space
from toast_cli.plan.decisions import Shard
from toast_cli.plan.problem import make_problem
from toast_cli.plan.saved import mirrored_groups, unmirror, unmirrored
from toast_cli.price.evaluator import Evaluator
from toast_cli.tactics import strategies

LAYERS = 6
MESH = round_mesh(data=4)


def layers(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for p in params:
        x = x + jax.nn.relu(x @ p["up"]) @ p["down"]
    return x


SOURCE = source_of(layers, [{"down": arg(1024, 256), "up": arg(256, 1024)} for _ in range(LAYERS)], arg(4096, 256))


def test_a_plan_means_the_same_for_a_problem_taken_apart() -> None:
    for source, mesh in (
        (SOURCE, MESH),
        (sample("t2b_tiny")[0], mesh_of("v4-32")),
        (sample("moe_tiny")[0], mesh_of("v4-32")),
    ):
        problem = make_problem(source.program, analyse(source.program), mesh)
        wide, parts = unmirror(problem, mirrored_groups(problem))
        assert parts
        plain, apart = Evaluator(problem), Evaluator(wide)
        shards = [d for d in decision_space(problem).choices if isinstance(d, Shard)]
        for plan in ((), tuple(shards[:3]), tuple(reversed(shards[-5:])), tuple(shards[::3])):
            expected = plain.exact_cost(plan)
            found = apart.exact_cost(unmirrored(plan, parts))
            assert abs(found.step_seconds - expected.step_seconds) <= 1e-9 * expected.step_seconds
            assert abs(found.peak_bytes - expected.peak_bytes) <= 1e-6 * expected.peak_bytes


def test_strategies_are_the_same_for_a_problem_taken_apart() -> None:
    """Else a report's comparison would be with worse experts than there are."""
    source, _ = sample("t7b_tiny")
    problem = make_problem(source.program, analyse(source.program), mesh_of("v4-32"))
    wide, _ = unmirror(problem, mirrored_groups(problem))
    expected, found = strategies(problem), strategies(wide)
    assert list(found) == list(expected)
    plain, apart = Evaluator(problem), Evaluator(wide)
    for name, plan in expected.items():
        assert apart.exact_cost(found[name]).step_seconds == pytest.approx(plain.exact_cost(plan).step_seconds)


def test_groups_taken_apart_are_named_and_complete() -> None:
    problem = evaluator_of(SOURCE, MESH).problem
    (ff,) = mirrored_groups(problem)
    wide, parts = unmirror(problem, [ff])
    groups = wide.dimensions.groups
    first, last = parts[ff]
    assert groups[first].name == f"{groups[ff].name}:first"
    assert groups[last].name == f"{groups[ff].name}:last"
    assert len(groups[ff].classes) == LAYERS - 2
    assert sorted(c for g in (ff, first, last) for c in groups[g].classes) == sorted(
        problem.dimensions.groups[ff].classes
    )
    assert all(member.startswith("params[0]") for member in groups[first].members)
