"""Whether a plan fits is yes, unsure where the limit is within the measured error of the prediction, or no."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from report_sample import TOO_LARGE, make_report

from toast_cli.ask_xla.confirm import Compiled
from toast_cli.candidates import ask_compiler
from toast_cli.cli.app import run
from toast_cli.frontend import load
from toast_cli.hardware import Mesh, load_spec
from toast_cli.pipeline import partition
from toast_cli.price.memory_fit import fit_of, peak_error
from toast_cli.report.model import ConfirmationFacts, ConfirmedPlanFacts
from toast_cli.request import AUTO, Request

TINY = "sample_models/mlp_tiny.mlir"
ERROR = 0.20  # of a program that needs less than 2 GiB


@pytest.mark.parametrize(
    ("peak", "fit"), [(50, "yes"), (90, "yes"), (91, "unsure"), (100, "unsure"), (101, "no"), (110, "no")]
)
def test_the_limit_and_the_error(peak: float, fit: str) -> None:
    assert fit_of(peak, 100, 1 / 9) == fit


@pytest.mark.parametrize(
    ("program", "mesh", "limit", "error"),
    [
        (TINY, "v5e-16", None, 0.07),
        (TINY, "h100-8", None, 0.12),
        (TINY, "v5e-16", 2**30, ERROR),
        ("sample_models/unet_tiny.mlirbc.zst", "v5e-16", None, 0.25),
        ("sample_models/unet_tiny.mlirbc.zst", "v5e-16", 2**30, 0.25),
    ],
)
def test_the_error_by_kind_of_program(program: str, mesh: str, limit: int | None, error: float) -> None:
    assert peak_error(load(program).program, load_spec(mesh).mesh(memory_limit=limit)) == error


def test_the_error_of_an_unmeasured_chip() -> None:
    mesh = load_spec("v5e-16").mesh()
    assert peak_error(load(TINY).program, replace(mesh, chip=replace(mesh.chip, preset=""))) == 0.25


def test_a_compiler_that_knows_no_memory_leaves_the_verdict_to_the_prediction() -> None:
    row = ConfirmedPlanFacts("search", 0.02, 2**34, "compiled", "", 0.02, 0.01, 0.01, None, None)
    confirmed = ConfirmationFacts("cpu", "search", [row], 1.0)
    assert replace(make_report(TOO_LARGE), confirmation=confirmed).fit == "no"
    known = replace(confirmed, plans=[replace(row, peak_bytes=2**30)])
    assert replace(make_report(TOO_LARGE), confirmation=known).fit == "yes"


@cache
def peak_bytes() -> float:
    return partition(Request(TINY, "v5e-16", strategy="fsdp:data")).report.predicted.peak_bytes


class Says:
    """A compiler that needs so many bytes for every program."""

    label, identity, knows_memory, partitioner = "XLA:TPU", ("test",), True, None

    def __init__(self, peak: int, limit: int) -> None:
        self.peak, self.limit = peak, limit

    def judge(self, content: bytes, timeout_seconds: float) -> Compiled:
        if self.peak > self.limit:
            return Compiled("out of memory", "exceeds available HBM")
        return Compiled("compiled", "", 1e-3, peak_bytes=self.peak)


@pytest.mark.parametrize(
    ("share", "confirm", "needs", "fit", "asked"),
    [
        (0.5, AUTO, 0.5, "yes", False),
        (0.5, 1, 0.5, "yes", True),
        (1 - ERROR / 2, 0, 9.0, "unsure", False),
        (1 + ERROR / 2, 0, 0.9, "no", False),
        (1 + ERROR / 2, AUTO, 0.9, "yes", True),
        (1 + ERROR / 2, AUTO, 1.1, "no", True),
        (1.5, AUTO, 0.9, "yes", True),
        (1.5, 0, 0.9, "no", False),
        (3.0, AUTO, 0.9, "no", False),
    ],
)
def test_who_is_asked_and_what_it_means(
    share: float, confirm: int, needs: float, fit: str, asked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    request = Request(TINY, "v5e-16", strategy="fsdp:data", confirm=confirm, fit="as-written")
    peak = peak_bytes()
    limit = round(peak / share)

    def compiler_of(mesh: Mesh) -> Says:
        return Says(round(needs * limit), limit)

    monkeypatch.setattr(ask_compiler, "compiler_for", lambda spec, name: compiler_of)
    report = partition(replace(request, memory_limit=limit)).report
    assert (report.fit, report.met, report.confirmation is not None) == (fit, fit != "no", asked)


def test_quiet_runs_say_that_a_compiler_is_asked_and_what_it_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ask_compiler, "compiler_for", lambda spec, name: lambda mesh: Says(3 * 2**20, 2**30))
    assert run(["partition", TINY, "--mesh", "v5e-16", "--strategy", "fsdp:data", "--confirm", "1", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert "3.00 MiB of 15.0 GiB by XLA:TPU" in out and err.count("note: a compiler is asked") == 1


@pytest.mark.parametrize(
    ("share", "code", "said"),
    [
        (1 - ERROR / 2, 0, "? may not fit"),
        (1 + ERROR / 2, 3, "✗ does not fit"),
        (2.0, 3, "✗ does not fit"),
        (0.5, 0, ""),
    ],
)
def test_what_is_written(
    share: float, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, limit = tmp_path / "out.mlir", f"{round(peak_bytes() / share)}B"
    command = ["partition", TINY, "--mesh", "v5e-16", "--strategy", "fsdp:data", "--fit", "as-written"]
    command += ["--confirm", "0", "-o", str(out)]
    assert run([*command, "--memory-limit", limit]) == code
    text = capsys.readouterr().out
    assert out.exists() == (code == 0) and said in text and ("fit:" in text) == bool(said)
