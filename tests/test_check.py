"""`toast check` around a pipeline that is not run: demands, stored reports, outputs, exit codes."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from checking import check, install_here, store, toast
from fake_pipeline import Pipeline
from report_sample import PREDICTED, TOO_LARGE, WIDTHS, make_report, nothing_cut_off

from toast_cli.base.errors import InputError
from toast_cli.report import checks
from toast_cli.report.checks import Check, CheckVerdict

HERE = Path(__file__).parent


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pipeline:
    return install_here(monkeypatch, tmp_path)


# One program


@pytest.fixture
def stored(pipeline: Pipeline) -> str:
    """A report stored earlier, 10 % better than now."""
    store("report.json", PREDICTED.step_seconds / 1.1)
    return "report.json"


@pytest.mark.parametrize(
    ("demands", "code"),
    [
        ("", 0),
        ("--max-memory 13GiB --max-step-time 24ms --max-communication 9ms", 0),
        ("--max-memory 12GiB", 1),
        ("--max-step-time 23ms", 1),
        ("--max-communication 8ms", 1),
        ("--against report.json", 1),
        ("--against report.json --tolerance 11%", 0),
        ("--against report.json --time-tolerance 11%", 0),
        ("--against report.json --memory-tolerance 11% --communication-tolerance 11%", 1),
        ("--against report.json --tolerance 0.11 --max-step-time 1ms", 1),
        ("--against report.json --tolerance 11% --same-plan", 0),
    ],
)
def test_check(pipeline: Pipeline, stored: str, demands: str, code: int) -> None:
    assert check(*demands.split()) == code


def test_max_memory_bounds_the_search(pipeline: Pipeline, stored: str) -> None:
    """What is allowed is also looked for, except where a plan is given."""
    check("--max-memory", "13GiB")
    check("--max-memory", "13GiB", "--strategy", "fsdp")
    assert [request.subject_to for request in pipeline.requests] == [("peak_memory<=13GiB",), ()]


def test_check_says_what_failed(pipeline: Pipeline, stored: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--max-memory", "13GiB", "--against", stored) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[2:] == [
        "                              predicted  allowed",
        "  ok      fits                 12.1 GiB  30.8 GiB usable per device",
        "  ok      memory               12.1 GiB  13.0 GiB by max-memory",
        "  ok      memory kept          12.1 GiB  12.1 GiB in the stored report (+0.0%, tolerance 5.0%)",
        "  FAILED  step time kept        23.4 ms  21.3 ms in the stored report (+10.0%, tolerance 5.0%)",
        "  ok      communication kept    8.20 ms  8.20 ms in the stored report (+0.0%, tolerance 5.0%)",
    ]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("points", [1, 2])
def test_verdicts_are_whole_at_any_width(width: int, points: int) -> None:
    compiled = [
        Check("memory, compiled", False, "30.3 GiB compiled", "29.2 GiB usable per device"),
        Check("communication[data] kept", True, "12.3 ms", "11.9 ms in the stored report (+3.4%, tolerance 5.0%)"),
    ]
    drift = [
        "- split heads (8, 2 alike) 2 ways over model",
        "  params['layers'][0]['mlp']['gate']: (None, data) → whole",
    ]
    one = CheckVerdict("models/train.mlirbc", "v4-32", "12 ms a step; batch over data", compiled, "report.json", drift)
    broken = CheckVerdict("models/other.mlirbc", "v4-32", error="no such file", hint="give the path of a program")
    nothing_cut_off(lambda _: checks.as_text([one, broken][:points]), width)


def test_check_is_quiet_when_all_is_well(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--quiet") == 0
    assert capsys.readouterr() == ("", "")


def test_check_fails_what_does_not_fit(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.report = make_report(TOO_LARGE)
    assert check("--quiet") == 1
    assert "FAILED  fits" in capsys.readouterr().out


def test_plan_drift_is_told(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    store("report.json")
    plan = pipeline.report.plan
    pipeline.report = replace(pipeline.report, plan=replace(plan, decisions=plan.decisions[1:]))
    assert check("--against", "report.json") == 0
    assert "plan drift since report.json\n    - batch over data\n" in capsys.readouterr().out
    assert check("--against", "report.json", "--same-plan") == 1


# Stored reports


def test_update_stores_what_is_then_compared_with(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--against", "reports/a.json") == 2
    assert "reports/a.json: there is no such stored report\nhint: --update" in capsys.readouterr().err
    assert check("--against", "reports/a.json", "--update") == 0
    assert capsys.readouterr().err == "note: wrote reports/a.json\n"
    assert check("--against", "reports/a.json") == 0


def test_update_leaves_a_report_alone_that_says_the_same(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check("--against", "a.json", "--update") == 0
    before = Path("a.json").read_bytes()
    pipeline.report = replace(pipeline.report, timings={"load": 77.0})
    assert check("--against", "a.json", "--update") == 0
    assert Path("a.json").read_bytes() == before
    assert capsys.readouterr().err.endswith("note: a.json is up to date\n")


def test_update_stores_nothing_that_breaks_a_limit(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--against", "a.json", "--update", "--max-memory", "1GiB") == 1
    assert not Path("a.json").exists()
    assert "note: a.json was not written: the check failed" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["my notes", "[]", '{"schema": "toast.plan/1"}'])
def test_update_overwrites_reports_alone(pipeline: Pipeline, capsys: pytest.CaptureFixture[str], content: str) -> None:
    Path("a.json").write_text(content)
    assert check("--against", "a.json", "--update") == 2
    assert Path("a.json").read_text() == content and pipeline.requests == []
    assert "a.json: is not a report of toast's and is not overwritten" in capsys.readouterr().err
    Path("a.json").write_text('{"schema": "toast.report/0"}')
    assert check("--against", "a.json", "--update") == 0


# Outputs


def test_outputs_into_files(pipeline: Pipeline, stored: str, capsys: pytest.CaptureFixture[str]) -> None:
    forms = ("json=v.json", "junit=v.xml", "github=v.txt", "text")
    given = [text for form in forms for text in ("--output-format", form)]
    assert check("--against", stored, *given) == 1
    assert "FAILED" in capsys.readouterr().out
    facts = json.loads(Path("v.json").read_text())
    assert facts["schema"] == "toast.check/1" and facts["passed"] is False
    (point,) = facts["checks"]
    assert (point["program"], point["mesh"], point["status"]) == ("model.mlir", "v4-32", "failed")
    assert [one["name"] for one in point["checks"] if not one["passed"]] == ["step time kept"]
    suite = ElementTree.parse("v.xml").getroot().find("testsuite")
    assert suite is not None and suite.attrib.items() >= {("tests", "4"), ("failures", "1"), ("errors", "0")}
    (failure,) = suite.iter("failure")
    assert failure.attrib["message"].startswith("23.4 ms; allowed: 21.3 ms in the stored report")
    assert Path("v.txt").read_text() == (
        "::error file=model.mlir,title=toast check%3A step time kept::model.mlir on v4-32: step time kept 23.4 ms, "
        "allowed: 21.3 ms in the stored report (+10.0%25, tolerance 5.0%25)\n"
    )


def test_errors_in_outputs(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.error = InputError("bad \x01 one\nat all", where="model.mlir:3", hint="mend it")
    command = ("check", "model.mlir", "a,b.mlir", "--mesh", "v4-32", "--output-format")
    assert toast(*command, "junit") == 2
    root = ElementTree.fromstring(capsys.readouterr().out)
    assert [error.attrib["message"] for error in root.iter("error")] == ["model.mlir:3: bad ? one\nat all"] * 2
    assert toast(*command, "github") == 2
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith(
        "::error file=a%2Cb.mlir,title=toast check%3A cannot check::a,b.mlir on v4-32: model.mlir:3"
    )
    assert "one%0Aat all; mend it" in out[1]


def test_an_error_of_a_single_check_is_in_the_output_too(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline.error = InputError("bad one", where="model.mlir:3", hint="mend it")
    assert check() == 2
    assert capsys.readouterr() == ("", "error: model.mlir:3: bad one\nhint: mend it\n")
    assert check("--output-format", "json=v.json", "--output-format", "text") == 2
    (point,) = json.loads(Path("v.json").read_text())["checks"]
    assert (point["status"], point["error"], point["hint"]) == ("error", "model.mlir:3: bad one", "mend it")
    out, err = capsys.readouterr()
    assert "ERROR   model.mlir on v4-32: model.mlir:3: bad one" in out and err == ""


def test_drift_in_outputs(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    store("report.json")
    plan = pipeline.report.plan
    pipeline.report = replace(pipeline.report, plan=replace(plan, decisions=plan.decisions[1:]))
    assert check("--against", "report.json", "--output-format", "github") == 0
    out = capsys.readouterr().out
    assert (
        out.startswith("::warning file=model.mlir,title=toast check%3A plan drift::") and "%0A- batch over data" in out
    )


def test_json_on_stdout_is_json_alone(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--output-format", "json") == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True


BAD = [
    ("check - a --mesh v4-32", "stdin is one program of several", "save it"),
    ("check a b --mesh v4-32 --against r.json", "one stored report for several", "one at a time"),
    ("check a --mesh v4-32 --update", "--update needs a stored report", "--against FILE"),
    ("check a --mesh v4-32 --same-plan", "--same-plan needs", "--against FILE"),
    ("check a --mesh v4-32 --output-format xml", '--output-format: unknown word "xml"', "junit"),
    ("check a --mesh v4-32 --output-format json --output-format text", "json must be alone on stdout", "json=FILE"),
    ("check a --mesh v4-32 --output-format json=no/a", "there is no directory", "mkdir -p"),
]


@pytest.mark.parametrize(("command", "what", "hint"), BAD, ids=[command for command, *_ in BAD])
def test_bad_commands(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str], command: str, what: str, hint: str
) -> None:
    assert toast(*command.split()) == 2
    error, hinted = capsys.readouterr().err.splitlines()
    assert what in error and hint in hinted
    assert pipeline.requests == []


def test_the_recipes_are_commands_of_toast(pipeline: Pipeline) -> None:
    (hook,) = yaml.safe_load((HERE.parent / ".pre-commit-hooks.yaml").read_text())
    page = (HERE.parent / "docs/howto/ci.md").read_text()
    (job,) = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    (args,) = re.findall(r"args: \[(.*?)\]", page)
    runs = [step["run"] for step in job["jobs"]["check"]["steps"] if "run" in step]
    for entry in (f"{hook['entry']} {args.replace(',', '')}", *runs[1:]):
        command, *arguments = shlex.split(entry)
        assert command == "toast" and toast(*arguments) == 0
    for name in ("a/b.mlir", "b.mlirbc.zst"):
        assert re.search(hook["files"], name), name
    assert not re.search(hook["files"], "README.md")
