"""`toast check` around a pipeline that is not run: project files, and what the documentation says of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from checking import install_here, store, toast
from fake_pipeline import Pipeline

from toast_cli.cli.project import find_project, program_name, read_project
from toast_cli.request import Request

HERE = Path(__file__).parent


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pipeline:
    return install_here(monkeypatch, tmp_path)


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
    shared = {"seed": 3}
    shaped = {"mesh_shape": "data=4,model=4", "iterations": 5, "pins": ("*=?",)}
    bounded = {"subject_to": ("peak_memory<=13GiB",)}  # max-memory bounds the search
    assert sorted(project.requests, key=lambda request: (request.program, request.mesh)) == [
        Request("model.mlir", "own.yaml", **shaped, **shared),
        Request("model.mlir", "v4-32", **shaped, **shared),
        Request("models/a.mlir", "v4-32", **bounded, **shared),
        Request("models/c.mlir", "v4-32", **bounded, **shared),
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
    ("", "toast.yaml: is not a mapping", "docs/howto/ci.md"),
    ("checks: [", "toast.yaml:1:10: not valid YAML", ""),
    ("mesh: v4-32\n", "toast.yaml: has no list of checks", "docs/howto/ci.md"),
    ("checks: [{mesh: v4-32}]", "toast.yaml: checks[0]: names no program", "program: …"),
    ("checks: [{program: model.mlir}]", "toast.yaml: checks[0]: names no mesh", "mesh: …"),
    ("mesh: x\nchecks: [{program: '*.onnx'}]", 'checks[0]: no file matches "*.onnx"', "relative to"),
    ("mesh: x\nchecks: [{program: '/*.mlir'}]", 'the pattern "/*.mlir" is absolute', "relative to"),
    ("mesh: x\nchecks: [{program: m, max-mem: 1}]", 'unknown key "max-mem"', 'did you mean "max-memory"?'),
    ("mesh: x\nchecks: [{program: m, max-memory: [1]}]", "max-memory is [1], not a text", ""),
    ("mesh: x\nchecks: [{program: m, max-memory: 1G}]", 'checks[0]: max-memory: "1G" is not', "GiB"),
    ("mesh: x\nchecks: [{program: m, effort: best}]", 'checks[0]: effort: unknown word "best"', "medium"),
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


# Recipes in the documentation


def blocks(language: str) -> list[str]:
    text = (HERE.parent / "docs" / "howto" / "ci.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def toml_lines(facts: dict[str, object], between: str = "\n") -> str:
    """Text and lists of text as TOML, in which they are written as in JSON."""
    return between.join(f"{key} = {json.dumps(value)}" for key, value in facts.items())


def test_the_project_files_of_the_documentation_mean_the_same(pipeline: Pipeline) -> None:
    for name in ("models/train.mlirbc.zst", "models/decode_a.mlir", "models/decode_b.mlir", "specs/our-pod.yaml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("")
    Path("toast.yaml").write_text(blocks("yaml")[0])
    facts = yaml.safe_load(blocks("yaml")[0])
    checks = ", ".join("{" + toml_lines(one, ", ") + "}" for one in facts.pop("checks"))
    Path("pyproject.toml").write_text(f"[tool.toast]\n{toml_lines(facts)}\nchecks = [{checks}]\n")
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
    (job,) = (yaml.safe_load(block) for block in blocks("yaml")[1:])
    runs = [step["run"] for step in job["jobs"]["check"]["steps"] if "run" in step]
    entries = [hooks[0]["entry"], f"{hooks[0]['entry']} --update", *runs[1:]]
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
