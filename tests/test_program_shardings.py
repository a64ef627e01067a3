"""Shardings and manual regions that a program already holds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib.xla_client import HloSharding
from normalised_programs import MESH, array, main_of, names, normalised, with_collectives

from toast_cli.base.errors import InputError
from toast_cli.frontend.constraints import check_manual_axes, constraints_on
from toast_cli.frontend.loading import load_module
from toast_cli.frontend.shardings import mesh_axes, read_tiling, split_shardings


def sharding(*spec: Any) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec(*spec))


# -- shardings --------------------------------------------------------------------------------------------------------

SHARDED = """module attributes {mhlo.num_partitions = 8 : i32} {
  sdy.mesh @mesh = <["data"=4, "model"=2]>
  func.func public @main(%a: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>, tf.aliasing_output = 0 : i32},
      %b: tensor<8x4xf32>) -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data", "model"}, {?}]>}) {
    %0 = stablehlo.add %a, %b {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{?}, {"model", ?}]>]>} : tensor<8x4xf32>
    %1 = sdy.sharding_constraint %b <@mesh, [{}, {}]> : tensor<8x4xf32>
    %2 = sdy.sharding_constraint %1 <@mesh, [{"data":(1)2}, {"model"}]> : tensor<8x4xf32>
    %3 = stablehlo.multiply %0, %2 : tensor<8x4xf32>
    sdy.sharding_group %3 group_id=1 : tensor<8x4xf32>
    return %3 : tensor<8x4xf32>
  }
}"""  # noqa: E501


def test_shardings_are_dropped_with_one_notice() -> None:
    outcome = normalised(SHARDED)
    assert names(outcome.module) == ["add", "multiply"]
    assert "sdy" not in str(outcome.module)
    assert "tf.aliasing_output = 0" in str(outcome.module)
    assert outcome.kept == ()
    assert outcome.notices == ("6 shardings already in the program are dropped (--keep-shardings keeps them)",)


def test_shardings_are_kept_on_request() -> None:
    outcome = normalised(SHARDED, keep=True)
    assert "sdy" not in str(outcome.module)
    assert outcome.notices == ("6 shardings already in the program are kept where they lie along the axes of the mesh",)
    main = main_of(outcome.module)
    a, b = main.arguments
    add, multiply, end = (op.operation for op in main.entry_block.operations)
    assert [(k.value, k.sharding.axes, k.uses, k.origin) for k in outcome.kept] == [
        (a, (("data",), ()), (), "argument 0"),
        (multiply.results[0], (("data", "model"), None), ((end, 0),), "result 0"),
        (add.results[0], (None, ("model",)), (), "model:5:10"),
        (b, ((), ()), (), "model:6:10"),
        # The second constraint on %b contradicts the first, so it speaks of the use it was made for.
        (b, (None, ("model",)), ((multiply, 1),), "model:7:10"),
    ]


def test_kept_shardings_must_fit_the_mesh() -> None:
    outcome = normalised(SHARDED, keep=True)
    found, notices = constraints_on(outcome.kept, ("model", "data", "pipe"), (2, 4, 2))
    assert [c.sharding.axes for c in found] == [k.sharding.axes for k in outcome.kept]
    assert notices == []
    # An axis of one device splits nothing, whether or not the mesh has it, of any size.
    alone = [replace(k, sharding=replace(k.sharding, mesh=(("data", 1), ("model", 2)))) for k in outcome.kept]
    for names_, sizes in ((("model",), (2,)), (("data", "model"), (1, 2)), (("data", "model"), (4, 2))):
        constraints = constraints_on(alone, names_, sizes)[0]
        assert [c.sharding.axes for c in constraints][:2] == [((), ()), (("model",), None)]
    for names_, sizes, what in [
        (("data", "model"), (2, 4), "has it with size 2"),
        (("data", "tensor"), (4, 2), "has only data, tensor"),
    ]:
        with pytest.raises(InputError, match=what) as caught:
            constraints_on(outcome.kept, names_, sizes)
        assert "--mesh-shape data=4,model=2" in caught.value.hint


GSPMD = """module attributes {mhlo.frontend_attributes = {xla.sdy.meshes = "{mesh = #sdy.mesh<[\\22data\\22=4, \\22model\\22=2]>}"}} {
  func.func public @main(%a: tensor<8x4xf32> {mhlo.sharding = "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"}) -> tensor<8x4xf32> {
    %0 = stablehlo.custom_call @Sharding(%a) {mhlo.sharding = "{devices=[1,1,8]<=[8] last_tile_dim_replicate}"} : (tensor<8x4xf32>) -> tensor<8x4xf32>
    %1 = stablehlo.sine %0 {mhlo.sharding = "{devices=[2,4]<=[4,2]T(1,0)}", mhlo.frontend_attributes = {fun = "1", xla.sdy.sharding = "#sdy.sharding_per_value<[<@mesh, [{\\22model\\22}, {\\22data\\22}]>]>"}} : tensor<8x4xf32>
    %2 = stablehlo.cosine %1 {mhlo.sharding = "{devices=[8,1]0,1,4,5,2,3,6,7}"} : tensor<8x4xf32>
    return %2 : tensor<8x4xf32>
  }
}"""  # noqa: E501


def test_gspmd_shardings_are_translated_to_the_mesh() -> None:
    outcome = normalised(GSPMD, keep=True)
    assert names(outcome.module) == ["sine", "cosine"]
    assert "mhlo.frontend_attributes" in str(outcome.module)
    assert "sharding" not in str(outcome.module)
    kept = [k for k in outcome.kept if k.sharding.gspmd]
    found, notices = constraints_on(kept, ("data", "model"), (4, 2))
    assert [(c.origin, c.sharding.axes) for c in found] == [("argument 0", (("data",), ())), ("model:3:10", ((), ()))]
    assert notices == [
        "1 of the program's shardings do not lie along the axes of this mesh and are left out "
        "(the first is {devices=[8,1]0,1,4,5,2,3,6,7}, model:5:10)"
    ]
    (frontend,) = [k for k in outcome.kept if not k.sharding.gspmd]
    assert frontend.sharding.axes == (("model",), ("data",))


def test_the_place_of_a_callback_is_no_sharding_to_drop() -> None:
    lowered = jax.jit(lambda x: jax.pure_callback(np.sin, array(8), x)).lower(array(8))
    outcome = normalised(lowered.as_text(), keep=True)
    assert outcome.notices == ()
    assert outcome.kept == ()
    assert "@maximal_mesh_0" in str(outcome.module)


def test_rules_of_custom_calls_survive_hlo() -> None:
    lowered = jax.jit(jnp.linalg.qr).lower(array(8, 4))
    assert "sdy.sharding_rule = #sdy.op_sharding_rule<([i, j])->" in str(normalised(lowered.as_text("hlo")).module)


TILINGS = [
    # text, rank, axes on data=4 x model=2
    ("{replicated}", 2, ((), ())),
    ("{devices=[4,2]<=[8]}", 2, (("data",), ("model",))),
    ("{devices=[8,1]<=[8]}", 2, (("data", "model"), ())),
    ("{devices=[8,1]<=[4,2]T(1,0)}", 2, (("model", "data"), ())),
    ("{devices=[1,2,4]<=[4,2]T(1,0) last_tile_dim_replicate}", 2, ((), ("model",))),
    ("{devices=[4,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}", 1, (("data",),)),
    ("{devices=[4,1,2]<=[8] last_tile_dims={replicated}}", 2, (("data",), ())),
    ("{devices=[2,4]<=[8]}", 2, None),
    ("{devices=[4,2]<=[8]}", 1, None),
    ("{devices=[2,2]<=[4]}", 2, None),
    ("{maximal device=0}", 2, None),
    ("{manual}", 2, None),
]


@pytest.mark.parametrize(("text", "rank", "expected"), TILINGS, ids=[t[0] for t in TILINGS])
def test_tilings_by_mesh_axes(text: str, rank: int, expected: Any) -> None:
    assert mesh_axes(text, rank, ("data", "model"), (4, 2)) == expected


@pytest.mark.parametrize(
    "text", ["{devices=[4,2]<=[8,2]}", "{devices=[4,2]0,1}", "{devices=[4]<=[2,2]T(0,0)}", "{}", "{what}"]
)
def test_notations_that_are_not_understood(text: str) -> None:
    assert read_tiling(text) is None


def test_lists_of_shardings_are_split() -> None:
    assert split_shardings("{{replicated}, {devices=[2,1,2]<=[4] last_tile_dims={manual}}}") == [
        "{replicated}",
        "{devices=[2,1,2]<=[4] last_tile_dims={manual}}",
    ]
    assert split_shardings("{maximal device=0}") == ["{maximal device=0}"]


@given(st.permutations([0, 1, 2]), st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_any_split_along_axes_is_found_again(order: list[int], dimensions: list[int]) -> None:
    """Axes a=2, b=3, c=4 in some order, each given to dimension 0, 1, 2 or to none."""
    sizes = (2, 3, 4)
    per_dimension = [[axis for axis in order if dimensions[axis] == d] for d in range(3)]
    used = list(itertools.chain(*per_dimension))
    rest = [axis for axis in range(3) if axis not in used]
    tiles = [int(np.prod([sizes[axis] for axis in axes])) for axes in per_dimension]
    copies = int(np.prod([sizes[axis] for axis in rest]))
    transposed = ",".join(str(axis) for axis in used + rest)
    assume(max(tiles) > 1)
    text = f"{{devices=[{','.join(map(str, [*tiles, copies]))}]<=[2,3,4]T({transposed}) last_tile_dim_replicate}}"
    devices = read_tiling(text)
    assert devices is not None
    axes = mesh_axes(text, 3, ("a", "b", "c"), sizes)
    assert axes == tuple(tuple("abc"[axis] for axis in dimension) for dimension in per_dimension)
    assert list(HloSharding.from_string(text).tile_assignment_devices()) == devices.reshape(-1).tolist()


# -- manual regions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_manual_regions_stay_and_pin_their_boundary(form: str) -> None:
    lowered = jax.jit(with_collectives).trace(array(8, 4)).lower(lowering_platforms=("cpu",))
    outcome = normalised(lowered.as_text(form))
    region = next(
        op.operation for op in main_of(outcome.module).entry_block.operations if op.operation.name.startswith("sdy.")
    )
    assert [(p.value, p.sharding.axes, p.uses) for p in outcome.pins] == [
        (region.operands[0], (("data",), ("model",)), ((region, 0),)),
        (region.results[0], ((), ("model",)), ()),
    ]
    (notice,) = outcome.notices
    assert notice.startswith("a manual region (shard_map) stays as written")
    assert '"data"=4, "model"=2' in str(outcome.module)
    check_manual_axes(outcome.module, ("data", "model"), (4, 2))
    for names_, sizes, hint in [
        (("model", "data"), (2, 4), "--mesh-shape data=4,model=2"),
        (("data", "model"), (2, 4), "--mesh-shape data=4,model=2"),
        (("data", "model", "x"), (4, 2, 2), "lower it with a mesh of all 16 devices"),
        (("data", "model", "one"), (4, 2, 1), "--mesh-shape data=4,model=2"),
    ]:
        with pytest.raises(InputError, match="written for the mesh data=4,model=2") as caught:
            check_manual_axes(outcome.module, names_, sizes, "model")
        assert hint in caught.value.hint


def test_calls_inside_a_manual_region_are_inlined() -> None:
    def body(x: jax.Array) -> jax.Array:
        return jax.jit(jnp.sin)(x)

    spec = PartitionSpec("data")
    mapped = jax.shard_map(body, mesh=MESH, in_specs=spec, out_specs=spec)
    lowered = jax.jit(mapped).trace(array(8)).lower(lowering_platforms=("cpu",))
    assert names(normalised(lowered.as_text()).module) == ["sdy.manual_computation", "sine"]


def test_programs_lowered_with_shardings(tmp_path: Path) -> None:
    function = jax.jit(
        lambda x, w: (lax.with_sharding_constraint(jnp.sin(x @ w), sharding("data", "model")) + 1, x.sum()),
        in_shardings=(sharding("data", None), sharding(None, "model")),
        out_shardings=(None, sharding()),
        donate_argnums=0,
    )
    lowered = function.trace(array(8, 8), array(8, 8)).lower(lowering_platforms=("cpu",))
    path = tmp_path / "model.mlir"
    path.write_text(lowered.as_text())
    loaded = load_module(str(path), keep_shardings=True)
    assert loaded.format == "stablehlo"
    assert [k.sharding.axes for k in loaded.kept] == [
        (("data",), ()),
        ((), ("model",)),
        (),
        (("data",), ("model",)),
    ]
    assert len(load_module(str(path)).notices) == 1
    assert "jax.buffer_donor = true" in str(loaded.module)
    assert "num_partitions = 1" in str(loaded.module)


def test_a_text_that_only_looks_like_a_sharding_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.mlir"
    path.write_text(GSPMD.replace("#sdy.sharding_per_value<", "#sdy.sharding_per_va<"))
    with pytest.raises(InputError, match="unknown attribute `sharding_per_va`") as caught:
        load_module(str(path))
    assert caught.value.where == f"{path}:4:10"
