"""`toast partition --verify`: the verdict under the report, and its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweeps import sweep

from toast_cli.ask_xla import verdict
from toast_cli.cli.app import run

MODELS = Path(__file__).parents[1] / "sample_models"
SAMPLE = str(MODELS / "block_tiny.mlirbc.zst")
BLOCK = ["partition", SAMPLE, "--mesh", "v4-32", "--strategy", "megatron", "--iterations", "1"]


@pytest.mark.parametrize("form", sweep(["stablehlo", "hlo"], "stablehlo"))
def test_megatron_agrees(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Two all-reduces per block and direction, as promised, in either form; nothing is written."""
    assert run([*BLOCK, "--verify", "cpu", "--format", form]) == 0
    said = capsys.readouterr().out
    assert said.index("-o OUT writes the sharded program") < said.index(
        "verdict of XLA: agreed (CPU partitioner; --verify tpu asks the real one)"
    )
    assert "all 74 results are equal" in said
    assert "all-reduce  data+model  64.0 KiB  ×8  64.0 KiB  ×8" in said


def test_disagreement_is_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """XLA finds nothing of what was promised; the program is written all the same."""
    monkeypatch.setattr(verdict, "collectives_after_partitioning", lambda *_: [])
    monkeypatch.setattr(verdict, "check_numbers", lambda *_: verdict.CheckedPart("numbers", "agreed", ""))
    program = tmp_path / "out.mlir"
    assert run([*BLOCK, "--verify", "cpu", "--quiet", "-o", str(program)]) == 1
    _, line = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "XLA disagreed (CPU partitioner; --verify tpu asks the real one); "
        "collectives: each device sends 0 B: 120 KiB of the promised are missing"
    )
    assert program.exists()


REFUSED = [
    (["--verify", "gpu"], "--verify gpu cannot compile for v4", "use --verify tpu"),
    (
        ["--verify", "cpu", "--format", "specs"],
        "specs is not a program that XLA can check",
        "--format stablehlo or hlo",
    ),
    (["--verify", "cup"], "cup", "cpu"),
]


@pytest.mark.parametrize(("options", "said", "hint"), REFUSED)
def test_what_cannot_be_verified(options: list[str], said: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BLOCK, *options]) == 2
    error = capsys.readouterr().err
    assert said in error and hint in error
