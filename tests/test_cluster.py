"""`toast sweep --cluster`: on a Dask cluster started here, and through joblib's interface with a backend that stands
for Ray's.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import joblib
import pytest
from joblib.parallel import ThreadingBackend

from toast_cli.cli import main, sweep
from toast_cli.cli.running import PointFailure
from toast_cli.cli.sweep import PointRunner, SweepPoint
from toast_cli.errors import MissingExtraError, UsageError
from toast_cli.report.command_tables import SweepRow
from toast_cli.request import Request

SAMPLE = Path(__file__).parent.parent / "sample_models" / "mlp_tiny.mlir"


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """Address of a Dask scheduler with two workers, in processes of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Dask says about itself
        import dask
        from distributed import LocalCluster

        patient = dask.config.set(
            {"distributed.comm.timeouts.connect": "600s", "distributed.comm.timeouts.tcp": "600s"}
        )
        with (
            patient,
            LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, protocol="tcp") as running,
        ):
            yield running.scheduler_address.removeprefix("tcp://")


def test_a_sweep_on_dask(scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "CONNECT_SECONDS", 600)
    monkeypatch.chdir(tmp_path)
    Path("model.mlir").write_bytes(SAMPLE.read_bytes())
    Path("broken.mlir").write_text("module {")
    Path("own.yaml").write_text("name: own\nchip: v4\ntopology: {torus: [2, 2]}\n")
    options = ["--mesh", "own.yaml", "--iterations", "20", "--quiet"]
    command = ["sweep", "model.mlir", "broken.mlir", *options]
    there = ["--cluster", f"dask://{scheduler}", "--jsonl", "out.jsonl", "--json", "out.json"]
    assert main([*command, *there]) == 2
    points = json.loads(Path("out.json").read_text())["points"]
    assert [(point["program"], point["mesh"], point["status"]) for point in points] == [
        ("model.mlir", "own.yaml", "fits"),
        ("broken.mlir", "own.yaml", "failed"),
    ]
    assert points[1]["error"].startswith("broken.mlir:1:") and "/tmp" not in points[1]["error"]
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert sorted(line["key"] for line in lines) == sorted(point["key"] for point in points)
    here = PointRunner()(SweepPoint(Request("model.mlir", "own.yaml", iterations=20), points[0]["key"]))
    assert replace(here, seconds=points[0]["seconds"], best=True, front=True) == SweepRow(**points[0])


def test_no_cluster_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "CONNECT_SECONDS", 0.2)
    assert main(["sweep", str(SAMPLE), "--mesh", "v4-32", "--cluster", "dask://127.0.0.1:1"]) == 2
    assert "--cluster: cannot reach dask://127.0.0.1:1: " in capsys.readouterr().err


@pytest.mark.parametrize("address", ["", "dask", "dask://", "tcp://host:1", "ray:auto"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(UsageError, match=r"--cluster: .* is not the address of a cluster; write dask://HOST:PORT"):
        sweep.parse_address(address)


@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_what_is_not_installed(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, {"dask": "distributed", "ray": "ray"}[engine], None)
    with pytest.raises(MissingExtraError, match=rf"pip install '.\[{engine}\]' in a clone"):
        list(sweep.run_on_cluster([SweepPoint(Request("m", "v4-32"))], f"{engine}://host:1", None))


class RayBackend(ThreadingBackend):
    """As Ray's own it can only give all results at once."""

    supports_return_generator = False


class Ray(ModuleType):
    """Stands for Ray, which is too heavy to test with: registers threads of this process as joblib's backend `ray`."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.calls: list[Any] = []
        self.util = ModuleType("ray.util")
        self.joblib = ModuleType("ray.util.joblib")
        self.joblib.register_ray = lambda: joblib.register_parallel_backend("ray", RayBackend)

    def init(self, **options: Any) -> None:
        self.calls.append(options["address"])

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.mark.parametrize(("address", "given"), [("auto", "auto"), ("head:10001", "ray://head:10001")])
def test_the_way_to_ray(monkeypatch: pytest.MonkeyPatch, address: str, given: str) -> None:
    ray = Ray()
    for name, module in (("ray", ray), ("ray.util", ray.util), ("ray.util.joblib", ray.joblib)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sweep, "run_shipped", what_arrived)
    points = [SweepPoint(Request(str(SAMPLE), "v4-32")), *(SweepPoint(Request("none.mlir", "v4-32")) for _ in range(3))]
    running = sweep.run_on_cluster(points, f"ray://{address}", 2)
    first = dict([next(running), next(running)])
    assert first == {0: PointFailure(f"{SAMPLE.stat().st_size} bytes, no file"), 1: PointFailure("no file, no file")}
    assert dict(running) == {2: PointFailure("no file, no file"), 3: PointFailure("no file, no file")}
    assert ray.calls == [given, "shutdown"]


def what_arrived(shipped: sweep.Shipped) -> tuple[int, PointFailure]:
    sizes = ("no file" if content is None else f"{len(content)} bytes" for content in (shipped.program, shipped.mesh))
    return shipped.number, PointFailure(", ".join(sizes))


def test_a_process_that_dies_on_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    number, result = sweep.run_shipped(sweep.Shipped(3, SweepPoint(Request("m.mlir", "v4-32")), b"", None))
    assert (number, result) == (3, PointFailure("the process died (exit code 1)"))
