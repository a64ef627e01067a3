"""`toast sweep` around a pipeline that is not run: points, tables, results it goes on from, its worker processes."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_pipeline import Pipeline, install
from report_sample import TOO_LARGE, make_report
from worker_jobs import Counter, job

from toast_cli import pipeline as pipeline_module
from toast_cli.base.errors import InputError, ToastError, UsageError
from toast_cli.cli import main
from toast_cli.cli import running as workers
from toast_cli.cli import sweep as sweep_module
from toast_cli.cli.sweep import open_log, parse_seeds, points_of, sizes_of
from toast_cli.report import command_tables, style
from toast_cli.report.command_tables import SweepRow, ranked
from toast_cli.request import Request


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pipeline:
    return install(monkeypatch, tmp_path)


def toast(*arguments: str) -> int:
    return main(arguments)


# Sweep


@pytest.fixture
def sweep_pipeline(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """A pipeline for sweeps, whose points run here instead of in worker processes."""

    def run_here(points: Sequence[Any], work: Any, jobs: int, chains: Any) -> Iterator[tuple[int, Any]]:
        runner = work()
        for number, point in enumerate(points):
            try:
                yield number, runner(point)
            except ToastError as error:
                yield number, workers.failure_of(error)

    def partition(request: Request, tell: Callable[..., None] | None = None, **_: Any) -> Pipeline:
        if request.mesh_shape == "data=16":
            pipeline.error = InputError("does not divide", where="model.mlir")
        else:
            pipeline.error = None
        axes = dict(part.split("=") for part in (request.mesh_shape or "data=8,model=2").split(","))
        sizes = {axis: int(size) for axis, size in axes.items()}
        report = pipeline.report
        limit = request.memory_limit or report.predicted.limit_bytes
        predicted = replace(report.predicted, step_seconds=0.02 + 0.001 * sizes["data"], limit_bytes=limit)
        search = replace(report.search, seed=request.seed)
        pipeline.report = replace(report, predicted=predicted, mesh=replace(report.mesh, axes=sizes), search=search)
        return pipeline.partition(request, tell)

    monkeypatch.setattr(sweep_module, "run_all", run_here)
    monkeypatch.setattr("toast_cli.pipeline.plan_given", partition)
    return pipeline


def test_sweep_tabulates_all_shapes(sweep_pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert toast("sweep", "model.mlir", "--mesh", "v4-32", "--mesh-shape", "all", "--csv", "table.csv") == 2
    assert [request.mesh_shape for request in sweep_pipeline.requests] == [
        "data=16",
        "data=8,model=2",
        "data=4,model=4",
        "data=2,model=8",
    ]
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if "data=" in line]
    assert ["data=2,model=8" in shown[0], "data=4" in shown[1], "data=8" in shown[2], "data=16" in shown[3]] == [
        True
    ] * 4
    assert [line.startswith("★") for line in shown] == [True, False, False, False]
    assert "failed: model.mlir: does not divide" in shown[3]
    rows = Path("table.csv").read_text().splitlines()
    assert len(rows) == 5 and [",true," in row for row in rows] == [False, True, False, False, False]


def test_sweep_over_programs_and_meshes(sweep_pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.mlir").write_text("")
    command = "sweep model.mlir other.mlir --mesh v4-32 --mesh nowhere.yaml --mesh-shape all --json - --quiet"
    assert toast(*command.split()) == 2
    out, err = capsys.readouterr()
    points = json.loads(out)["points"]
    assert len(points) == 10 and err == ""
    assert [point["status"] for point in points].count("failed") == 4
    assert [point["program"] for point in points if point["best"]] == ["model.mlir"]


def test_sweep_over_given_shapes_quietly(sweep_pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        toast("sweep", "model.mlir", "--mesh", "v4-32", "--mesh-shape", "data=8,model=2; data=4,model=4", "--quiet")
        == 0
    )
    assert capsys.readouterr().out.startswith(
        "model.mlir: v4-32 data=4,model=4, 24.0 ms a step, 12.1 GiB; data (8): FSDP"
    )


def test_sweep_where_nothing_fits(sweep_pipeline: Pipeline) -> None:
    sweep_pipeline.report = make_report(TOO_LARGE)
    assert toast("sweep", "model.mlir", "--mesh", "v4-32") == 3


def test_sweep_where_everything_fails(sweep_pipeline: Pipeline) -> None:
    assert toast("sweep", "model.mlir", "--mesh", "v4-32", "--mesh-shape", "data=16") == 2


def test_an_interrupted_sweep_keeps_what_is_done(
    sweep_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here = sweep_module.run_all

    def interrupted(points: Sequence[Any], work: Any, jobs: int, chains: Any) -> Iterator[tuple[int, Any]]:
        yield from run_here(points[1:3], work, jobs, chains)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_module, "run_all", interrupted)
    assert toast("sweep", "model.mlir", "--mesh", "v4-32", "--mesh-shape", "all") == 130
    out, err = capsys.readouterr()
    assert out.count("data=") == 2
    assert err == "note: interrupted: 2 of 4 points are done\n"


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ("data=*", ["data=16"]),
        ("data=*,model=4", ["data=4,model=4"]),
        (
            "data=*,model=*",
            ["data=16,model=1", "data=8,model=2", "data=4,model=4", "data=2,model=8", "data=1,model=16"],
        ),
        ("a=*,b=*,c=8", ["a=2,b=1,c=8", "a=1,b=2,c=8"]),
        ("data=8,model=2;data=8,model=2", ["data=8,model=2"]),
        ("data=8,model=2;data=*,model=2", ["data=8,model=2"]),
        ("auto", ["auto"]),
        ("data=*,model=3", ["data=*,model=3"]),  # a failing point
    ],
)
def test_shapes(shapes: str, expected: list[str]) -> None:
    points = points_of([Request("model.mlir", "v4-32")], shapes, [None], [0])
    assert [point.request.mesh_shape for point in points] == expected
    assert [bool(point.error) for point in points] == ["3" in shape for shape in expected]


@pytest.mark.parametrize(("text", "seeds"), [("0", [0]), ("3-5", [3, 4, 5]), ("1,0-2, 9", [1, 0, 2, 9]), ("7-7", [7])])
def test_seeds(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "x", "-1", "1-", "5-3", "1..3", "0-99999999"])
def test_what_are_no_seeds(text: str) -> None:
    with pytest.raises(UsageError, match="--seeds"):
        parse_seeds(text)


def test_limits_and_seeds_are_points_of_their_own(sweep_pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    command = "sweep model.mlir --mesh v4-32 --memory-limit 8GiB --memory-limit 16GiB --seeds 0-2"
    assert toast(*command.split()) == 0
    assert [(request.memory_limit, request.seed) for request in sweep_pipeline.requests] == [
        (limit * 2**30, seed) for limit in (8, 16) for seed in range(3)
    ]
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["mesh", "seed", "step", "time", "peak", "memory", "of"]
    assert [row.strip("★· ").split()[1] for row in rows if "v4-32" in row] == list("012012")


def test_equal_points_are_done_once(sweep_pipeline: Pipeline) -> None:
    command = "sweep model.mlir model.mlir --mesh v4-32 --mesh v4-32 --seeds 1,1"
    assert toast(*command.split()) == 0
    assert len(sweep_pipeline.requests) == 1


def test_a_program_for_which_nothing_fits(sweep_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("large.mlir").write_text("")
    fitting = sweep_pipeline.report
    partition = pipeline_module.plan_given

    def one_is_large(request: Request, tell: Callable[..., None] | None = None, **_: Any) -> Pipeline:
        sweep_pipeline.report = make_report(TOO_LARGE) if request.program == "large.mlir" else fitting
        return partition(request, tell)

    monkeypatch.setattr("toast_cli.pipeline.plan_given", one_is_large)
    assert toast("sweep", "model.mlir", "large.mlir", "--mesh", "v4-32") == 3


@pytest.mark.parametrize(
    ("by", "best"),
    [
        (None, 0),
        ("step_time", 0),
        ("peak_memory", 1),
        ("communication", 2),
        ("device_time", 3),
        ("price", 4),
        ("tokens", 5),
    ],
)
def test_the_best_by(by: str | None, best: int) -> None:
    row = SweepRow("m", "v4-32", "data=16", "fits", devices=16, tokens_per_second=5.0, million_price=9.0)
    rows = [
        replace(row, step_seconds=1.0, peak_bytes=9, communication_seconds=0.5),
        replace(row, step_seconds=2.0, peak_bytes=1, communication_seconds=0.5),
        replace(row, step_seconds=2.0, peak_bytes=9, communication_seconds=0.1),
        replace(row, step_seconds=3.0, peak_bytes=9, communication_seconds=0.5, devices=4),
        replace(row, step_seconds=4.0, peak_bytes=9, communication_seconds=0.5, million_price=2.0),
        replace(row, step_seconds=4.0, peak_bytes=9, communication_seconds=0.5, tokens_per_second=7.0),
        replace(row, step_seconds=0.1, peak_bytes=0, communication_seconds=0.0, devices=1, status="does-not-fit"),
        replace(row, step_seconds=0.2, peak_bytes=0, communication_seconds=0.0, devices=1, status="unsure"),
        replace(row, step_seconds=None, status="failed", devices=None),
    ]
    found = ranked(rows, by)
    assert [one.best for one in found] == [True] + [False] * 8
    assert replace(found[0], best=False, front=False) == rows[best]
    assert [one.status for one in found[-3:]] == ["unsure", "does-not-fit", "failed"]


def test_a_program_is_read_once_and_a_search_begins_beside_another(sweep_pipeline: Pipeline) -> None:
    """On the same machine, at other sizes; else on another machine, at these sizes."""
    taken: list[tuple[Any, Any]] = []
    partition = pipeline_module.plan_given

    def watched(request: Request, source: Any = None, neighbour: Any = None, **more: Any) -> Any:
        done = partition(request, **more)
        done = replace(done, source=f"read for {request.dims}", notices=(f"{request.mesh} {request.dims}",))
        taken.append((source, neighbour and neighbour.notices[0]))
        return done

    runner = sweep_module.PointRunner()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toast_cli.pipeline.plan_given", watched)
        for mesh in ("v4-8", "v5e-4"):
            for dims in sizes_of(["b=1,2"]):
                runner(sweep_module.SweepPoint(Request("model.mlir", mesh, dims=dims)))
    assert taken == [
        (None, None),
        (None, "v4-8 ('b=1',)"),
        ("read for ('b=1',)", "v4-8 ('b=1',)"),
        ("read for ('b=2',)", "v5e-4 ('b=1',)"),
    ]


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ([], [()]),
        (["b=8"], [("b=8",)]),
        (["b=8, 16", "s=4"], [("b=8", "s=4"), ("b=16", "s=4")]),
        (["b=1,2", "s=3,4"], [("b=1", "s=3"), ("b=1", "s=4"), ("b=2", "s=3"), ("b=2", "s=4")]),
    ],
)
def test_sizes(given: list[str], sizes: list[tuple[str, ...]]) -> None:
    assert sizes_of(given) == sizes


def row_at(dims: str, seconds: float, peak: int, **more: Any) -> SweepRow:
    return SweepRow("m", "v4-32", "data=16", "fits", step_seconds=seconds, peak_bytes=peak, dims=dims, **more)


def test_the_front_is_time_and_price_or_time_and_memory() -> None:
    rows = [row_at("", 1.0, 9), row_at("", 2.0, 5), row_at("", 3.0, 6), replace(row_at("", 0.5, 1), status="unsure")]
    assert [row.front for row in ranked(rows)] == [True, True, False, False]
    prices = [replace(row, step_price=price) for row, price in zip(rows, (2.0, 3.0, 1.0, 0.1), strict=True)]
    assert [row.front for row in ranked(prices)] == [True, False, True, False]


def test_where_sizes_differ_the_point_of_the_most_tokens_a_second_is_first() -> None:
    rows = [row_at("b=1,s=4", 1.0, 9, tokens_per_second=4.0), row_at("b=8,s=4", 4.0, 9, tokens_per_second=8.0)]
    first, second = ranked(rows)
    assert first.dims == "b=8,s=4" and first.best and not second.front
    text = style.render(command_tables.sweep_blocks([first, second], 120), style.make_console(io.StringIO(), 120))
    head, *lines = text.splitlines()
    assert head.split() == ["mesh", "shape", "sizes", "step", "time", "tokens/s", "peak", "memory"]
    assert [line.replace("★", "").split()[2:7] for line in lines[:2]] == [
        ["b=8", "4.00", "s", "8", "9"],
        ["b=1", "1.00", "s", "0.25×", "4"],
    ]


def test_where_there_are_no_tokens_samples_count() -> None:
    rows = [row_at("b=1", 1.0, 9, samples_per_second=1.0), row_at("b=8", 4.0, 9, samples_per_second=2.0)]
    assert [row.dims for row in ranked(rows)] == ["b=8", "b=1"]
    console = style.make_console(io.StringIO(), 120)
    assert "samples/s" in style.render(command_tables.sweep_blocks(ranked(rows), 120), console)


@pytest.mark.parametrize(("width", "ratios"), [(80, False), (160, True)])
def test_ratios_are_explained_where_there_is_room_for_them(width: int, ratios: bool) -> None:
    rows = [row_at(f"b={n}", 1.0, 9, tokens_per_second=4.0 * n, step_price=n, million_price=n) for n in (1, 2)]
    console = style.make_console(None, width=width)
    shown = style.render(command_tables.sweep_blocks(ranked(rows), width), console)
    assert ("0.50×" in shown, "N× is against the first row" in shown) == (ratios, ratios)


def test_nothing_that_may_not_fit_is_the_best() -> None:
    assert not any(row.best for row in ranked([replace(row_at("", 1.0, 9), status="unsure")]))


# Results to go on from


def sweep_all(*arguments: str) -> int:
    return toast("sweep", "model.mlir", "--mesh", "v4-32", "--mesh-shape", "data=8,model=2;data=4,model=4", *arguments)


def test_a_finished_point_is_not_done_again(sweep_pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep_all("--jsonl", "out.jsonl") == 0
    table = capsys.readouterr().out
    assert sweep_all("--jsonl", "out.jsonl", "--json", "all.json") == 0
    out, err = capsys.readouterr()
    assert out == table and err == "note: 2 of 2 points are done already\n"
    assert len(sweep_pipeline.requests) == 2
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [line["schema"] for line in lines] == ["toast.sweep.point/1"] * 2
    points = json.loads(Path("all.json").read_text())["points"]
    assert [point["mesh_shape"] for point in points] == ["data=4,model=4", "data=8,model=2"]
    assert [point["best"] for point in points] == [True, False]
    assert sweep_all("--jsonl", "out.jsonl", "--fresh") == 0
    assert len(sweep_pipeline.requests) == 4 and len(Path("out.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda: Path("model.mlir").write_text("another"),
        lambda: "--iterations 9",
        lambda: "--seeds 1",
        lambda: "--memory-limit 20GiB",
        lambda: "--pin x=?",
    ],
)
def test_what_changes_is_done_again(sweep_pipeline: Pipeline, change: Callable[[], object]) -> None:
    assert sweep_all("--jsonl", "out.jsonl") == 0
    changed = change()
    assert sweep_all("--jsonl", "out.jsonl", *(changed.split() if isinstance(changed, str) else [])) == 0
    assert len(sweep_pipeline.requests) == 4


@pytest.mark.usefixtures("sweep_pipeline")
def test_a_device_holds_no_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep_all("--jsonl", "/dev/null") == 2
    assert "--jsonl: /dev/null is not a file" in capsys.readouterr().err


def test_failed_points_are_done_again(sweep_pipeline: Pipeline) -> None:
    command = (
        "sweep",
        "model.mlir",
        "--mesh",
        "v4-32",
        "--mesh-shape",
        "data=16;data=8,model=2",
        "--jsonl",
        "out.jsonl",
    )
    assert toast(*command) == toast(*command) == 2
    assert [request.mesh_shape for request in sweep_pipeline.requests] == ["data=16", "data=8,model=2", "data=16"]


def test_a_sweep_goes_on_behind_a_line_that_was_cut(sweep_pipeline: Pipeline) -> None:
    assert sweep_all("--jsonl", "out.jsonl") == 0
    whole = Path("out.jsonl").read_bytes()
    Path("out.jsonl").write_bytes(whole[:-20])
    assert sweep_all("--jsonl", "out.jsonl") == 0
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [line["mesh_shape"] for line in lines] == ["data=8,model=2", "data=4,model=4"]
    assert len(sweep_pipeline.requests) == 3


@pytest.mark.parametrize(
    "content",
    [
        "my notes",
        "my notes\n",
        "{}\n",
        "[1]\n",
        '{"schema": "toast.sweep.point/1"}\n',
        '{"schema": "toast.sweep.point/1", "program": 3, "mesh": "m", "mesh_shape": "", "status": "fits"}\n',
        '{"schema": "toast.sweep.point/1", "program": "m", "mesh": "m", "mesh_shape": "", "status": "good"}\n',
    ],
)
def test_other_files_are_left_alone(sweep_pipeline: Pipeline, capsys: pytest.CaptureFixture[str], content: str) -> None:
    Path("out.jsonl").write_text(content)
    assert sweep_all("--jsonl", "out.jsonl") == 2
    assert "out.jsonl" in capsys.readouterr().err
    assert Path("out.jsonl").read_text() == content and sweep_pipeline.requests == []


def test_two_sweeps_do_not_share_a_file(sweep_pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    with open_log("out.jsonl"):
        assert sweep_all("--jsonl", "out.jsonl") == 2
    assert "--jsonl: another sweep is writing out.jsonl" in capsys.readouterr().err


def test_lines_are_streamed(sweep_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file holds what is done while the rest is not."""
    run_here = sweep_module.run_all
    seen = []

    def watched(points: Sequence[Any], work: Any, jobs: int, chains: Any) -> Iterator[tuple[int, Any]]:
        for result in run_here(points, work, jobs, chains):
            seen.append(len(Path("out.jsonl").read_text().splitlines()))
            yield result

    monkeypatch.setattr(sweep_module, "run_all", watched)
    assert sweep_all("--jsonl", "out.jsonl") == 0
    assert seen == [0, 1]


