"""A mesh axis that goes unused because its size divides nothing."""

from __future__ import annotations

from pathlib import Path

from toast_cli.pipeline import partition
from toast_cli.request import Request


def test_an_axis_that_divides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "program.mlir"
    path.write_text(
        """func.func public @main(%x: tensor<7x5xf32>, %w: tensor<5x9xf32>) -> tensor<7x9xf32> {
  %0 = stablehlo.dot %x, %w : (tensor<7x5xf32>, tensor<5x9xf32>) -> tensor<7x9xf32>
  return %0 : tensor<7x9xf32>
}"""
    )
    notes = partition(Request(str(path), "h100-8", mesh_shape="data=4,model=2")).report.analysis.notes
    assert "mesh axis data (4) is not used: its size divides no dimension that toast can split" in notes
