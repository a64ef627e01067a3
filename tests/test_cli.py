"""The command line around a pipeline that is not run: options, outputs, exit codes, errors, help."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_pipeline import Pipeline, install
from report_sample import TOO_LARGE, make_report

from toast_cli.base.errors import InputError, UsageError
from toast_cli.cli import main, running
from toast_cli.cli.options import complete_spec, parse_fraction
from toast_cli.request import Request, seconds_or_none

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
make_readme = importlib.import_module("make_readme")
LINE = "tiny_train on v4-32: 23.4 ms a step, 12.1 GiB of 30.8 GiB; data (8): FSDP; model (2): tensor-parallel "


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pipeline:
    return install(monkeypatch, tmp_path)


def toast(*arguments: str) -> int:
    return main(arguments)


def partition(*arguments: str) -> int:
    return toast("partition", "model.mlir", "--mesh", "v4-32", *arguments)


# Help


@pytest.mark.parametrize(
    ("incomplete", "found"), [("v4", ["v4-32", "v4-128"]), ("h100-", ["h100-8", "h100-64"]), ("x", [])]
)
def test_specifications_complete(incomplete: str, found: list[str]) -> None:
    assert complete_spec(incomplete) == found


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("toast par", ["partition"]),
        ("toast partition x --mesh v4-3", ["v4-32"]),
        ("toast check x --output-f", ["--output-format"]),
        ("toast partition mod", []),  # the shell's own: files
    ],
)
def test_shells_are_offered(words: str, offered: list[str]) -> None:
    asked = {"_TOAST_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    command = [sys.executable, "-m", "toast_cli"]
    found = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, **asked})
    assert found.stdout.split() == offered


def test_help_loads_nothing_heavy() -> None:
    script = "import sys; from toast_cli.cli import main; main(['--help']); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    loaded = set(found.stdout.splitlines()[-1].split())
    assert loaded & {"jax", "jaxlib", "numpy", "rich", "yaml", "zstandard", "toast_cli.pipeline"} == set()


def test_partitioning_loads_nothing_that_asks_compilers() -> None:
    script = "import sys, toast_cli.cli.partition, toast_cli.pipeline, toast_cli.emit; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    loaded = found.stdout.split()
    assert [name for name in loaded if name.startswith("toast_cli.ask_xla.")] == [] and "toast_cli.pipeline" in loaded


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert toast("--version") == 0
    assert re.fullmatch(
        r"toast \d+\.\d+\.\d+\njaxlib \d+\.\d+\.\d+\S*\nStableHLO \d+\.\d+\.\d+\n", capsys.readouterr().out
    )


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert toast() == 2
    assert "Commands:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", "partition", "check", "sweep", "verify", "compare", "explain"])
def test_every_option_has_a_line_of_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert toast(*command.split(), "--help") == 0
    options = capsys.readouterr().out.split("\nOptions:\n")[1]
    entries = re.findall(r"^  (-\S.*?)(?:  +|\n +)(\S.*)", options, re.MULTILINE)
    assert entries and all(words[0].isupper() for _, words in entries), entries


def test_the_readme_has_a_block_for_the_first_run() -> None:
    readme = make_readme.README.read_text(encoding="utf-8")
    written = make_readme.with_first_run(readme, "program    a report")
    assert "<!-- first run -->\n```\nprogram    a report\n```\n" in written
    assert len(readme.splitlines()) <= 150
    with pytest.raises(ValueError, match="first run"):
        make_readme.with_first_run("# toast", "")


# Partition


def test_report_on_stdout(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert partition() == 0
    out, err = capsys.readouterr()
    assert out.startswith("program    tiny_train") and err == ""
    assert out.endswith("\nnothing written; -o OUT writes the sharded program\n")
    assert pipeline.emitted == []


def test_options_reach_the_pipeline(pipeline: Pipeline) -> None:
    given = (
        "--mesh-shape data=4,model=4 --effort high --budget 1.5s --iterations 9 --seed 3 "
        "--memory-limit 28GiB --keep-shardings --pin .*/w=data,None --pin b=None"
    )
    assert partition(*given.split()) == 0
    assert pipeline.requests == [
        Request(
            program="model.mlir",
            mesh="v4-32",
            mesh_shape="data=4,model=4",
            effort="high",
            budget_seconds=1.5,
            iterations=9,
            seed=3,
            memory_limit=28 * 2**30,
            keep_shardings=True,
            pins=(".*/w=data,None", "b=None"),
        )
    ]


def test_quiet_is_one_line(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert partition("--quiet", "-o", "out.hlo") == 0
    out, err = capsys.readouterr()
    assert out.startswith(LINE) and out.count("\n") == 1 and err == ""


def test_verbose_shows_more(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert partition("--verbose") == 0
    assert "\ndimensions, 8 kinds" in capsys.readouterr().out


def test_the_program_is_written(pipeline: Pipeline, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert partition("-o", "out.hlo", "--json", "report.json") == 0
    assert Path("out.hlo").read_text() == "program as hlo\n"
    assert json.loads(Path("report.json").read_text())["schema"] == "toast.report/1"
    assert capsys.readouterr().out.endswith("\nwrote out.hlo (hlo)\n")
    assert partition("-o", "shardings.py") == 0
    assert "shardings of arguments and results only" in capsys.readouterr().out
    Path("shardings.py").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.mlir", "out.hlo", "report.json"]


def test_what_does_not_fit_is_not_written(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.report = make_report(TOO_LARGE)
    Path("out.mlir").write_text("an older one")
    assert partition("-o", "out.mlir", "--json", "report.json") == 3
    assert Path("out.mlir").read_text() == "an older one" and pipeline.emitted == []
    assert json.loads(Path("report.json").read_text())["predicted"]["fits"] is False
    out = capsys.readouterr().out
    assert "does not fit: the smallest-memory plan found needs 45.2 GiB" in out and "alive at the peak" in out
    assert out.endswith("\nout.mlir was not written: the plan does not fit\n")


def test_annotate_reaches_the_pipeline(pipeline: Pipeline) -> None:
    assert partition("-o", "a.mlir") == partition("-o", "b.mlirbc", "--annotate", "full") == 0
    assert pipeline.annotated == ["minimal", "full"]


def test_annotate_is_for_stablehlo(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert partition("-o", "a.hlo", "--format", "hlo", "--annotate", "full") == 2
    err = capsys.readouterr().err
    assert "--annotate: hlo has no constraints to choose" in err and "--format stablehlo" in err
    assert pipeline.requests == []


def test_program_on_stdout_report_on_stderr(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert partition("-o", "-") == 0
    out, err = capsys.readouterr()
    assert out == "program as stablehlo\n" and err.startswith("program    tiny_train")


def test_quiet_json_on_stdout_is_json_alone(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert partition("--quiet", "--json", "-") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["program"]["name"] == "tiny_train" and err == ""


def test_quiet_still_says_that_it_does_not_fit(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.report = make_report(TOO_LARGE)
    assert partition("--quiet", "-o", "-") == 3
    out, err = capsys.readouterr()
    assert out == "" and "DOES NOT FIT" in err and err.count("\n") == 1


# Errors


BAD_COMMANDS = [
    ("partition", "missing argument 'PROGRAM'", "toast partition --help"),
    ("partition model.mlir", "missing option '--mesh'", "toast partition --help"),
    ("partition model.mlir --mesh v4-32 --bugdet 3", "no such option: --bugdet", "toast partition --help"),
    ("partition model.mlir --mesh v4-32 --effort best", '--effort: unknown word "best"', "choose from medium"),
    ("partition model.mlir --mesh v4-32 --effort hihg", '--effort: unknown word "hihg"', 'did you mean "high"?'),
    ("partition model.mlir --mesh v4-32 --iterations 0", "--iterations: 0 is too small", "give 1 or more"),
    ("partition model.mlir --mesh v4-32 --seed x", '--seed: "x" is not a whole number', "give 0 or more"),
    ("verify model.mlir --compiler best", '--compiler: unknown word "best"', "choose from cpu, tpu"),
    ("partition model.mlir --mesh v4-32 --effort hihg", '--effort: unknown word "hihg"', 'did you mean "high"?'),
    ("partition model.mlir --mesh v4-32 --quiet --verbose", "both --quiet and --verbose", "choose one"),
    ("partition model.mlir --mesh v4-32 --budget soon", '--budget: "soon" is not a time', "0.5 ms"),
    ("partition model.mlir --mesh v4-32 --budget 0", "--budget: 0 is not a time above 0", "more than 0 seconds"),
    ("partition model.mlir --mesh v4-32 --memory-limit 28G", '--memory-limit: "28G" is not', "GiB"),
    (
        "partition model.mlir --mesh v4-32 -o out.xyz",
        'out.xyz: the extension ".xyz" names no output format',
        "--format",
    ),
    ("partition model.mlir --mesh v4-32 -o out", "out: no extension to tell the output format by", "--format"),
    ("partition model.mlir --mesh v4-32 -o no/out.mlir", "-o: there is no directory", "mkdir -p"),
    ("partition model.mlir --mesh v4-32 --json .", "--json: is a directory", "give a file"),
    ("partition model.mlir --mesh v4-32 -o model.mlir", "-o: model.mlir is the input itself", "another file"),
    (
        "partition model.mlir --mesh v4-32 --json ./model.mlir",
        "--json: ./model.mlir is the input itself",
        "another file",
    ),
    (
        "partition model.mlir --mesh v4-32 -o a.json --json ./a.json",
        "-o and --json both write to ./a.json",
        "two files",
    ),
    ("partition model.mlir --mesh v4-32 -o - --json -", "-o and --json both write to -", "two files"),
    ("check model.mlir --mesh v4-32 --tolerance 5%", "--tolerance needs a stored report", "--against FILE"),
    ("check model.mlir --mesh v4-32 --max-step-time 3d", '--max-step-time: "3d" is not a time', "ms"),
    ("check model.mlir --mesh v4-32 --max-memory lots", '--max-memory: "lots" is not', "28GiB"),
    ("check model.mlir --mesh v4-32 --against model.mlir", "model.mlir:1:1: is not JSON", "--json FILE"),
    ("sweep - --mesh v4-32", "not from stdin", "save it"),
    ("sweep model.mlir --mesh v4-32 --mesh-shape data=x", '"data=x" is not an axis', "data=8,model=2"),
    ("sweep model.mlir --mesh v4-32 --mesh-shape=", '--mesh-shape: "" is not an axis', "data=8,model=2"),
    ("mesh validate no.yaml", "no.yaml: no such file", "toast mesh show"),
    ("mesh show v4-33", 'no mesh specification "v4-33"', "v4-32"),
    ("repartition", "no such command 'repartition'", "toast --help"),
]


@pytest.mark.parametrize(("command", "what", "hint"), BAD_COMMANDS, ids=[command for command, *_ in BAD_COMMANDS])
def test_bad_commands(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str], command: str, what: str, hint: str
) -> None:
    assert toast(*command.split()) == 2
    out, err = capsys.readouterr()
    error, hinted = err.splitlines()
    assert out == "" and error.startswith("error: ") and what in error
    assert hinted.startswith("hint: ") and hint in hinted
    assert pipeline.requests == []


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (
            InputError("unknown dtype", where="model.mlir:3:4", hint="use f32"),
            2,
            "error: model.mlir:3:4: unknown dtype\nhint: use f32\n",
        ),
        (UsageError("no"), 2, "error: no\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_from_the_pipeline(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, expected: str
) -> None:
    pipeline.error = error
    assert partition("-o", "out.mlir") == code
    assert capsys.readouterr().err == expected
    assert not Path("out.mlir").exists()


@pytest.mark.parametrize("debug", [None, "--verbose", "TOAST_DEBUG"])
def test_internal_errors(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, debug: str | None
) -> None:
    pipeline.error = KeyError("x")
    if debug == "TOAST_DEBUG":
        monkeypatch.setenv(debug, "1")
    assert partition(*(["--verbose"] if debug == "--verbose" else [])) == 70
    err = capsys.readouterr().err
    assert ("Traceback" in err) == (debug is not None)
    assert re.search(r"^error: internal error: KeyError: 'x' at fake_pipeline.py:\d+$", err, re.MULTILINE)
    assert "please report it" in err.splitlines()[-1]


# Values


@pytest.mark.parametrize(
    ("text", "expected"), [("5%", 0.05), ("0.05", 0.05), ("0", 0.0), ("1", 1.0), ("150 %", 1.5), (" 5%", 0.05)]
)
def test_parse_fraction(text: str, expected: float) -> None:
    assert parse_fraction(text, "--tolerance") == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "%", "five", "-1%", "5", "nan", "inf%"])
def test_what_is_no_percentage(text: str) -> None:
    with pytest.raises(UsageError, match="--tolerance"):
        parse_fraction(text, "--tolerance")


@pytest.mark.parametrize(
    ("text", "expected"), [("120ms", 0.12), ("1.5s", 1.5), ("2", 2.0), ("800 us", 8e-4), (None, None)]
)
def test_seconds(text: str | None, expected: float | None) -> None:
    assert seconds_or_none(text, "--budget") == (None if expected is None else pytest.approx(expected))


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert partition() == 0
    shown = terminal.getvalue()
    assert "search" in shown and "best 23.4 ms, 1,234 evaluations" in shown


@pytest.mark.parametrize(("total", "last"), [(2, "2 of 2 points"), (0, "0 of 0 points")])
def test_points_are_counted_also_where_none_is_left(total: int, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(running.counted(range(total), total, "points", wanted=True)) == list(range(total))
    assert last in terminal.getvalue()


@pytest.mark.parametrize("quiet", [True, False])
def test_no_progress_elsewhere(pipeline: Pipeline, capsys: pytest.CaptureFixture[str], quiet: bool) -> None:
    with running.progress_line(wanted=not quiet) as tell:
        assert tell is None
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("best", "evaluations", "expected"),
    [(0.0234, 1234, "best 23.4 ms, 1,234 evaluations"), (float("inf"), 7, "7 evaluations"), (float("inf"), 0, "")],
)
def test_search_facts(best: float, evaluations: int, expected: str) -> None:
    assert running.search_facts(best, evaluations) == expected
