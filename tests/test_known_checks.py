"""Checks of which nothing has changed are not made again; whatever a verdict depends on makes it be made again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from checking import check, install_here, store, toast
from fake_pipeline import Pipeline
from report_sample import PREDICTED, make_report

from toast_cli.cli import check as check_points


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pipeline:
    monkeypatch.setenv("TOAST_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return install_here(monkeypatch, tmp_path)


def test_an_unchanged_check_is_not_made_again(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--max-step-time", "24ms") == 0
    first = capsys.readouterr()
    assert check("--max-step-time", "24ms") == 0
    second = capsys.readouterr()
    assert len(pipeline.requests) == 1
    assert first.out == second.out and "known from before" not in first.err
    assert "1 of 1 checks are known from before" in second.err


def test_a_failure_is_known_too(pipeline: Pipeline) -> None:
    assert check("--max-step-time", "1ms") == check("--max-step-time", "1ms") == 1
    assert len(pipeline.requests) == 1


def _program(_: pytest.MonkeyPatch) -> None:
    Path("model.mlir").write_text("module { }\n")


def _report(_: pytest.MonkeyPatch) -> None:
    store("report.json", PREDICTED.step_seconds * 1.01)


def _code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_points, "code_digest", lambda: b"other code")


def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_points, "_versions", lambda: ("other",))


def _setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOAST_MAX_OPERATIONS", "5")


@pytest.mark.parametrize("change", [_program, _report, _code, _library, _setting])
def test_what_a_verdict_depends_on(
    pipeline: Pipeline, change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    store("report.json")
    check("--against", "report.json")
    check("--against", "report.json")
    assert len(pipeline.requests) == 1
    change(monkeypatch)
    check("--against", "report.json")
    assert len(pipeline.requests) == 2


@pytest.mark.parametrize("options", ["--seed 1", "--max-memory 20GiB", "--mesh-shape data=16", "--pin x=data"])
def test_other_options_are_another_check(pipeline: Pipeline, options: str) -> None:
    check()
    check(*options.split())
    assert len(pipeline.requests) == 2


@pytest.mark.parametrize(
    "options",
    ["--budget 1s", "--confirm 1", "--verbose", "--update --against report.json", "--tactic own.yaml:mine:data"],
)
def test_what_depends_on_more_is_made_each_time(pipeline: Pipeline, options: str) -> None:
    check(*options.split())
    check(*options.split())
    assert len(pipeline.requests) == 2


def test_nothing_is_kept_where_that_is_switched_off(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOAST_CACHE", "off")
    check()
    check()
    assert len(pipeline.requests) == 2 and not Path("cache").exists()


def test_an_error_is_not_kept(pipeline: Pipeline) -> None:
    check("--against", "missing.json")
    store("missing.json")
    assert check("--against", "missing.json") == 0
    assert len(pipeline.requests) == 1


def test_a_damaged_answer_is_none(pipeline: Pipeline) -> None:
    check()
    for content in ("{", "[]", '{"program": "model.mlir"}', json.dumps({"checks": [{"other": 1}]}), "[" * 200_000):
        for path in Path("cache/toast/checked").glob("*.json"):
            path.write_text(content)
        assert check() == 0
    assert len(pipeline.requests) == 6


def test_of_several_only_the_changed_ones_are_made(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("a", "b", "c"):
        Path(f"{name}.mlir").write_text(f"module @{name} {{}}\n")
    names = ["a.mlir", "b.mlir", "c.mlir"]
    assert toast("check", *names, "--mesh", "v4-32") == 0
    first = capsys.readouterr().out
    Path("b.mlir").write_text("module @other {}\n")
    pipeline.report = replace(make_report(), timings={})
    assert toast("check", *names, "--mesh", "v4-32") == 0
    seen = capsys.readouterr()
    assert [request.program for request in pipeline.requests[3:]] == ["b.mlir"]
    assert seen.out == first and "2 of 3 checks are known from before" in seen.err
