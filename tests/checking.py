"""`toast check` around a pipeline that is not run, for the tests of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_pipeline import Pipeline, install
from report_sample import PREDICTED, make_report

from toast_cli.base.errors import ToastError
from toast_cli.cli import check as check_module
from toast_cli.cli import main, running


def install_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pipeline:
    """Several points run here instead of in worker processes."""

    def run_here(points: Sequence[Any], work: Callable[[Any], Any], jobs: int) -> Iterator[tuple[int, Any]]:
        for number, point in reversed(list(enumerate(points))):
            try:
                yield number, work(point)
            except ToastError as error:
                yield number, running.failure_of(error)

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