def test_lines_on_stdout(sweep_pipeline: Pipeline, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert sweep_all("--jsonl", "-", "--quiet") == 0
    out, err = capsysbinary.readouterr()
    assert [json.loads(line)["mesh_shape"] for line in out.splitlines()] == ["data=8,model=2", "data=4,model=4"]
    assert err == b""


def test_the_progress_bar(sweep_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert sweep_all() == 0
    shown = terminal.getvalue()
    assert "2 of 2 points" in shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# For real


def test_a_killed_sweep_goes_on(tmp_path: Path) -> None:
    """SIGKILL after the first point; run again, the sweep does what is left, and no more."""
    sample = Path(__file__).parent.parent / "sample_models" / "mlp_tiny.mlir"
    command = [sys.executable, "-m", "toast_cli", "sweep", str(sample), "--mesh", "v4-32"]
    command += ["--seeds", "0-2", "--iterations", "20", "--jsonl", "out.jsonl"]
    out = tmp_path / "out.jsonl"
    running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while running.poll() is None and not (out.exists() and out.stat().st_size):
        time.sleep(0.02)
    running.kill()
    running.wait()
    first = out.read_bytes()
    done = first.count(b"\n")
    assert running.returncode == -signal.SIGKILL and 1 <= done < 3
    again = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert f"note: {done} of 3 points are done already" in again.stderr
    assert out.read_bytes().startswith(first) and out.read_bytes().count(b"\n") == 3
    assert again.stdout.count("v4-32") == 3 and again.stdout.count("\n★  ") == 1


def test_items_whose_process_cannot_start_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **options: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refused)
    done = dict(workers.run_all(["one", "two", "three"], job, 1, chains=["a", "a", "b"]))
    assert {number: result.reason for number, result in done.items()} == dict.fromkeys(
        range(3), "its process did not run: it could not be started (Resource temporarily unavailable)"
    )


def test_workers_run_in_parallel_and_survive_each_other() -> None:
    items = ["one", "bad input", "bug", "exit", "killed", "two"]
    done = dict(workers.run_all(items, job, jobs=3))
    assert [done[number] for number in range(len(items))] == [
        "ONE",
        workers.PointFailure("model.mlir: no such file"),
        workers.PointFailure("internal error: KeyError: 'x'"),
        workers.PointFailure("the process died (exit code 7)"),
        workers.PointFailure("the process died (Killed)"),
        "TWO",
    ]


def test_a_process_works_on_a_chain_and_the_next_one_goes_on_where_it_dies() -> None:
    items = ["one", "killed", "bad input", "two", "three"]
    done = dict(workers.run_all(items, Counter, 2, chains=["a", "a", "a", "b", "a"]))
    assert [done[number] for number in range(len(items))] == [
        "ONE 1",
        workers.PointFailure("the process died (Killed)"),
        workers.PointFailure("model.mlir: no such file"),
        "TWO 1",
        "THREE 2",
    ]


def test_workers_end_when_the_caller_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the second one, which is just being started then."""
    start = workers.subprocess.Popen

    def late(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return start(*arguments, **options)

    monkeypatch.setattr(workers.subprocess, "Popen", late)
    running = workers.run_all(["one", f"slow {tmp_path / 'ended'}"], job, jobs=1)
    assert next(running) == (0, "ONE")
    running.close()
    assert not (tmp_path / "ended").exists()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_figures_of_a_sweep_are_whole_at_any_width(width: int) -> None:
    words = "batch over data; heads, ff and vocab over model; weights and state rest split over data (ZeRO-3)"
    row = command_tables.SweepRow(
        "a", "v5e-16", "data=8,model=2", command_tables.FITS, "", 0.1234, 0.1, 0.0234, 2**30, 2**34
    )
    rows = [replace(row, mfu=0.512, summary=words), replace(row, mesh_shape="data=16", best=True)]
    console = style.make_console(io.StringIO(), width)
    text = style.render(command_tables.sweep_blocks(rows, width), console)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert text.count("123 ms") == 2
    assert ("communication" in text) == (width >= 160)
