"""The stored figures of XLA:GPU beside the model's, and the page made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.calibrate import read_points
from benchmarks.common import Row, markdown_table
from benchmarks.gpu import BEGIN, COLUMNS, END, ERRORS, TABLE, agreeing, errors, predict, replace_table

ROW: Row = {
    "program": "mlp", "spec": "h100-8", "plan": "fsdp", "split": "fit", "seconds": 2.0, "argument_mib": 10.0,
    "compiled_argument_mib": 10.0, "peak_mib": 20.0, "compiled_peak_mib": 25.0, "error": -0.2, "traffic_mib": 3.0,
    "compiled_traffic_mib": 3.0, "agreeing": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("promised", "compiled", "share"),
    [
        ({}, {}, 1.0),
        ({"a": 4.0}, {"a": 4.0}, 1.0),
        ({"a": 4.0}, {"a": 2.0, "b": 2.0}, 0.5),
        ({"a": 1.0}, {"a": 4.0}, 0.25),
        ({"a": 4.0}, {}, 0.0),
    ],
)
def test_agreeing(promised: dict[str, float], compiled: dict[str, float], share: float) -> None:
    assert agreeing(promised, compiled) == share


def test_errors_are_of_all_and_of_each_machine() -> None:
    rows = [ROW, ROW | {"spec": "a100-16", "error": 0.1}]
    found = [("all", 2), ("h100-8", 1), ("a100-16", 1), ("fit", 2)]
    assert [(row["name"], row["points"]) for row in errors(rows)] == found
    assert [round(row["median"], 3) for row in errors(rows)] == [0.15, 0.2, 0.1, 0.15]


def test_only_what_stands_between_the_marks_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    replace_table(page, [ROW])
    once = page.read_text()
    assert once.startswith("before\n") and once.endswith(f"{END}\nafter\n") and "old" not in once
    assert "\n".join(markdown_table(ERRORS, errors([ROW]))) in once
    replace_table(page, [ROW])
    assert page.read_text() == once


def test_a_markdown_table_is_rectangular() -> None:
    assert {line.count("|") for line in markdown_table(COLUMNS, [ROW], words=3)} == {len(COLUMNS) + 1}


def test_predictions_hold_for_gpus(tmp_path: Path) -> None:
    """The smallest stored program: arguments and collectives exact, peaks near."""
    rows, _ = predict([p for p in read_points(TABLE) if p["program"] == "mlp"], tmp_path)
    assert rows
    for row in rows:
        assert row["argument_mib"] == pytest.approx(row["compiled_argument_mib"], rel=0.01)
        assert row["agreeing"] > 0.9
    assert sorted(abs(row["error"]) for row in rows)[len(rows) // 2] < 0.25
