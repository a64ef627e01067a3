"""What a GPU took beside what is predicted, and the two ends of measuring."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median

import pytest
from programs import SAMPLES

from benchmarks import gpu_times
from benchmarks.gpu_timer import _executable, _timed, covered, measured
from benchmarks.gpu_times import add, op_cases, predicted_ops, stored, without_donation
from toast_cli.frontend import load

FAMILIES = {"matmul": 0.12, "products": 0.16, "elementwise": 0.1, "reduction": 0.05}  # largest median error of each


def test_ops_take_what_is_predicted() -> None:
    """Products and what memory decides; `docs/accuracy.md` says what is not predicted well."""
    chosen = [row for row in stored() if row["program"].split()[0] in FAMILIES]
    rows = predicted_ops(chosen)
    assert len(rows) > 20
    for family, most in FAMILIES.items():
        assert median(abs(row["error"]) for row in rows if row["family"] == family) < most, family


def test_the_table_holds_what_can_be_predicted() -> None:
    names = {row["program"] for row in stored()}
    assert all(name in op_cases() or name.partition(".")[0] in ("corpus", "real", "nothing") for name in names)


def test_the_quickest_of_each_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_times, "TABLE", tmp_path / "times.jsonl")
    row = dict.fromkeys(gpu_times.FIELDS, 0) | {"program": "a", "chip": "NVIDIA H100 80GB HBM3", "compile_seconds": 1.0}
    add(
        [row | {"seconds": 2.0}, row | {"seconds": 1.0}, row | {"seconds": 3.0}, {"program": "b", "error": "too large"}]
    )
    add([row | {"seconds": 1.5}])
    (kept,) = stored()
    assert (kept["chip"], kept["seconds"]) == ("H100", 1.0)
    assert "compile_seconds" not in kept
    add([row | {"seconds": 2.0, "device_seconds": 1.9}, row | {"seconds": 2.5, "device_seconds": 1.8}])
    add([row | {"seconds": 1.0}])
    (kept,) = stored()
    assert (kept["seconds"], kept["device_seconds"]) == (2.5, 1.8)
    assert "b: too large" in capsys.readouterr().err


def test_what_the_profiler_saw_counts_and_not_the_host() -> None:
    (row, *_) = [row for row in stored() if row["program"] in op_cases() and row.get("device_seconds", 0.0) > 1e-5]
    (seen,) = predicted_ops([row | {"seconds": 1.0}])
    assert seen["measured"] == pytest.approx(1e6 * row["device_seconds"])
    assert predicted_ops([row | {"device_seconds": 1e-6}]) == []
    unseen = {key: value for key, value in row.items() if key != "device_seconds"}
    assert predicted_ops([unseen | {"seconds": 5e-5}]) == []  # starting it takes most of that
    (whole,) = predicted_ops([unseen | {"seconds": 1.0}])
    assert whole["measured"] == pytest.approx(1e6)


def test_kernels_side_by_side_count_once() -> None:
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 4.0


def test_an_exported_program_runs_again_and_again() -> None:
    """On whatever jax finds here; a donated array could be used once."""
    sample = SAMPLES / "block_tiny.mlirbc.zst"
    assert any(argument.donated for argument in load(str(sample)).program.arguments)
    row = measured("block_tiny", *_timed(lambda: _executable(without_donation(sample)), time.monotonic() + 1e6))
    assert row["seconds"] > 0.0, row
    assert json.loads(json.dumps(row)) == row


def test_what_cannot_be_compiled_is_told_and_what_comes_too_late_is_left() -> None:
    late = time.monotonic() - 1.0
    assert _timed(lambda: 1, late) is None
    assert "deserialize" in measured("garbage", *_timed(lambda: _executable(b"garbage"), late + 1e6))["error"]
