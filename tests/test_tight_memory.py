"""A plan that fits by less than predictions are off is remarked on."""

from __future__ import annotations

import pytest

from toast_cli.compiler.profiles import find_profile
from toast_cli.hardware import find_preset
from toast_cli.pipeline import Request, partition

PEAK_ERROR = find_profile(find_preset("v5e").chip).peak_error


@pytest.mark.parametrize(("share", "remarked"), [(0.5, False), (1 - PEAK_ERROR / 2, True), (1.0, True), (1.2, False)])
def test_a_peak_near_the_limit_is_remarked_on(share: float, remarked: bool) -> None:
    def run(limit: int | None) -> tuple[int, list[str]]:
        request = Request("sample_models/mlp_tiny.mlir", "v5e-16", iterations=50, memory_limit=limit)
        report = partition(request).report
        return report.predicted.peak_bytes, report.analysis.notes

    peak, _ = run(None)
    found, notes = run(max(1, round(peak / share)))
    if found == peak:  # the same plan again
        assert any("may not fit" in note for note in notes) == remarked
    else:
        assert share > 1.0
