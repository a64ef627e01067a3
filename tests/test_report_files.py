"""Facts of reports outside the terminal: JSON, stored reports and the checks against them, sweep tables."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs import SAMPLES
from report_sample import GIB, PREDICTED, TOO_LARGE, make_report

from toast_cli import pipeline
from toast_cli.base.errors import InputError, UsageError
from toast_cli.cli import main
from toast_cli.report import model
from toast_cli.report.checks import CheckLimits, judge, plan_drift, refuse_other_mesh
from toast_cli.report.command_tables import SweepRow, ranked, row_of, rows_table, to_csv, to_json
from toast_cli.report.model import BoundFacts, PlanFacts, read_report, same_facts, to_bytes
from toast_cli.report.step import trace
from toast_cli.report.style import make_console, render
from toast_cli.request import Request

ROOT = Path(__file__).parent.parent


# JSON


SCHEMA_KEYS = {
    "program": "path name ops values arguments parameter_bytes flops",
    "mesh": "name chip devices axes",
    "plan": "decisions summary",
    "predicted": "step_seconds compute_seconds communication_seconds peak_bytes argument_bytes limit_bytes fits mfu",
    "analysis": "classes groups conflicts components resolution_groups",
    "search": "algorithm seed seconds evaluations best_found_at",
}
ENTRY_KEYS = {
    "collectives": "kind axes bytes count seconds location",
    "arguments": "index name type donated sharding",
    "results": "index name type sharding",
}


def test_json_has_the_stable_fields() -> None:
    facts = json.loads(to_bytes(make_report()))
    assert next(iter(facts)) == "schema" and facts["schema"] == "toast.report/1"
    for section, keys in SCHEMA_KEYS.items():
        assert set(keys.split()) <= set(facts[section])
    for section, keys in ENTRY_KEYS.items():
        assert set(keys.split()) <= set(facts[section][0])
    assert set(facts["baselines"]["unsharded"]) >= {"step_seconds", "peak_bytes", "fits"}
    assert facts["mesh"]["axes"] == {"data": 8, "model": 2}
    assert facts["arguments"][0]["sharding"] == [["data", "model"], []]
    assert facts["timings"]["search"] == 2.13


def test_figures_that_are_no_numbers_are_null() -> None:
    facts = json.loads(to_bytes(make_report(replace(PREDICTED, mfu=math.nan, step_seconds=math.inf))))
    assert facts["predicted"]["mfu"] is None and facts["predicted"]["step_seconds"] is None


def test_every_json_field_is_documented() -> None:
    documented = (ROOT / "docs" / "reference" / "json.md").read_text()
    kinds = [kind for kind in vars(model).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert [name for name in sorted(names) if f"`{name}`" not in documented] == []
    columns = {field.name for field in dataclasses.fields(SweepRow)}
    assert [name for name in sorted(columns) if f"`{name}`" not in documented] == []


def test_a_stored_report_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    row = model.ConfirmedPlanFacts("search", 0.2, GIB, "refused", "why", None, None, None, None, None)
    report = replace(
        make_report(),
        confirmation=model.ConfirmationFacts("XLA:TPU", None, [row], 3.0, True),
        goal=model.GoalFacts(["step_time"], [BoundFacts("peak_memory", 13 * GIB, 12 * GIB, True)]),
        constraints=[model.ConstraintFacts("use", "model.py:3", "f32[8]", "", 2, "x = x")],
    )
    path.write_bytes(to_bytes(report))
    assert read_report(str(path)) == report


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "report.json:1:1: is not JSON"),
        (b'{"schema": \n 1,}', "report.json:2:"),
        (b'{"schema": "\xff"}', "is not JSON: not UTF-8 text"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "it has no schema"),
        (b'{"schema": "toast.report/9"}', 'it has schema "toast.report/9"'),
        (b'{"schema": "toast.report/1"}', "the report has no program"),
        (b'{"schema": "toast.report/1", "program": {"path": "m", "name": 3}}', "program.name is 3"),
    ],
)
def test_files_that_are_no_report(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_report(str(path))
    assert expected in str(caught.value)
    assert "toast partition --json" in caught.value.hint


@pytest.mark.parametrize(("field", "figure"), [("peak_bytes", "1" + "0" * 400), ("step_seconds", "1e999")])
def test_figures_that_are_too_large(tmp_path: Path, field: str, figure: str) -> None:
    path = tmp_path / "report.json"
    facts = json.loads(to_bytes(make_report()))
    facts["predicted"][field] = "FIGURE"
    path.write_text(json.dumps(facts).replace('"FIGURE"', figure))
    with pytest.raises(InputError, match=rf"predicted\.{field} is (1000|inf)"):
        read_report(str(path))


def test_a_report_that_is_not_there() -> None:
    with pytest.raises(InputError, match=r"nowhere\.json: no such file"):
        read_report("nowhere.json")


# Checks


def stored(decisions: tuple[str, ...] | None = None, **figures: Any) -> model.Report:
    """A report with other decisions, in words, or with other predicted figures."""
    report = make_report(replace(PREDICTED, **figures))
    if decisions is None:
        return report
    facts = [model.DecisionFacts("shard", "batch", "data", {}, 1, 8, text) for text in decisions]
    return replace(report, plan=replace(report.plan, decisions=facts))


@pytest.mark.parametrize(
    ("limits", "old", "failed"),
    [
        (CheckLimits(), None, []),
        (CheckLimits(max_bytes=int(12.1 * GIB)), None, []),
        (CheckLimits(max_bytes=12 * GIB), None, ["memory"]),
        (CheckLimits(max_step_seconds=0.0234), None, []),
        (CheckLimits(max_step_seconds=0.02), None, ["step time"]),
        (CheckLimits(max_communication_seconds=0.008), None, ["communication"]),
        (CheckLimits(), stored(), []),
        (CheckLimits(), stored(step_seconds=0.0225), []),
        (CheckLimits(), stored(step_seconds=0.022), ["step time kept"]),
        (CheckLimits(time_tolerance=0.1), stored(step_seconds=0.022), []),
        (CheckLimits(max_bytes=GIB), stored(peak_bytes=11 * GIB), ["memory", "memory kept"]),
        (CheckLimits(memory_tolerance=0.2), stored(peak_bytes=11 * GIB), []),
        (CheckLimits(), stored(communication_seconds=0.007), ["communication kept"]),
        (CheckLimits(communication_tolerance=0.2), stored(communication_seconds=0.007), []),
        (CheckLimits(), stored(communication_seconds=0.0), ["communication kept"]),
        (CheckLimits(same_plan=True), stored(), []),
        (CheckLimits(same_plan=True), stored(decisions=("batch over data",)), ["plan kept"]),
        (CheckLimits(), stored(decisions=("batch over data",)), []),
    ],
)
def test_judge(limits: CheckLimits, old: model.Report | None, failed: list[str]) -> None:
    assert [check.name for check in judge(make_report(), limits, old) if not check.passed] == failed


def test_bounds_of_the_goal_are_demands() -> None:
    bounds = [BoundFacts("step_time", 0.02, 0.0234, False), BoundFacts("peak_memory", 13 * GIB, 12 * GIB, True)]
    report = replace(make_report(), goal=replace(make_report().goal, bounds=bounds))
    assert [(check.name, check.passed) for check in judge(report, CheckLimits())] == [
        ("fits", True),
        ("step_time", False),
        ("peak_memory", True),
    ]
    limited = judge(report, CheckLimits(max_bytes=13 * GIB))  # max-memory is a bound of the search, and said once
    assert [check.name for check in limited] == ["fits", "memory", "step_time"]
    assert (limited[-1].found, limited[-1].allowed) == ("23.4 ms", "20.0 ms by subject-to")


def test_what_does_not_fit_fails_every_check() -> None:
    assert [check.passed for check in judge(make_report(TOO_LARGE), CheckLimits())] == [False]


def test_a_stored_report_of_another_mesh_is_refused() -> None:
    refuse_other_mesh(make_report(), "report.json", "v4", 16)
    other = replace(make_report(), mesh=replace(make_report().mesh, chip="H100", devices=8))
    with pytest.raises(UsageError, match=r"report.json: is of 8 devices \(H100\), the mesh of 16 \(v4\)"):
        refuse_other_mesh(other, "report.json", "v4", 16)


BATCH, HEADS, EMBED, STATE = (decision.text for decision in make_report().plan.decisions)


@pytest.mark.parametrize(
    ("before", "lines"),
    [
        ((BATCH, HEADS, EMBED, STATE), []),
        ((HEADS, EMBED, STATE), [f"+ {BATCH}"]),
        ((BATCH, HEADS, "vocab over model", EMBED, STATE), ["- vocab over model"]),
        (("seq over data", BATCH, EMBED, STATE), ["- seq over data", f"+ {HEADS}"]),
        ((HEADS, BATCH, EMBED, STATE), [f"~ {BATCH}: now decision 1, was 2"]),
    ],
)
def test_plan_drift(before: tuple[str, ...], lines: list[str]) -> None:
    assert plan_drift(stored(before), make_report()) == lines


def test_plan_drift_of_arguments_without_a_name_of_their_own() -> None:
    before = make_report()
    first, second, third, *_ = before.arguments
    before = replace(before, arguments=[replace(first, name=""), replace(second, name=""), replace(third, name="w")])
    now = replace(before, arguments=[*before.arguments[:1], replace(second, name="", sharding=[["model"]]), third])
    assert plan_drift(before, before) == []
    assert [line.partition(" →")[0].partition(":")[0] for line in plan_drift(before, now)] == [f"  #{second.index}"]


def test_plan_drift_of_arguments() -> None:
    before = [replace(one, sharding=[[] for _ in one.sharding]) for one in make_report().arguments]
    lines = plan_drift(replace(make_report(), arguments=before), make_report())
    assert lines[0] == "  params/embed: replicated → (data+model, None)"
    assert len(lines) == 4 and lines[3] == "  and 7 more arguments are sharded differently"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"timings": {"load": 9.0}}, True),
        ({"predicted": replace(PREDICTED, step_seconds=0.1)}, False),
    ],
)
def test_same_facts(tmp_path: Path, change: dict[str, Any], same: bool) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(to_bytes(replace(make_report(), **change)))
    assert same_facts(str(path), make_report()) is same


def test_no_file_has_the_same_facts(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("[1")
    assert not same_facts(str(tmp_path / "report.json"), make_report())
    assert not same_facts(str(tmp_path / "none.json"), make_report())


# Sweeps


def sweep_rows() -> list[SweepRow]:
    report = make_report()
    slower = replace(report, predicted=replace(PREDICTED, step_seconds=0.03))
    other = replace(report, mesh=replace(report.mesh, axes={"data": 16}))
    return ranked(
        [
            row_of("tiny.mlir", "v4-32", slower, 1.5),
            row_of("tiny.mlir", "v4-32", replace(other, plan=PlanFacts([], "batch over data")), 1.25),
            row_of("tiny.mlir", "v4-32", make_report(TOO_LARGE), 1.0),
            SweepRow("tiny.mlir", "v4-33", "", "failed", "no mesh specification"),
        ]
    )


SWEEP_72 = """\
   mesh   shape           step time  peak memory
