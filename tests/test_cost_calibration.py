"""The time model against stored cycles of XLA:TPU (`benchmarks/data/ops.csv`): what the documentation says of it stays
true.
"""

from __future__ import annotations

from statistics import median

import pytest
from sweeps import sweep

from benchmarks import calibrate_ops
from benchmarks.calibration_time import ranks, told
from benchmarks.common import spearman
from benchmarks.op_cases import cases


@pytest.mark.parametrize("chip", sweep(["v4", "v5e", "v5p", "v6e"], "v5e"))
def test_products_take_what_the_compiler_estimates(chip: str) -> None:
    """Test shapes of plain and batched products; one is as wide as memory allows, the next a single tile."""
    chosen = {name: case for name, case in cases().items() if case.family in ("matmul", "products") and case.test}
    rows = calibrate_ops.predict(chosen, [chip])
    assert len(rows) > 40
    assert median(abs(row["error"]) for row in rows) < 0.12
    (whole,) = (row for row in calibrate_ops.summary(rows) if row["family"] == "all")
    assert whole["median"] == pytest.approx(100 * median(abs(row["error"]) for row in rows))


def test_ranks() -> None:
    assert spearman([1.0, 2.0, 3.0], [10.0, 20.0, 90.0]) == pytest.approx(1.0)
    assert spearman([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    assert spearman([1.0, 2.0, 2.0, 4.0], [1.0, 3.0, 3.0, 7.0]) == pytest.approx(1.0)
    row = {"program": "p", "slice": "s", "set": "test"}
    rows = [
        row | {"compiled": c, "predicted": p, "error": 100 * (p / c - 1)}
        for c, p in ((1.0, 1.1), (2.0, 2.0), (4.0, 3.0))
    ]
    assert ranks(rows) == [pytest.approx(1.0)]
    assert ranks(rows[:2]) == []  # two plans have no order to speak of
    assert told(rows)[0] == "test: 3 points, median error 10 %, 90th percentile 10 %."
