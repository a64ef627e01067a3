"""Plan semantics: what is split, by whom, and what that sends. `test_features` has the known strategies.

Every array is f32 (4 bytes an element). `bytes` are of the result on one device, see `CollectiveUse`.
"""

from __future__ import annotations

import doctest
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax
from programs import Case, arg, case_of, round_mesh
from report_sample import make_report

import toast_cli.plan
from toast_cli.plan.decisions import Plan
from toast_cli.plan.saved import carried_over, read_plan, save_plan
from toast_cli.report.build import _decision
from toast_cli.report.explain.answers import explain
from toast_cli.report.explain.study import Study, stored_plan
from toast_cli.report.model import to_bytes
from toast_cli.report.terminal import _local_sizes
from toast_cli.report.words import summary

Collectives = list[tuple[str, tuple[str, ...], float, float]]

# ---------------------------------------------------------------- what is stored whole, and what is made of it

N, D, F = 8, 16, 64  # batch, model, hidden


def test_what_is_spread_over_the_batch_is_no_weight_any_more() -> None:
    case = case_of(lambda p, x: jnp.tanh(x @ p["w"] + p["b"]), {"w": arg(D, F), "b": arg(F)}, arg(N, D))
    plan = (case.shard("x.0", "data"), case.shard("p['b'].0", "data"), case.replicate("weights", "data"))
    lowered = case.lowered(plan)
    made = [v for n in case.ops("broadcast_in_dim") for v in case.program.ops[n].results]
    (spread,) = (v for v in made if case.program.values[v].shape == (N, F))
    assert case.rest("p['b']", plan) == "-"
    assert case.text(lowered.shardings[spread]) == "data|-"


