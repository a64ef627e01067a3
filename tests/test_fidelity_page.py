"""A page of fidelity is read back as it was written, so that rows can be added to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.fidelity import forms_beside, merged, page, stored_rows

DIFFERENCE = {
    "side": "missing", "kind": "all-reduce", "axes": ["data", "model"], "bytes": 2048.0, "count": 16.0,
    "place": "model.py:3 (jit(step)/`dot`)",
}  # fmt: skip
ROW: dict[str, Any] = {
    "program": "mlp", "plan": "fsdp x megatron", "form": "hlo", "mesh": "v4-32", "compiler": "tpu", "ops": "335",
    "constraints": "26", "astray": "0", "predicted_count": 36.0, "compiled_count": 37.0, "predicted_kib": 277660.5,
    "compiled_kib": 283932.5, "agreeing": "90.0 %", "share": 0.9, "step": "4.730", "numbers": "not run", "verdict": "",
    "differences": [DIFFERENCE],
}  # fmt: skip
FAILED = {key: value for key, value in ROW.items() if key not in ("share", "differences")} | {
    "plan": "search", "agreeing": "out of memory", "compiled_count": 0.0, "compiled_kib": 0.0, "step": "-",
}  # fmt: skip


def test_rows_are_read_back(tmp_path: Path) -> None:
    rows = [ROW, ROW | {"form": "stablehlo", "share": 1.0, "agreeing": "100.0 %", "differences": []}, FAILED]
    file = tmp_path / "page.md"
    file.write_text(page(rows), encoding="utf-8")
    assert stored_rows(file) == rows


def test_the_page_in_the_documentation_can_be_read() -> None:
    file = Path(__file__).parents[1] / "docs" / "fidelity.md"
    assert len(stored_rows(file)) > 100


def test_a_row_measured_again_takes_the_place_of_the_stored_one() -> None:
    """And the forms of one plan stand beside each other."""
    old, other, form = ROW | {"step": "-"}, ROW | {"plan": "search"}, ROW | {"form": "spmd"}
    assert merged([old, other, form, ROW]) == [ROW, form, other]


def test_steps_of_one_plan_stand_beside_each_other() -> None:
    """Of those that were measured in StableHLO as well, on the same compiler and mesh."""
    first, elsewhere = ROW | {"form": "stablehlo", "step": "4.000"}, ROW | {"mesh": "v5e-16"}
    (row,) = forms_beside([first, ROW, FAILED, elsewhere])
    assert (row["form"], row["stablehlo"], row["ratio"]) == ("hlo", 4.0, 4.73 / 4)
    assert "| mlp | fsdp x megatron | tpu v4-32 | 4.000 | hlo | 4.730 | 1.183 |" in page([first, ROW])
