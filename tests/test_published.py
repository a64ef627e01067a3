"""The published runs: their steps can be built and are predicted as they were run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published.__main__ import predicted
from benchmarks.published.runs import RUNS, Decoder, Policy, Run
from toast_cli.hardware import load_spec
from toast_cli.pipeline import partition
from toast_cli.price.evaluator import Evaluator
from toast_cli.request import Request

SMALL = Decoder(layers=2, model=256, heads=2, kv_heads=2, ff=512, vocab=512)


def test_a_run_is_there_once() -> None:
    assert len({(run.name, run.mesh) for run in RUNS}) == len(RUNS)


@pytest.mark.parametrize(
    ("mesh", "kept", "offloaded"),
    [("v5e-4", ("input", "q"), True), ("h100:4", "minimal", False)],
)
def test_a_small_step_is_predicted(mesh: str, kept: Policy, offloaded: bool) -> None:
    run = Run("small", SMALL, mesh, "data=4", "fsdp:data", 8, 256, kept, 1.0, "this test", offloaded=offloaded)
    row = predicted(run)
    assert row["fits"] == "yes" and 0 < row["mfu"] < row["hfu"]


def test_attention_of_cudnn_is_kept() -> None:
    """Nothing is computed again where everything is kept, and layers are not a scan."""
    run = Run("small", replace(SMALL, gated=False), "h100:4", "data=4", "fsdp:data", 8, 256, "all", 1.0, "this test",
              scanned=False)  # fmt: skip
    row = predicted(run)
    assert row["mfu"] == pytest.approx(row["hfu"], rel=0.02)


@pytest.mark.parametrize(("mesh", "sustained"), [("a100-80:4", 0.93), ("h100:4", 0.82), ("v5e-4", 1.0)])
def test_products_of_a_run_take_as_long_as_the_clock_of_its_chip_lets_them(mesh: str, sustained: float) -> None:
    """A chip at its power limit lowers its clock: `sustained` of its figures."""
    spec = load_spec(mesh)
    assert spec.chip.sustained == sustained
    text = """func.func @main(%x: tensor<8192x8192xbf16>, %y: tensor<8192x8192xbf16>) -> tensor<8192x8192xbf16> {
      %0 = stablehlo.dot_general %x, %y, contracting_dims = [1] x [0] : (tensor<8192x8192xbf16>, tensor<8192x8192xbf16>) -> tensor<8192x8192xbf16>
      return %0 : tensor<8192x8192xbf16>
    }"""  # noqa: E501
    problem = partition(Request("p.mlir", mesh, iterations=1, content=text.encode())).problem
    at_peak = replace(problem.mesh, chip=replace(problem.mesh.chip, sustained=1.0))
    seconds, brief = (Evaluator(one).cost(()).compute_seconds for one in (problem, replace(problem, mesh=at_peak)))
    assert brief / seconds == pytest.approx(sustained, rel=0.01)
