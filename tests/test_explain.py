"""`toast explain`: figures are those of plans that differ in one thing, reasons name the decisions that made it so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax.numpy as jnp
import pytest
from programs import SAMPLES, arg, case_of
from report_sample import WIDTHS, nothing_cut_off
from sweeps import sweep

from toast_cli import pipeline
from toast_cli.base.errors import InputError, UsageError
from toast_cli.cli.app import run
from toast_cli.pipeline import Outcome
from toast_cli.plan.decisions import Shard
from toast_cli.plan.partitioned import CollectiveFacts
from toast_cli.plan.saved import save_plan, unmirror
from toast_cli.price.evaluator import Evaluator
from toast_cli.program.quantities import format_bytes, format_seconds
from toast_cli.report.arrays import merged_collectives
from toast_cli.report.build import collective_facts
from toast_cli.report.command_tables import explanation_blocks
from toast_cli.report.explain.answers import explain
from toast_cli.report.explain.study import SCHEMA, Explanation, Study, stored_plan, stored_request
from toast_cli.report.model import to_bytes
from toast_cli.report.words import ConflictExample, conflict_examples, rows_of
from toast_cli.request import Request

MLP = str(SAMPLES / "mlp_tiny.mlir")
T2B = str(SAMPLES / "t2b_tiny.mlirbc.zst")
MOE = str(SAMPLES / "moe_tiny.mlirbc.zst")
MESH = "v4-32"
GPUS = "a100-16"


@cache
def outcome_of(strategy: str = "fsdp:data+megatron:model", program: str = T2B, mesh: str = MESH) -> Outcome:
    return pipeline.partition(Request(program, mesh, strategy=strategy), annotated=False)


@cache
def study(*arguments: str, **named: str) -> Study:
    outcome = outcome_of(*arguments, **named)
    return Study(outcome.source, outcome.evaluator, outcome.result.plan)


def place_of(of: Study, role: str, axis: str) -> int:
    """Number of the decision about a role over an axis."""
    groups, names = of.problem.dimensions.groups, of.problem.mesh.names
    return next(
        n
        for n, d in enumerate(of.plan, 1)
        if isinstance(d, Shard) and (groups[d.group].role, names[d.axis]) == (role, axis)
    )


def costs(found: Explanation) -> dict[str, tuple[float, int]]:
    return {change.what: (change.step_seconds, change.peak_bytes) for change in found.changes}


# ---------------------------------------------------------------- decisions


def test_the_overview_prices_the_plan_without_each_decision() -> None:
    of = study()
    found = explain(of)
    assert len(found.changes) == len(of.plan)
    for number, change in enumerate(found.changes, 1):
        cost = of.evaluator.exact_cost(of.problem.canonical((*of.plan[: number - 1], *of.plan[number:])))
        assert (change.step_seconds, change.peak_bytes) == (cost.step_seconds, round(cost.peak_bytes))
        assert change.what.startswith(f"{number}  ")
    assert found.step_seconds == of.evaluator.exact_cost(of.plan).step_seconds


def test_a_decision_says_what_it_does_and_what_comes_with_it() -> None:
    of = study(mesh=GPUS)  # XLA:TPU makes all-reduces of scatters as small as these
    number = place_of(of, "embed", "data")
    found = explain(of, decision=str(number))
    assert "It splits embed" in found.sentences[0]
    assert " ways over data" in found.sentences[0]
    assert re.search(
        r"In [\d,]+ ops it does nothing: data is taken there by batch, decision \d", " ".join(found.sentences)
    )
    assert found.changes[0].what == "without it"
    items = {item.text for item in found.items}
    assert "+ all-gather over data" in items  # weights are gathered because they rest split
    assert "- all-reduce over data" in items  # and gradients are scattered instead


def test_alternatives_to_a_decision_are_plans_with_something_in_its_place() -> None:
    of = study()
    number = place_of(of, "ff", "model")
    found = explain(of, decision=str(number))
    groups = of.problem.dimensions.groups
    instead = {g.name for g in groups}
    for change in found.changes[1:]:
        if change.what.endswith(" instead"):
            assert change.what.partition(" over ")[0].partition(" (")[0] in instead
    assert len(found.changes) > 3


def test_keeping_weights_whole_is_explained() -> None:
    of = study("zero2")
    number = next(n for n, d in enumerate(of.plan, 1) if not isinstance(d, Shard))
    assert "keeps weights replicated over data between steps" in explain(of, decision=str(number)).sentences[0]


# ---------------------------------------------------------------- arguments


def test_an_argument_says_who_split_it_and_who_did_not() -> None:
    of = study()
    found = explain(of, decision="params['layers'][0]['up']")
    embed, ff = place_of(of, "embed", "data"), place_of(of, "ff", "model")
    said = " ".join(found.sentences)
    assert f"embed is split over data, by decision {embed}, in 1 op." in said
    assert f"ff is split over model, by decision {ff}, in 1 op." in said
    assert "Read by dot_general, subtract; moving them takes" in said
    assert {w.partition(" (")[0] for w in costs(found)} == {f"without decision {n}" for n in (embed, ff)}
    of_all = " ".join(explain(of, decision="*").sentences)
    assert re.search(r"\(vocab over data\) does nothing: data is taken there by embed, decision \d, in 3 ops", of_all)


def test_many_arguments_are_folded() -> None:
    found = explain(study(), decision="*up*")
    assert [(item.text.partition(" ")[0], item.count) for item in found.items] == [("{params,mu,nu}/layers/*/up", 6)]


# ---------------------------------------------------------------- lines, collectives, the peak


def test_a_line_says_what_splits_it_and_what_moves_there() -> None:
    of = study()
    source = next(
        of.source.location(k).partition(" ")[0]
        for k, op in enumerate(of.problem.program.ops)
        if op.name.endswith("dot_general") and "mlp" in of.source.location(k)
    )
    found = explain(of, collective=f"some/folder/{source}")
    ff, batch = place_of(of, "ff", "model"), place_of(of, "batch", "data")
    said = " ".join(found.sentences)
    assert f"ff is split over model, by decision {ff}" in said
    assert f"batch is split over data, by decision {batch}" in said
    assert any(item.text.startswith("dot_general") for item in found.items)
    assert any(item.seconds for item in found.items)
    assert {f"without decision {n}" for n in (ff, batch)} <= {w.partition(" (")[0] for w in costs(found)}


def test_a_collective_names_the_decisions_it_hangs_on() -> None:
    of = study()
    rows = [row[0] for row in of.collective_rows]
    number = next(k for k, use in enumerate(rows, 1) if use.kind == "all-gather" and use.axes == (0,))
    found = explain(of, collective=str(number))
    embed, batch = place_of(of, "embed", "data"), place_of(of, "batch", "data")
    said = " ".join(found.sentences)
    assert re.search(rf"split over data along \w+ \(decision {embed}\)", said) or f"decision {batch}" in said
    gone = {change.what.partition(" (")[0]: change.note for change in found.changes}
    assert f"without decision {embed}" in gone or f"without decision {batch}" in gone
    assert "it is gone" in gone.values()


@pytest.mark.parametrize("program", sweep([T2B, MOE], MOE))
def test_collectives_are_numbered_as_in_the_report(program: str) -> None:
    """Row N of the report is what `--collective N` explains: kind, axes, runs and time."""
    of = study("fsdp+expert" if program == MOE else "zero2", program)
    rows = merged_collectives(collective_facts(of.source, of.evaluator, of.plan))
    assert any(len(row) > 1 for row in of.collective_rows), "some rows stand for several"
    assert len(of.collective_rows) == len(rows)
    for number, row in enumerate(rows, 1):
        if number <= 5 or number == len(rows):
            found = explain(of, collective=str(number))
            assert found.subject.startswith(f"collective {number}: {row.kind} over {'+'.join(row.axes)} at ")
            assert f", {row.count:,} times a step, {format_bytes(row.bytes)} on each device" in found.sentences[0]
            assert f": {format_seconds(row.seconds)}, " in found.sentences[0]
    with pytest.raises(UsageError, match=f"the plan has {len(rows)}, numbered as in the report"):
        explain(of, collective=str(len(rows) + 1))


def test_rows_go_by_the_time_of_all_in_them() -> None:
    one, other = (CollectiveFacts(kind, ["data"], 8, 1, 2.0, "model.py:1 f (fwd mul)") for kind in ("a", "b"))
    alike = replace(one, location="model.py:1 f (bwd mul)")
    assert rows_of([one, replace(other, seconds=3.0), alike]) == [[0, 2], [1]]


def test_a_reduction_is_said_to_be_one() -> None:
    of = study("data-parallel", MLP)
    number = next(k for k, row in enumerate(of.collective_rows, 1) if row[0].kind == "all-reduce")
    said = " ".join(explain(of, collective=str(number)).sentences)
    assert "each device has a part of the sum" in said


def test_the_peak_adds_up_and_what_lowers_it_does() -> None:
    of = study("data-parallel", MLP)
    found = explain(of, peak=True)
    assert sum(item.bytes for item in found.items) <= found.peak_bytes * 1.001
    assert sum(item.bytes for item in found.items) > 0.5 * found.peak_bytes
    assert found.changes
    assert all(change.peak_bytes < found.peak_bytes for change in found.changes)
    assert [c.peak_bytes for c in found.changes] == sorted(c.peak_bytes for c in found.changes)


WRONG: list[tuple[Callable[[Study], Explanation], str, str]] = [
    (lambda of: explain(of, decision=str(99)), "there is no decision 99", "numbered from 1"),
    (lambda of: explain(of, collective=str(10**6)), "there is no collective", "the most expensive first"),
    (lambda of: explain(of, decision="nothing*"), "no argument matches 'nothing*'", "the nearest arguments are "),
    (lambda of: explain(of, collective="decoder.py"), "cannot read 'decoder.py'", "FILE:LINE"),
    (
        lambda of: explain(of, collective="decoder.py:1"),
        "no operation comes from decoder.py:1",
        "lines of decoder.py it has",
    ),
    (
        lambda of: explain(of, collective="other.py:1"),
        "no operation comes from other.py:1",
        "holds no lines of other.py",
    ),
]


@pytest.mark.parametrize(("ask", "what", "hint"), WRONG, ids=[row[1] for row in WRONG])
def test_what_is_not_there_says_what_is(ask: Callable[[Study], Explanation], what: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        ask(study())
    assert what in error.value.what
    assert hint in error.value.hint


# ---------------------------------------------------------------- stored plans


@pytest.mark.parametrize(("strategy", "program"), [("zero2", T2B), ("fsdp+expert", MOE)], ids=["zero2", "experts"])
def test_the_plan_of_a_report_comes_back(tmp_path: Path, strategy: str, program: str) -> None:
    outcome = outcome_of(strategy, program)
    path = tmp_path / "report.json"
    path.write_bytes(to_bytes(outcome.report))
    assert stored_plan(str(path), outcome.problem) == (outcome.problem, outcome.result.plan)
    assert stored_request(str(path))["mesh_shape"] == "data=16"


def test_a_plan_that_holds_in_a_part_comes_back(tmp_path: Path) -> None:
    outcome = outcome_of()
    names = [group.name for group in outcome.problem.dimensions.groups]
    batch = next(d for d in outcome.result.plan if isinstance(d, Shard) and d.group == names.index("batch"))
    plan = (batch._replace(only=names.index("heads")), batch._replace(unless=names.index("heads"), axis=1))
    kept, report = tmp_path / "plan.json", tmp_path / "report.json"
    kept.write_bytes(save_plan(outcome.problem, plan))
    again = pipeline.partition(Request(T2B, MESH, plan=str(kept)), annotated=False)
    facts = again.report.plan.decisions
    assert [(d.only, d.unless) for d in facts] == [("heads", ""), ("", "heads")]
    assert facts[0].text.endswith("over data, only in ops with heads")
    report.write_bytes(to_bytes(again.report))
    assert stored_plan(str(report), outcome.problem)[1] == outcome.problem.canonical(plan)


def test_a_plan_that_decides_layers_apart_comes_back(tmp_path: Path) -> None:
    outcome = outcome_of()
    names = [group.name for group in outcome.problem.dimensions.groups]
    apart, _ = unmirror(outcome.problem, [names.index("ff")])
    first = [group.name for group in apart.dimensions.groups].index("ff:first")
    plan = apart.canonical((*outcome.result.plan, Shard(first, 1)))
    facts = json.loads(to_bytes(outcome.report))
    facts["plan"]["decisions"].append(
        {"kind": "shard", "target": "ff:first", "axis": "model", "sides": {}, "classes": 1, "size": 8, "text": ""}
    )
    path = tmp_path / "report.json"
    path.write_text(json.dumps(facts))
    problem, found = stored_plan(str(path), outcome.problem)
    assert found == plan
    assert Evaluator(problem).exact_cost(found) == Evaluator(apart).exact_cost(plan)


def test_the_plan_of_another_program_is_refused(tmp_path: Path) -> None:
    outcome = outcome_of("fsdp+expert", MOE)
    path = tmp_path / "report.json"
    path.write_bytes(to_bytes(outcome.report))
    with pytest.raises(InputError, match="the report is of another program: this one has no dimension 'experts'"):
        stored_plan(str(path), study().problem)


# ---------------------------------------------------------------- the command


@cache
def explained() -> tuple[Explanation, ...]:
    of = study()
    of_parts = (
        explain(of, decision=str(1)),
        explain(of, decision="*up*"),
        explain(of, collective=str(1)),
        explain(of, peak=True),
    )
    return explain(of), *of_parts


@pytest.mark.parametrize("width", WIDTHS)
def test_explanations_are_whole_at_any_width(width: int) -> None:
    for found in explained():
        whole = replace(found, items=[replace(item, detail="") for item in found.items])  # places are shortened
        nothing_cut_off(partial(explanation_blocks, whole, verbose=False), width)


def test_the_command_explains_a_stored_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    mesh = ["--mesh", MESH, "--mesh-shape", "data=4,model=4"]
    assert run(["partition", MLP, *mesh, "--iterations", "20", "--json", str(report), "--quiet"]) == 0
    stored = json.loads(report.read_text())
    capsys.readouterr()
    assert run(["explain", MLP, "--mesh", MESH, "--report", str(report), "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["schema"] == SCHEMA
    assert facts["axes"] == {"data": 4, "model": 4}
    assert facts["step_seconds"] == pytest.approx(stored["predicted"]["step_seconds"])
    assert len(facts["changes"]) == len(stored["plan"]["decisions"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "what the plan would cost without"),
        (["--decision", "1"], "decision 1: "),
        (["--decision", "*w*"], "argument *w*"),
        (["--collective", "1"], "collective 1: "),
        (["--peak"], "alive at the peak"),
    ],
)
def test_the_command_explains_what_is_asked(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run(["explain", MLP, "--mesh", MESH, "--strategy", "fsdp+megatron", *options]) == 0
    out = capsys.readouterr().out
    assert said in out
    assert "the plan as it is" in out


def test_one_thing_is_explained_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", T2B, "--mesh", MESH, "--peak", "--decision", "1"]) == 2
    assert "one thing is explained at a time" in capsys.readouterr().err


def test_a_conflict_of_which_an_op_shows_one_side_is_told() -> None:
    """As a scatter does that takes part in two: a report on a two-tower model ended in a `ValueError`."""
    problem = case_of(lambda x: jnp.sin(x @ x.T), arg(16, 8)).problem
    assert conflict_examples(problem)[0] == ConflictExample(2, "f32[16,16]", {0: "0", 1: "1"})
    strands = {
        number: tuple(strand if strand and strand.side == 0 else None for strand in own)
        for number, own in problem.dimensions.strands.items()
    }
    seen = conflict_examples(replace(problem, dimensions=replace(problem.dimensions, strands=strands)))[0]
    assert (seen.called(0), seen.called(1)) == ("what is kept", "one of the two")
