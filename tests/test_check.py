"""`toast check` around a pipeline that is not run: demands, project files, stored reports, outputs, exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from fake_pipeline import Pipeline, install
from report_sample import PREDICTED, TOO_LARGE, make_report

from toast_cli.cli import check as check_module
from toast_cli.cli import main, workers
from toast_cli.cli.project import find_project, program_name, read_project
from toast_cli.errors import InputError, ToastError
from toast_cli.pipeline import Request

HERE = Path(__file__).parent


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pipeline:
    """Points of a project run here instead of in worker processes."""

    def run_here(points: Sequence[Any], work: Callable[[Any], Any], jobs: int) -> Iterator[tuple[int, Any]]:
        for number, point in reversed(list(enumerate(points))):
            try:
                yield number, work(point)
            except ToastError as error:
                yield number, workers.failure_of(error)

    monkeypatch.setattr(check_module, "run_all", run_here)
    return install(monkeypatch, tmp_path)


def toast(*arguments: str) -> int:
    return main(arguments)


def check(*arguments: str) -> int:
    return toast("check", "model.mlir", "--mesh", "v4-32", *arguments)


def store(path: str, step_seconds: float = PREDICTED.step_seconds) -> None:
    report = make_report(replace(PREDICTED, step_seconds=step_seconds))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(report.to_json()))


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


def test_check_says_what_failed(pipeline: Pipeline, stored: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--max-memory", "13GiB", "--against", stored) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[2:] == [
        "                            predicted  allowed",
        "ok      fits                 12.1 GiB  30.8 GiB usable on each device",
        "ok      memory               12.1 GiB  13.0 GiB by max-memory",
        "ok      memory kept          12.1 GiB  12.1 GiB in the stored report (+0.0%, tolerance 5.0%)",
        "FAILED  step time kept        23.4 ms  21.3 ms in the stored report (+10.0%, tolerance 5.0%)",
        "ok      communication kept    8.20 ms  8.20 ms in the stored report (+0.0%, tolerance 5.0%)",
    ]


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
    assert "plan drift since report.json\n  - batch over data\n" in capsys.readouterr().out
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
    assert "a.json: is no report of toast's and is not overwritten" in capsys.readouterr().err
    Path("a.json").write_text('{"schema": "toast.report/0"}')
    assert check("--against", "a.json", "--update") == 0


# Project files


TOML = """
[tool.toast]
mesh = "v4-32"
against = "reports/{program}.{mesh}.json"
seed = 3

[[tool.toast.checks]]
program = "models/*.mlir"
max-memory = "13GiB"

[[tool.toast.checks]]
program = "model.mlir"
mesh = ["v4-32", "own.yaml"]
against = "reports/{program}.{mesh}.{shape}.json"
mesh_shape = "data=4,model=4"
max-step-time = 0.1
iterations = 5
pin = "*=?"
"""
YAML = """
mesh: v4-32
checks:
  - program: [model.mlir, models/a.mlir]
    max-step-time: 23ms
