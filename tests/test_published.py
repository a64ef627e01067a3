"""The published runs: their steps can be built and are predicted as they were run."""

from __future__ import annotations

import pytest

from benchmarks.published.__main__ import predicted
from benchmarks.published.runs import RUNS, Decoder, Policy, Run

SMALL = Decoder(layers=2, model=256, heads=2, kv_heads=2, ff=512, vocab=512)


def test_a_run_is_there_once() -> None:
    assert len({(run.name, run.mesh) for run in RUNS}) == len(RUNS)


@pytest.mark.parametrize(("kept", "offloaded"), [("full", False), (("input", "q"), False), (("input", "q"), True)])
def test_a_small_step_is_predicted(kept: Policy, offloaded: bool) -> None:
    run = Run("small", SMALL, "v5e-4", "data=4", "fsdp:data", 8, 256, kept, 1.0, "this test", offloaded=offloaded)
    row = predicted(run)
    assert row["fits"] == "yes" and 0 < row["mfu"] < row["hfu"]
