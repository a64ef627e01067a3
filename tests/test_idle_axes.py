"""A mesh axis that goes unused because a size does not divide: the report names the dimension and the size that would
do.
"""

from __future__ import annotations

from pathlib import Path

from toast_cli.pipeline import partition
from toast_cli.request import Request

TEXT = """func.func @main(%x: tensor<399998x65xf32>, %w: tensor<65x63xf32>) -> tensor<399998x63xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<399998x65xf32>, tensor<65x63xf32>) -> tensor<399998x63xf32>
  return %0 : tensor<399998x63xf32>
}"""  # noqa: E501


def test_the_size_that_would_do(tmp_path: Path) -> None:
    path = tmp_path / "program.mlir"
    path.write_text(TEXT)
    notes = partition(Request(str(path), "h100-8", mesh_shape="data=4,model=2")).report.analysis.notes
    assert (
        "mesh axis data (4) is not used: splitting over it pays nowhere; 8 does not divide batch (399,998), but would "
        "if it were padded to 400,000"
    ) in notes


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
