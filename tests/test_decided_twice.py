"""Plans that decide about one dimension on one axis twice: for a part of the program, then for all that is left."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from programs import Case, arg, case_of, round_mesh
from report_sample import make_report

from toast_cli.plan.decisions import Plan
from toast_cli.plan.saved import carried_over, read_plan, save_plan
from toast_cli.report.build import _decision
from toast_cli.report.explain.answers import explain
from toast_cli.report.explain.study import Study, stored_plan
from toast_cli.report.model import to_bytes
from toast_cli.report.terminal import _local_sizes
from toast_cli.report.words import summary


def run(p: Any, x: Any) -> Any:
    heads = jnp.tanh(jnp.einsum("bd,dhk->bhk", x, p["w"]))
    return jnp.einsum("bhk,hkd->bd", heads, p["o"]), jnp.cos(jnp.sin(x).sum(1))


@cache
def attended() -> Case:
    return case_of(run, {"o": arg(4, 8, 16), "w": arg(16, 4, 8)}, arg(32, 16), mesh=round_mesh(data=4))


def twice(case: Case) -> Plan:
    """The batch has the axis where heads are, then features have it, and the batch where there are none."""
    return case.shard("x.0", "data", only="p['w'].1"), case.shard("x.1", "data"), case.shard("x.0", "data")


def test_each_holds_where_it_is_the_first() -> None:
    case = attended()
    study = Study(case.source, case.evaluator, twice(case))

    def giver(name: str) -> int:
        (op,) = case.ops(name)
        return study.holder(case.problem.op_pattern[op], 0)[0]

    assert [giver("tanh"), giver("sine"), giver("cosine")] == [1, 2, 3]
    first, last = (" ".join(explain(study, decision=str(number)).sentences) for number in (1, 3))
    assert "it leaves these ops to other decisions" in first
    assert "decision 1 splits it already" in last
    assert len(explain(study).changes) == 3
    assert "data x data" not in summary(case.problem, study.plan)


def test_it_is_canonical_and_comes_back(tmp_path: Path) -> None:
    case = attended()
    plan, file = twice(case), tmp_path / "plan.json"
    assert case.problem.canonical(plan) == plan
    file.write_bytes(save_plan(case.problem, plan))
    assert carried_over(case.problem, read_plan(str(file))) == (plan, [])
    report = json.loads(to_bytes(make_report()))
    report["plan"]["decisions"] = [vars(_decision(case.source, case.problem, decision)) for decision in plan]
    file.write_text(json.dumps(report))
    assert stored_plan(str(file), case.problem)[1] == plan


def test_a_size_is_divided_by_an_axis_once() -> None:
    report = make_report()
    batch = next(d for d in report.plan.decisions if d.target == "batch")
    decisions = [replace(batch, only="heads"), batch]
    sizes = _local_sizes(replace(report, plan=replace(report.plan, decisions=decisions)))
    assert sizes == ["64 → 8", "64 → 8"]
