"""Decisions that leave look-ups in tables, and their gradients, to other decisions (`LOOK_UPS`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from emitted import collectives, compiled, on_cpu, worst_error
from programs import Case, arg, case_of, round_mesh

from toast_cli.plan.decision_space import decision_space
from toast_cli.plan.decisions import LOOK_UPS, Plan
from toast_cli.plan.saved import carried_over, read_plan, save_plan
from toast_cli.price.memo import OpShardingMemo
from toast_cli.program.ops import GATHER, SCATTER
from toast_cli.report.explain.answers import explain
from toast_cli.report.explain.study import Study
from toast_cli.report.words import decision_text

VOCAB, EMBED, BATCH, SEQ = 64, 32, 8, 16


def loss(p: Any, ids: Any) -> Any:
    return jnp.mean((jnp.tanh(p["table"][ids] @ p["w"]) @ p["table"].T) ** 2)


def step(p: Any, ids: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p, ids))


@cache
def trained() -> Case:
    """A training step of a model whose embedding is its last layer's weight, too."""
    weights = {"table": arg(VOCAB, EMBED), "w": arg(EMBED, EMBED)}
    return case_of(step, weights, arg(BATCH, SEQ, dtype=jnp.int32), donate=(0,), mesh=round_mesh(data=8))


def left_to_features(case: Case) -> Plan:
    return case.shard("ids.0", "data", unless="look-ups"), case.shard("p['table'].1", "data")


@pytest.mark.parametrize(
    ("unless", "looked_up", "gradient"),
    [
        # The batch has the axis: the table is whole, and its gradient is partial, but for the features asked for next.
        ("", ["-|-", "data|-|-", "data|-|-"], ["-|-", "data|-|-", "data|-|-", "-|-"]),
        # The features have it: each device looks up, and adds up, all rows of its columns.
        ("look-ups", ["-|data", "-|-|-", "-|-|data"], ["-|data", "-|-|-", "-|-|data", "-|data"]),
    ],
)
def test_the_features_have_the_axis_in_look_ups(unless: str, looked_up: list[str], gradient: list[str]) -> None:
    """The table, the indices and the rows of a look-up; the zeros, the indices, the rows and the sum of a gradient."""
    case = trained()
    plan = case.shard("ids.0", "data", unless=unless), case.shard("p['table'].1", "data")
    for name, expected in ((GATHER, looked_up), (SCATTER, gradient)):
        (op,) = (number for number, op in enumerate(case.program.ops) if op.name == name)
        found = case.problem.op_sharding(case.problem.op_pattern[op], plan)
        assert [case.text(sharding) for sharding in (*found.operands, *found.computed)] == expected
        assert found.scattered == (((0,),) if not unless and name == SCATTER else ((),))


def test_it_is_offered_for_what_indices_have_and_tables_have_not() -> None:
    case = trained()
    offered = {group for group in range(len(case.problem.dimensions.groups)) for d in [case.shard("ids.0", "data")]
               if decision_space(case.problem).offers(d._replace(group=group, sides=(), unless=LOOK_UPS))}  # fmt: skip
    assert offered == {case.group("ids.0"), case.group("ids.1")}


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_the_promise_holds(form: str) -> None:
    """Rows go to the batch's devices in an all-to-all, as do their gradients; only the product gathers the table."""
    case = trained()
    plan, size = left_to_features(case), 4
    rows, table, w = BATCH * SEQ * EMBED * size, VOCAB * EMBED * size, EMBED * EMBED * size
    promised = case.collectives(plan)
    assert promised == sorted([
        ("all-gather", ("data",), BATCH * SEQ * size, 1),
        ("all-gather", ("data",), w, 1),
        ("all-gather", ("data",), table, 1),
        ("all-to-all", ("data",), rows // 8, 2),
        ("reduce-scatter", ("data",), w // 8, 1),
        ("reduce-scatter", ("data",), table // 8, 1),
    ])  # fmt: skip
    assert worst_error(case.source, case.lowered(plan), form) < 1e-5
    assert collectives(case, compiled(case, plan, form)) == on_cpu(case, promised)


def test_tables_that_have_the_batch_are_told_from_those_that_have_not() -> None:
    """Each element of the batch has a table of its own in the second look-up: nothing is to be sent there."""

    def run(one: Any, each: Any, ids: Any) -> Any:
        return one[ids], jax.vmap(lambda table, k: table[k], in_axes=0)(each, ids)

    shapes = arg(VOCAB, EMBED), arg(BATCH, VOCAB, EMBED), arg(BATCH, dtype=jnp.int32)
    case = case_of(run, *shapes, mesh=round_mesh(data=8))
    plan = (case.shard("ids.0", "data", unless="look-ups"),)
    rows = OpShardingMemo(case.problem)
    steps = rows.steps(plan)
    numbers = [rows.row(view, steps) for view in rows.views]
    found = [rows.op_sharding(case.problem.op_pattern[op], numbers) for op in case.ops("gather")]
    assert [case.text(of.operands[0]) for of in found] == ["-|-", "data|-|-"]


def test_it_is_said_and_kept(tmp_path: Path) -> None:
    case = trained()
    plan, file = left_to_features(case), tmp_path / "plan.json"
    assert decision_text(case.problem, plan[0]).endswith("over data, except in ops that look up rows of tables")
    file.write_bytes(save_plan(case.problem, plan))
    assert carried_over(case.problem, read_plan(str(file))) == (plan, [])
    said = " ".join(explain(Study(case.source, case.evaluator, plan), decision="1").sentences)
    assert "it leaves these ops to other decisions" in said