def test_a_batch_that_is_stored_whole_is_cut_before_anything_is_made_of_it() -> None:
    """Bytes of pictures that each device has whole; XLA would lay out all of them anew, and convert them."""
    case = case_of(lambda p, x: x.reshape(N, D).astype(jnp.float32) @ p, arg(D, F), arg(4, N // 4, D, dtype=jnp.uint8))
    plan = (case.shard("x.0", "data"), case.replicate("inputs", "data"))
    made = [v for name in ("reshape", "convert") for n in case.ops(name) for v in case.program.ops[n].results]
    assert case.rest("x", plan) == "-|-|-"
    assert [case.text(case.lowered(plan).shardings[value]) for value in made] == ["data|-", "data|-"]


def test_weights_that_are_stored_whole_are_converted_whole() -> None:
    case = case_of(lambda p, x: x @ p.astype(jnp.float32), arg(D, F, dtype=jnp.bfloat16), arg(N, D))
    plan = (case.shard("x.0", "data"), case.shard("x.1", "data"), case.replicate("weights", "data"))
    (converted,) = (v for n in case.ops("convert") for v in case.program.ops[n].results)
    assert case.text(case.lowered(plan).shardings[converted]) == "-|-"


# ---------------------------------------------------------------- tables

B, S, M, H, K = 2, 16, 32, 4, 8  # batch, sequence, model, heads, head size
ACTIVATION = B * S * M * 4.0
FOUR = round_mesh(data=2, model=4)


def lookup(table: Any, index: Any) -> Any:
    how = lax.GatherDimensionNumbers((index.ndim,), (0,), (0,))
    return lax.gather(table, index[..., None], how, (1, table.shape[1]), mode="promise_in_bounds")


def test_a_table_split_over_its_rows_is_looked_up_in_part_everywhere() -> None:
    case = case_of(lookup, arg(64, M), arg(B, S, dtype=jnp.int32), mesh=FOUR)
    vocab, batch = case.shard("table.0", "model"), case.shard("index.0", "data")
    assert case.collectives((vocab,)) == [("all-reduce", ("model",), ACTIVATION, 1.0)]
    assert case.collectives((batch, vocab)) == [("all-reduce", ("model",), ACTIVATION / 2, 1.0)]
    # Split over the axis that the batch has, it has to be gathered.
    assert case.collectives((batch, case.shard("table.0", "data"))) == [("all-gather", ("data",), 64 * M * 4.0, 1.0)]
    # Split over its columns it needs nothing.
    assert case.collectives((case.shard("table.1", "model"),)) == []


# ---------------------------------------------------------------- what can be split


def merged(x: Any, w: Any) -> Any:
    return x.reshape(B, S, H * K) @ w


# decisions (dimension of x, axis) -> collectives. Mesh data=2, model=4; x is [B, S, 4 heads, 8], merged to [B, S, 32].
X, OUT = B * S * H * K * 4.0, B * S * 8 * 4.0
MINOR: list[tuple[str, list[tuple[str, str]], Collectives]] = [
    ("all heads", [("x.2", "model")], [("all-reduce", ("model",), OUT, 1.0)]),
    ("half the heads", [("x.2", "data")], [("all-reduce", ("data",), OUT, 1.0)]),
    ("head size alone is gathered", [("x.3", "model")], [("all-gather", ("model",), X, 1.0)]),
    ("head size within all heads", [("x.2", "model"), ("x.3", "data")], [("all-reduce", ("data", "model"), OUT, 1.0)]),
    (
        "head size within half the heads is gathered",
        [("x.2", "data"), ("x.3", "model")],
        [("all-gather", ("model",), X / 2, 1.0), ("all-reduce", ("data",), OUT, 1.0)],
    ),
]


@pytest.mark.parametrize(("places", "expected"), [m[1:] for m in MINOR], ids=[m[0] for m in MINOR])
def test_a_minor_part_is_split_only_within_fully_split_major_ones(
    places: list[tuple[str, str]], expected: Collectives
) -> None:
    case = case_of(merged, arg(B, S, H, K), arg(H * K, 8), mesh=FOUR)
    assert case.collectives(tuple(case.shard(*place) for place in places)) == expected


@pytest.mark.parametrize(
    ("size", "axes", "expected"),
    [
        (6, ["data"], "data"),
        (6, ["model"], "-"),
        (4, ["model", "data"], "model"),
        (8, ["model", "data"], "model,data"),
        (1, [], "-"),
    ],
)
def test_shards_divide(size: int, axes: list[str], expected: str) -> None:
    case = case_of(lambda x: x * 2.0, arg(size), mesh=FOUR)
    assert case.rest("x", tuple(case.shard("x.0", axis) for axis in axes)) == expected


def test_the_first_decision_that_can_wins_the_axis_in_each_op() -> None:
    case = case_of(lambda x, y: (x * 2.0, y * 2.0), arg(6, 8), arg(8, 6), mesh=FOUR)
    first, second = case.shard("x.0", "model"), case.shard("x.1", "model")
    assert case.rest("x", (first, second)) == "-|model"  # 6 rows cannot be split 4 ways
    case = case_of(lambda x: x * 2.0, arg(8, 8), mesh=FOUR)
    first, second = case.shard("x.0", "model"), case.shard("x.1", "model")
    assert case.rest("x", (first, second)) == "model|-"
    assert case.rest("x", (second, first)) == "-|model"


def test_equal_uses_share_one_reshard() -> None:
    case = case_of(lambda x, v, w: (x @ v, x @ w, (x @ w).T), arg(8, 16), arg(16, 4), arg(16, 4), mesh=FOUR)
    plan = (case.shard("v.1", "model"), case.shard("w.1", "model"), case.shard("x.1", "model"))
    assert case.collectives(plan) == [("all-gather", ("model",), 8 * 16 * 4.0, 1.0)]


# ---------------------------------------------------------------- loops


def test_a_gather_of_what_a_loop_starts_with_happens_once() -> None:
    def run(x: Any, w: Any) -> Any:
        return lax.fori_loop(0, 5, lambda _, c: jnp.sin(c @ w), x.reshape(8, 32))

    case = case_of(run, arg(8, 4, 8), arg(32, 32), mesh=FOUR)
    plan = (case.shard("x.2", "model"),)  # the minor part of what the loop carries
    assert case.collectives(plan) == [("all-gather", ("model",), 8 * 32 * 4.0, 1.0)]


def test_the_worked_example_prints_what_it_says() -> None:
    found = doctest.testmod(toast_cli.plan)
    assert found.attempted > 10 and not found.failed


# -- plans that decide about one dimension on one axis twice: for a part of the program, then for all that is left


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
