"""Whether a plan fits is yes, unsure within the measured error of the prediction, or no."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from toast_cli import ask_compiler
from toast_cli.cli.app import run
from toast_cli.compiler.profiles import find_profile
from toast_cli.confirm.model import Compiled
from toast_cli.hardware import Mesh, find_preset
from toast_cli.pipeline import Request, partition
from toast_cli.report.model import fit_of

ERROR = find_profile(find_preset("v5e").chip).peak_error
TINY = "sample_models/mlp_tiny.mlir"


@pytest.mark.parametrize(
    ("peak", "fit"), [(50, "yes"), (90, "yes"), (91, "unsure"), (100, "unsure"), (110, "unsure"), (111, "no")]
)
def test_the_limit_and_the_error(peak: float, fit: str) -> None:
    assert fit_of(peak, 100, 0.1) == fit


class Says:
    """A compiler that needs so many bytes for every program."""

    label, identity = "XLA:TPU", ("test",)

    def __init__(self, peak: int, limit: int) -> None:
        self.peak, self.limit = peak, limit

    def judge(self, content: bytes, timeout_seconds: float) -> Compiled:
        if self.peak > self.limit:
            return Compiled("out of memory", "exceeds available HBM")
        return Compiled("compiled", "", 1e-3, peak_bytes=self.peak)


@pytest.mark.parametrize(
    ("share", "ask", "needs", "fit", "asked"),
    [
        (0.5, "auto", 0.5, "yes", False),
        (0.5, "always", 0.5, "yes", True),
        (1 + ERROR / 2, "never", 9.0, "unsure", False),
        (1 + ERROR / 2, "auto", 0.9, "yes", True),
        (1 + ERROR / 2, "auto", 1.1, "no", True),
        (1.5, "auto", 0.9, "yes", True),
        (1.5, "never", 0.9, "no", False),
        (3.0, "auto", 0.9, "no", False),
    ],
)
def test_who_is_asked_and_what_it_means(
    share: float, ask: str, needs: float, fit: str, asked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    request = Request(TINY, "v5e-16", strategy="fsdp:data", ask=ask)
    peak = partition(replace(request, ask="never")).report.predicted.peak_bytes
    limit = round(peak / share)

    def compiler_of(mesh: Mesh) -> Says:
        return Says(round(needs * limit), limit)

    monkeypatch.setattr(ask_compiler, "compiler_for", lambda spec, name: compiler_of)
    report = partition(replace(request, memory_limit=limit)).report
    assert (report.fit, report.met, report.confirmation is not None) == (fit, fit != "no", asked)


@pytest.mark.parametrize(
    ("share", "code", "said"), [(1 + ERROR / 2, 0, "? may not fit"), (2.0, 3, "✗ does not fit"), (0.5, 0, "")]
)
def test_what_is_written(
    share: float, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peak = partition(Request(TINY, "v5e-16", strategy="fsdp:data")).report.predicted.peak_bytes
    out, limit = tmp_path / "out.mlir", f"{round(peak / share)}B"
    command = ["partition", TINY, "--mesh", "v5e-16", "--strategy", "fsdp:data", "--ask", "never", "-o", str(out)]
    assert run([*command, "--memory-limit", limit]) == code
    text = capsys.readouterr().out
    assert out.exists() == (code == 0) and said in text and ("fit:" in text) == bool(said)