"""


@pytest.fixture
def project(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    for name in ("models/b.mlir.zst", "models/a.mlir", "models/c.mlir", "own.yaml", "deep/down/x"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("")
    Path("own.yaml").write_text("chip: v4\ntopology: {torus: [2, 2, 4]}\n")
    Path("pyproject.toml").write_text(TOML)
    return pipeline


def test_a_project_lists_programs_meshes_and_options(project: Pipeline) -> None:
    assert toast("check", "--update") == 0
    shared = {"seed": 3, "search": "mcts"}
    shaped = {"mesh_shape": "data=4,model=4", "iterations": 5, "pins": ("*=?",)}
    assert sorted(project.requests, key=lambda request: (request.program, request.mesh)) == [
        Request("model.mlir", "own.yaml", **shaped, **shared),
        Request("model.mlir", "v4-32", **shaped, **shared),
        Request("models/a.mlir", "v4-32", **shared),
        Request("models/c.mlir", "v4-32", **shared),
    ]
    assert sorted(path.name for path in Path("reports").iterdir()) == [
        "a.v4-32.json",
        "c.v4-32.json",
        "model.own.data4-model4.json",
        "model.v4-32.data4-model4.json",
    ]


def test_a_project_is_found_from_below(project: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path.cwd()
    monkeypatch.chdir("deep/down")
    Path("pyproject.toml").write_text("[tool.other]\n")
    assert find_project(Path.cwd()) == root / "pyproject.toml"
    assert toast("check", "--update") == 0
    assert {request.program for request in project.requests} == {
        "../../model.mlir",
        "../../models/a.mlir",
        "../../models/c.mlir",
    }
    (root / "toast.yaml").write_text(YAML)
    assert find_project(Path.cwd()) == root / "toast.yaml"


def test_programs_choose_from_the_project(project: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    Path("toast.yaml").write_text(YAML)
    assert toast("check", "models/a.mlir", "--max-step-time", "1s", "--seed", "0") == 0
    assert project.requests == [Request("models/a.mlir", "v4-32")]
    assert toast("check", "models/c.mlir") == 2
    assert "models/c.mlir: " in capsys.readouterr().err


def test_what_a_project_says(project: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert toast("check", "--update") == 0
    store("reports/model.v4-32.data4-model4.json", 0.02)
    Path("reports/c.v4-32.json").unlink()
    capsys.readouterr()
    assert toast("check") == 2
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert [line[:6].strip() for line in lines if line[:1].strip()] == ["ok", "ERROR", "FAILED", "ok", "4 chec"]
    assert "ERROR   models/c.mlir on v4-32: reports/c.v4-32.json: there is no such stored report" in lines
    assert "        hint: --update (or `toast partition --json FILE`) makes it" in lines
    assert any("FAILED  step time kept" in line for line in lines)
    assert lines[-1] == "4 checks: 2 passed, 1 failed, 1 could not be made"


WRONG_PROJECTS = [
    ("", "toast.yaml: is no mapping", "docs/ci.md"),
    ("checks: [", "toast.yaml:1:10: not valid YAML", ""),
    ("mesh: v4-32\n", "toast.yaml: has no list of checks", "docs/ci.md"),
    ("checks: [{mesh: v4-32}]", "toast.yaml: checks[0]: names no program", "program: …"),
    ("checks: [{program: model.mlir}]", "toast.yaml: checks[0]: names no mesh", "mesh: …"),
    ("mesh: x\nchecks: [{program: '*.onnx'}]", 'checks[0]: no file matches "*.onnx"', "relative to"),
    ("mesh: x\nchecks: [{program: m, max-mem: 1}]", 'unknown key "max-mem"', 'did you mean "max-memory"?'),
    ("mesh: x\nchecks: [{program: m, max-memory: [1]}]", "max-memory is [1], not a text", ""),
    ("mesh: x\nchecks: [{program: m, max-memory: 1G}]", 'checks[0]: max-memory: "1G" is not', "GiB"),
    ("mesh: x\nchecks: [{program: m, search: best}]", 'checks[0]: search: unknown word "best"', "mcts"),
    ("mesh: x\nchecks: [{program: m, seed: first}]", "seed is 'first', not a whole number", ""),
    ("mesh: x\nchecks: [{program: m, against: '{p}.json'}]", 'cannot fill in "{p}.json"', "{program}"),
    ("mesh: x\nagainst: r.json\nchecks: [{program: [m, n]}]", "two checks have the stored report r.json", "{program}"),
]


@pytest.mark.parametrize(("text", "what", "hint"), WRONG_PROJECTS)
def test_wrong_projects(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str], text: str, what: str, hint: str
) -> None:
    Path("toast.yaml").write_text(text)
    assert toast("check") == 2
    err = capsys.readouterr().err
    assert what in err.splitlines()[0] and hint in err.splitlines()[-1]


def test_wrong_toml(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    Path("pyproject.toml").write_text("[tool.toast\n")
    assert toast("check") == 2
    assert "pyproject.toml: not valid TOML" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "name"), [("a/train.mlirbc.zst", "train"), ("v1.2.mlir", "v1.2"), ("plain", "plain"), (".zst", ".zst")]
)
def test_program_names(path: str, name: str) -> None:
    assert program_name(Path(path)) == name


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
    Path("toast.yaml").write_text("mesh: v4-32\nchecks: [{program: [model.mlir, 'a,b.mlir']}]\n")
    pipeline.error = InputError("bad \x01 one\nat all", where="model.mlir:3", hint="mend it")
    assert toast("check", "--output-format", "junit") == 2
    root = ElementTree.fromstring(capsys.readouterr().out)
    assert [error.attrib["message"] for error in root.iter("error")] == ["model.mlir:3: bad ? one\nat all"] * 2
    assert toast("check", "--output-format", "github") == 2
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
    ("check", "no --mesh is given and there is no project file", "toast.yaml"),
    ("check model.mlir", "no --mesh is given and there is no project file", "--mesh SPEC"),
    ("check --mesh v4-32", "no PROGRAM is given", "project file"),
    ("check - a --mesh v4-32", "stdin is one program of several", "save it"),
    ("check model.mlir --mesh v4-32 --config a", "both --config and --mesh", "its meshes"),
    ("check --config none.yaml", "--config: none.yaml: no such file", "docs/ci.md"),
    ("check a b --mesh v4-32 --against r.json", "one stored report for several", "project file"),
    ("check a --mesh v4-32 --update", "--update writes a stored report", "--against FILE"),
    ("check a --mesh v4-32 --same-plan", "--same-plan compares", "--against FILE"),
    ("check a --against r.json", "--against: is for one program", "give --mesh"),
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


# Recipes in the documentation


def blocks(language: str) -> list[str]:
    text = (HERE.parent / "docs" / "ci.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_project_files_of_the_documentation_mean_the_same(pipeline: Pipeline) -> None:
    for name in ("models/train.mlirbc.zst", "models/decode_a.mlir", "models/decode_b.mlir", "specs/our-pod.yaml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("")
    Path("toast.yaml").write_text(blocks("yaml")[0])
    Path("pyproject.toml").write_text(blocks("toml")[0])
    entries = [
        [replace(entry, place="") for entry in read_project(Path(name), {})]
        for name in ("toast.yaml", "pyproject.toml")
    ]
    assert entries[0] == entries[1] and len(entries[0]) == 4
    assert entries[0][1].options["against"] == "reports/train.our-pod.json"
    assert entries[0][3].options == {
        "mesh-shape": "model=8",
        "memory-tolerance": "1%",
        "tolerance": "3%",
        "against": "reports/decode_b.h100-8.json",
    }


def test_the_recipes_are_commands_of_toast(pipeline: Pipeline) -> None:
    hooks = yaml.safe_load((HERE.parent / ".pre-commit-hooks.yaml").read_text())
    job, _, local = (yaml.safe_load(block) for block in blocks("yaml")[1:])
    runs = [step["run"] for step in job["jobs"]["check"]["steps"] if "run" in step]
    entries = [hooks[0]["entry"], local["repos"][0]["hooks"][0]["entry"], *runs[1:]]
    Path("toast.yaml").write_text("checks: [{program: model.mlir, mesh: v4-32, against: r.json}]\n")
    assert toast("check", "--update") == 0
    for entry in entries:
        command, *arguments = entry.split()
        assert command == "toast" and toast(*arguments) == 0
    for name in ("a/b.mlir", "b.mlirbc.zst", "toast.yaml", "sub/pyproject.toml"):
        assert re.search(hooks[0]["files"], name), name
    assert not re.search(hooks[0]["files"], "README.md")


# For real


def test_a_project_for_real(tmp_path: Path) -> None:
    sample = HERE.parent / "sample_models" / "mlp_tiny.mlir"
    (tmp_path / "pyproject.toml").write_text(
        "[tool.toast]\niterations = 20\nagainst = '{program}.{mesh}.json'\n"
        f"[[tool.toast.checks]]\nprogram = '{sample}'\nmesh = ['v4-32', 'v5e-16']\n"
        "[[tool.toast.checks]]\nprogram = 'none.mlir'\nmesh = 'v4-32'\n"
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "toast_cli", "check", *arguments]
        return subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)

    stored = run(str(sample), "--update", "--jobs", "2")
    assert stored.returncode == 0, stored.stderr
    assert {path.name for path in tmp_path.glob("*.json")} == {"mlp_tiny.v4-32.json", "mlp_tiny.v5e-16.json"}
    checked = run("--jobs", "3", "--output-format", "json")
    assert checked.returncode == 2, checked.stderr
    facts = json.loads(checked.stdout)["checks"]
    assert [point["status"] for point in facts] == ["passed", "passed", "error"]
    assert facts[0]["drift"] == facts[1]["drift"] == []
    assert "there is no such stored report" in facts[2]["error"]
