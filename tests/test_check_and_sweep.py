"""`toast check` and `toast sweep` around a pipeline that is not run, and the worker processes of a sweep."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_pipeline import Pipeline, install
from report_sample import TOO_LARGE, make_report
from worker_jobs import job

from toast_cli.cli import main, workers
from toast_cli.cli import sweep as sweep_module
from toast_cli.errors import InputError, ToastError
from toast_cli.pipeline import Request


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pipeline:
    return install(monkeypatch, tmp_path)


def toast(*arguments: str) -> int:
    return main(arguments)


# Sweep


@pytest.fixture
def sweep_pipeline(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """A pipeline for sweeps, whose points run here instead of in worker processes."""

    def run_here(points: Sequence[Any], work: Callable[[Any], Any], jobs: int) -> Iterator[tuple[int, Any]]:
        for number, point in enumerate(points):
            try:
                yield number, work(point)
            except ToastError as error:
                yield number, workers.Failure(str(error))

    def partition(request: Request, tell: Callable[..., None] | None = None) -> Pipeline:
        if request.mesh_shape == "data=16":
            pipeline.error = InputError("does not divide", where="model.mlir")
        else:
            pipeline.error = None
        axes = dict(part.split("=") for part in (request.mesh_shape or "data=8,model=2").split(","))
        sizes = {axis: int(size) for axis, size in axes.items()}
        report = pipeline.report
        predicted = replace(report.predicted, step_seconds=0.02 + 0.001 * sizes["data"])
        pipeline.report = replace(report, predicted=predicted, mesh=replace(report.mesh, axes=sizes))
        return pipeline.partition(request, tell)

    monkeypatch.setattr(sweep_module, "run_all", run_here)
    monkeypatch.setattr("toast_cli.pipeline.partition", partition)
    return pipeline


def test_sweep_tabulates_all_shapes(sweep_pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert toast("sweep", "model.mlir", "--mesh", "v4-32", "--shapes", "all", "--csv", "table.csv") == 0
    assert [request.mesh_shape for request in sweep_pipeline.requests] == [
        "data=16",
        "data=8,model=2",
        "data=4,model=4",
        "data=2,model=8",
    ]
    lines = capsys.readouterr().out.splitlines()
    assert "failed: model.mlir: does not divide" in lines[1]
    assert [line.startswith("★") for line in lines if "data=" in line] == [False, False, False, True]
    rows = Path("table.csv").read_text().splitlines()
    assert len(rows) == 5 and rows[4].endswith("true")


def test_sweep_over_programs_and_meshes(sweep_pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.mlir").write_text("")
    command = "sweep model.mlir other.mlir --mesh v4-32 --mesh nowhere.yaml --shapes all --json - --quiet"
    assert toast(*command.split()) == 0
    out, err = capsys.readouterr()
    points = json.loads(out)["points"]
    assert len(points) == 10 and err == ""
    assert [point["status"] for point in points].count("failed") == 4
    assert [point["program"] for point in points if point["best"]] == ["model.mlir", "other.mlir"]


def test_sweep_over_given_shapes_quietly(sweep_pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert toast("sweep", "model.mlir", "--mesh", "v4-32", "--shapes", "data=8,model=2; data=4,model=4", "--quiet") == 0
    assert capsys.readouterr().out.startswith("model.mlir: v4-32 data=4,model=4, 24.0 ms a step, 12.1 GiB; batch over")


def test_sweep_where_nothing_fits(sweep_pipeline: Pipeline) -> None:
    sweep_pipeline.report = make_report(TOO_LARGE)
    assert toast("sweep", "model.mlir", "--mesh", "v4-32") == 3


def test_sweep_where_everything_fails(sweep_pipeline: Pipeline) -> None:
    assert toast("sweep", "model.mlir", "--mesh", "v4-32", "--shapes", "data=16") == 2


def test_an_interrupted_sweep_keeps_what_is_done(
    sweep_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here = sweep_module.run_all

    def interrupted(points: Sequence[Any], work: Callable[[Any], Any], jobs: int) -> Iterator[tuple[int, Any]]:
        yield from run_here(points[1:3], work, jobs)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_module, "run_all", interrupted)
    assert toast("sweep", "model.mlir", "--mesh", "v4-32", "--shapes", "all") == 130
    out, err = capsys.readouterr()
    assert out.count("data=") == 2
    assert err == "note: interrupted: 2 of 4 points are done\n"


def test_workers_run_in_parallel_and_survive_each_other() -> None:
    items = ["one", "bad input", "bug", "exit", "killed", "two"]
    done = dict(workers.run_all(items, job, jobs=3))
    assert [done[number] for number in range(len(items))] == [
        "ONE",
        workers.Failure("model.mlir: no such file"),
        workers.Failure("internal error: KeyError: 'x'"),
        workers.Failure("the process died (exit code 7)"),
        workers.Failure("the process died (SIGKILL)"),
        "TWO",
    ]


def test_workers_end_when_the_caller_stops() -> None:
    running = workers.run_all(["one", "slow", "slow"], job, jobs=2)
    assert next(running) == (0, "ONE")
    running.close()