★  v4-32  data=16           23.4 ms     12.1 GiB  batch over data
   v4-32  data=8,model=2    30.0 ms     12.1 GiB  data (8): FSDP; model
                                                  (2): tensor-parallel
                                                  (heads)
   v4-32  data=8,model=2    23.4 ms     45.2 GiB  does not fit in 30.8
                                                  GiB
   v4-33  -                                       failed: no mesh
                                                  specification
"""


def test_sweep_table() -> None:
    console = make_console(io.StringIO(), 72)
    assert render([rows_table(sweep_rows(), 72)], console) == SWEEP_72


def test_a_point_that_may_not_fit_is_never_marked() -> None:
    near = replace(PREDICTED, peak_bytes=30 * 2**30, step_seconds=0.001, peak_error=0.07)
    rows = ranked([row_of("tiny.mlir", "v4-32", make_report(one), 1.0) for one in (near, PREDICTED)])
    assert [(row.status, row.best) for row in rows] == [("fits", True), ("unsure", False)]
    assert "may not fit; data (8): FSDP" in render([rows_table(rows, 160)], make_console(io.StringIO(), 160))


def test_a_sweep_of_two_programs_is_one_table() -> None:
    rows = [*sweep_rows(), SweepRow("other.mlir", "v4-32", "data=16", "failed", "no such file")]
    found = render([rows_table(rows, 160)], make_console(io.StringIO(), 160))
    assert found.count("step time") == 1
    assert "tiny.mlir" in found and "other.mlir" in found


def test_sweep_csv() -> None:
    head, first, second, *_, failed = to_csv(sweep_rows()).decode().splitlines()
    assert head.startswith("program,mesh,mesh_shape,status,error,step_seconds,")
    assert ",1.25,true,16,0," in first
    assert second.startswith('tiny.mlir,v4-32,"data=8,model=2",fits,,0.03,') and ",1.5,false,16,0," in second
    assert failed.startswith("tiny.mlir,v4-33,,failed,no mesh specification,,,,,,,,,,false,,0,")


def test_sweep_json() -> None:
    facts = json.loads(to_json(sweep_rows()))
    assert facts["schema"] == "toast.sweep/1"
    assert [point["best"] for point in facts["points"]] == [True, False, False, False]
    assert facts["points"][3]["step_seconds"] is None


# -- the trace of a step: valid, nested, and as long as the step's compute and communication


def test_slices_nest_and_add_up() -> None:
    (path,) = SAMPLES.glob("t2b_tiny.*")
    found = pipeline.partition(Request(str(path), "v4-32", "data=4,model=4", strategy="fsdp:data+megatron:model"))
    events = json.loads(trace(found.source, found.evaluator, found.result))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    expected = {
        1: sum(kernel.seconds for kernel in found.evaluator.kernels(found.result.plan)),
        2: sum(use.seconds for use in found.evaluator.collectives(found.result.plan)),
    }
    for thread, seconds in expected.items():
        assert seconds > 0
        open_slices: list[tuple[float, float]] = []
        top = 0.0
        for one in (event for event in slices if event["tid"] == thread):
            start, end = one["ts"], one["ts"] + one["dur"]
            while open_slices and start >= open_slices[-1][1] - 1e-6:
                open_slices.pop()
            if open_slices:
                assert end <= open_slices[-1][1] + 1e-6, "a slice ends with the one around it, or before"
            else:
                top += one["dur"]
            open_slices.append((start, end))
        assert top == pytest.approx(seconds * 1e6)
    named = {event["name"] for event in slices}
    assert any(name.startswith("decoder.py:") for name in named)
    assert any(" over data" in name for name in named)


def test_the_command_writes_it(tmp_path: Path) -> None:
    target = tmp_path / "step.json"
    (path,) = SAMPLES.glob("mlp_tiny.*")
    words = ["partition", str(path), "--mesh", "v4-32", "--strategy", "fsdp:data", "--quiet", "--trace", str(target)]
    assert main(words) == 0
    assert {event["ph"] for event in json.loads(target.read_text())["traceEvents"]} == {"M", "X"}
