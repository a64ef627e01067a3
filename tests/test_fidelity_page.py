"""Fidelity: the stored rows, and the summaries of them in the documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.fidelity import END, START, agreement, forms_beside, lengths, merged, write_page

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


def test_the_page_has_the_stored_rows(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    rows = json.loads((root / "benchmarks" / "data" / "fidelity.json").read_bytes())
    assert merged(rows) == rows and len(rows) > 100
    page = tmp_path / "page.md"
    page.write_text(f"before\n{START}\nold\n{END}\nafter\n", encoding="utf-8")
    write_page(page, rows)
    written = page.read_text(encoding="utf-8")
    assert written.startswith("before\n") and written.endswith(f"{END}\nafter\n") and "old" not in written
    published = (root / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert written.split(START)[1].split(END)[0] in published


def test_agreement_is_counted_for_each_compiler_and_form() -> None:
    good = ROW | {"plan": "search", "share": 1.0, "numbers": "equal"}
    cpu = good | {"compiler": "cpu", "numbers": "1 of 3 differ"}
    found = [(r["compiler"], r["plans"], r["good"], r["least"], r["equal"]) for r in agreement([ROW, good, cpu])]
    assert found == [("XLA:TPU, v4-32", 2, 1, 0.9, "1 of 1"), ("XLA:CPU, v4-32", 1, 1, 1.0, "0 of 1")]


def test_a_row_measured_again_takes_the_place_of_the_stored_one() -> None:
    """And the forms of one plan stand beside each other."""
    old, other, form = ROW | {"step": "-"}, ROW | {"plan": "search"}, ROW | {"form": "stablehlo"}
    assert merged([old, other, form, ROW]) == [ROW, form, other]


def test_steps_of_one_plan_stand_beside_each_other() -> None:
    """Of those that were measured in StableHLO as well, on the same compiler and mesh."""
    first, elsewhere = ROW | {"form": "stablehlo", "step": "4.000"}, ROW | {"mesh": "v5e-16"}
    (row,) = forms_beside([first, ROW, elsewhere])
    assert (row["form"], row["stablehlo"], row["ratio"]) == ("hlo", 4.0, 4.73 / 4)
    assert lengths([row]) == [{"form": "hlo", "plans": 1, "good": 0, "median": 4.73 / 4, "most": 4.73 / 4}]
