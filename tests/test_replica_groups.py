"""Replica groups that name mesh axes, which JAX 0.12 writes, are read as lists of devices."""

from __future__ import annotations

import pytest
from programs import source_of_text

from toast_cli.base.errors import InputError
from toast_cli.frontend.manual_regions import devices_along
from toast_cli.xla import ir, make_context, sdy, stablehlo

MESHES = {
    "m": '#sdy.mesh<["a"=2, "b"=3]>',
    "reversed": '#sdy.mesh<["a"=2, "b"=2], device_ids=[3, 2, 1, 0]>',
    "long": '#sdy.mesh<["a"=8]>',
}
# mesh, axes -> groups
GROUPS = [
    ("@m", '<name = "a">', [[0, 3], [1, 4], [2, 5]]),
    ("@m", '<name = "b">', [[0, 1, 2], [3, 4, 5]]),
    ("@m", '<name = "b">, <name = "a">', [[0, 3, 1, 4, 2, 5]]),
    ("@m", "", [[0], [1], [2], [3], [4], [5]]),
    ("@reversed", '<name = "a">', [[3, 1], [2, 0]]),
    ("@long", '<name = "a", sub_axis_info = (2)2>', [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ('#stablehlo.mesh<axes = [<name = "a", size = 2>, <name = "b", size = 2>]>', '<name = "a">', [[0, 2], [1, 3]]),
]


@pytest.mark.parametrize(("mesh", "axes", "groups"), GROUPS)
def test_groups_along_axes(mesh: str, axes: str, groups: list[list[int]]) -> None:
    text = f"#stablehlo.replica_group_mesh_axes<mesh = {mesh}, axes = [{axes.replace('<', '#stablehlo.axis_ref<')}]>"
    with make_context():
        said = stablehlo.ReplicaGroupMeshAxesAttr(ir.Attribute.parse(text))
        meshes = {name: sdy.MeshAttr(ir.Attribute.parse(one)) for name, one in MESHES.items()}
        assert devices_along(said, meshes).tolist() == groups


REGION = """
sdy.mesh @mesh = <["data"=2, "model"=2]>
func.func public @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"data"}, {"model"}]>]
      out_shardings=[<@mesh, [{"data"}, {"model"}]>] manual_axes={"data", "model"} (%a: tensor<4x2xf32>) {
    %1 = "stablehlo.all_reduce"(%a) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @MESH, axes = [#stablehlo.axis_ref<name = "AXIS">]>,
      use_global_device_ids}> ({
    ^bb0(%b: tensor<f32>, %c: tensor<f32>):
      %2 = stablehlo.add %b, %c : tensor<f32>
      stablehlo.return %2 : tensor<f32>
    }) : (tensor<4x2xf32>) -> tensor<4x2xf32>
    sdy.return %1 : tensor<4x2xf32>
  } : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}"""


def test_what_a_region_exchanges_is_seen() -> None:
    source = source_of_text(REGION.replace("MESH", "mesh").replace("AXIS", "model"))
    (region,) = [op.region for op in source.program.ops if op.region is not None]
    assert [(one.kind, one.groups) for one in region.exchanges.values()] == [("all-reduce", ((0, 1), (2, 3)))]
    assert "replica_groups = dense<[[0, 1], [2, 3]]>" in str(source.module)


@pytest.mark.parametrize(("mesh", "axis"), [("nowhere", "model"), ("mesh", "nowhere")])
def test_names_that_nothing_declares(mesh: str, axis: str) -> None:
    with pytest.raises(InputError, match="nowhere") as raised:
        source_of_text(REGION.replace("MESH", mesh).replace("AXIS", axis))
    assert raised.value.where and raised.value.hint
