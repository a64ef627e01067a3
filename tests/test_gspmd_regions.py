"""Manual regions in GSPMD's form, as JAX writes them without Shardy, beside what toast makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from programs import round_mesh, source_of_text

from toast_cli import xla
from toast_cli.dimensions import analyse
from toast_cli.emit import emit
from toast_cli.errors import InputError
from toast_cli.frontend import Source, program_pins
from toast_cli.frontend.constraints import axes_on, factored
from toast_cli.frontend.shardings import read_tiling
from toast_cli.pipeline import partition
from toast_cli.plan.decisions import Shard
from toast_cli.plan.lower import lower
from toast_cli.plan.problem import Problem, make_problem
from toast_cli.request import Request

P = PartitionSpec
AXES, SIZES = ("data", "model"), (4, 2)
F32 = np.float32


def region(body: Callable[..., Any], ins: Any, outs: Any, over: tuple[str, ...] = AXES) -> Any:
    mesh = AbstractMesh(SIZES, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs, axis_names={*over}, check_vma=False)


def product(x: Any, w: Any) -> Any:
    summed = region(lambda x, w: lax.psum(x @ w, "model"), (P("data", "model"), P("model")), P("data"))
    return jnp.tanh(summed(x, w)) @ w


def gradient(x: Any, w: Any) -> Any:
    summed = region(lambda x, w: lax.psum(jnp.tanh(x @ w), "model"), (P("data", "model"), P("model")), P("data"))
    return jax.value_and_grad(lambda w: (summed(x, w) ** 2).mean())(w)


def in_loop(x: Any, w: Any) -> Any:
    summed = region(lambda x, w: lax.psum(x @ w, "model"), (P("data", "model"), P("model")), P("data"))
    return lax.scan(lambda x, scale: (jnp.tanh(summed(x, w) * scale), x.sum()), x, jnp.arange(3.0))


def two(x: Any, w: Any) -> Any:
    """What leaves the first region enters the second; one result of the second is an operand as it came."""
    first = region(lambda x, w: lax.psum(x @ w, "model"), (P("data", "model"), P("model")), P("data"))(x, w)
    swap = [(k, (k + 1) % 4) for k in range(4)]
    second = region(
        lambda x, w: (lax.ppermute(x, "data", swap), w), (P("data"), P(None, "model")), (P("data"), P(None, "model"))
    )
    return second(first * 2, w)


def numbered(x: Any, w: Any) -> Any:
    """Nothing enters: each device makes its piece of its own number, in the other order of the axes."""
    places = region(lambda: jnp.full((1, 16), lax.axis_index(("model", "data")), F32), (), P(("model", "data")))
    return places() + x, w


def over_some(x: Any, w: Any) -> Any:
    """By hand over one axis, by propagation over the other."""
    summed = region(lambda x, w: lax.psum(x @ w, "model"), (P(None, "model"), P("model")), P(), over=("model",))
    return jnp.tanh(summed(x, w)) @ w


PROGRAMS = [product, gradient, in_loop, two, numbered, over_some]


@contextmanager
def without_shardy() -> Iterator[None]:
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


def inputs() -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(8, 16)).astype(F32), rng.normal(size=(16, 16)).astype(F32)]


@pytest.mark.parametrize("dialect", ["stablehlo", "hlo"])
@pytest.mark.parametrize("function", PROGRAMS)
def test_numbers(function: Callable[..., Any], dialect: str) -> None:
    """Read, written for a mesh of other names and run under Shardy: what GSPMD makes of the program itself."""
    with without_shardy():
        lowered = jax.jit(function).lower(*inputs())
    text, shapes = lowered.as_text(dialect), [leaf.shape for leaf in jax.tree.leaves(lowered.out_info)]
    expected = xla.run_program(lowered.as_text().encode(), inputs(), shapes, 8, shardy=False)
    assert "SPMDShardToFullShape" in text
    source = source_of_text(text)
    before = str(source.module)
    assert "sdy.manual_computation" in before and "SPMD" not in before
    problem = problem_on(source, x=4, y=2)
    plan = tuple(choice for choice in problem.decisions.choices if isinstance(choice, Shard) and not choice.axis)[:1]
    written = emit(source, lower(problem, plan), "stablehlo")
    assert str(source.module) == before
    assert b'<["x"=4, "y"=2]>' in written and b"gspmd" not in written.replace(b"@gspmd", b"")
    found = xla.run_program(written, inputs(), shapes, 8, shardy=True)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def problem_on(source: Source, **sizes: int) -> Problem:
    pins = program_pins(source, tuple(sizes), tuple(sizes.values()))
    return make_problem(source.program, analyse(source.program), round_mesh(**sizes), program_pins=pins)


def test_arrays_lie_at_the_boundary_as_it_says() -> None:
    problem = problem_on(source_of_text(PAIR), a=2, b=4)
    entrance = next(k for k, op in enumerate(problem.program.ops) if op.name == "sdy.manual_computation")
    lowered = lower(problem, ())
    assert lowered.required[entrance, 0] == ((0,), ())
    assert lowered.required[entrance + 1, 0] == ((1,), ())


# Two bodies with the same constant, which stands outside of both; the second enters before the first has left.
PAIR = """
module {
  func.func @main(%a: tensor<8x4xf32>, %b: tensor<8x4xf32>) -> (tensor<8x4xf32>, tensor<8x4xf32>) {
    %c = stablehlo.constant dense<2.0> : tensor<4x4xf32>
    %d = stablehlo.slice %c [0:2, 0:4] : (tensor<4x4xf32>) -> tensor<2x4xf32>
    %0 = stablehlo.custom_call @Sharding(%a) {mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"} : (tensor<8x4xf32>) -> tensor<8x4xf32>
    %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"} : (tensor<8x4xf32>) -> tensor<4x4xf32>
    %2 = stablehlo.multiply %1, %c {mhlo.sharding = "{manual}"} : tensor<4x4xf32>
    %3 = stablehlo.custom_call @Sharding(%b) {mhlo.sharding = "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"} : (tensor<8x4xf32>) -> tensor<8x4xf32>
    %4 = stablehlo.custom_call @SPMDFullToShardShape(%3) {mhlo.sharding = "{manual}"} : (tensor<8x4xf32>) -> tensor<2x4xf32>
    %5 = stablehlo.add %4, %d {mhlo.sharding = "{manual}"} : tensor<2x4xf32>
    %6 = stablehlo.custom_call @Sharding(%2) {mhlo.sharding = "{manual}"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
    %7 = stablehlo.custom_call @SPMDShardToFullShape(%6) {mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"} : (tensor<4x4xf32>) -> tensor<8x4xf32>
    %8 = stablehlo.custom_call @Sharding(%5) {mhlo.sharding = "{manual}"} : (tensor<2x4xf32>) -> tensor<2x4xf32>
    %9 = stablehlo.custom_call @SPMDShardToFullShape(%8) {mhlo.sharding = "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"} : (tensor<2x4xf32>) -> tensor<8x4xf32>
    return %7, %9 : tensor<8x4xf32>, tensor<8x4xf32>
  }
}
"""  # noqa: E501


def test_bodies_share_nothing() -> None:
    source = source_of_text(PAIR)
    text = str(source.module)
    assert text.count("sdy.manual_computation") == 2 and text.count("dense<2.000000e+00>") == 2
    assert "mhlo.sharding" not in text and "custom_call" not in text
    assert not [op for op in source.program.ops if op.opaque]
    (note,) = source.notices
    assert note == "2 manual regions (shard_map) stay as written under every plan"


WHOLE = '"{devices=[2,1,4]<=[8] last_tile_dim_replicate}"} : (tensor<8x4xf32>) -> tensor<8x4xf32>'
REFUSED = {
    "no sharding at the boundary": (PAIR.replace("@Sharding(%b) {mhlo.sharding", "@Sharding(%b) {other"), "boundary"),
    "unknown notation": (
        PAIR.replace('"{manual}"} : (tensor<8x4xf32>) -> tensor<4x4', '"{what}"} : (tensor<8x4xf32>) -> tensor<4x4'),
        "{what}",
    ),
    "another number of devices": (PAIR.replace("[2,1,4]<=[8]", "[2,1,2]<=[4]", 1), "for 4 and for 8 devices"),
    "no number of devices": (
        PAIR.replace("{devices=[2,1,4]<=[8] last_tile_dim_replicate}", "{replicated}").replace(
            "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}", "{replicated}"
        ),
        "for how many devices",
    ),
    "devices in no order of a mesh": (
        PAIR.replace("devices=[2,1,4]<=[8]", "devices=[2,1,4]0,1,2,4,3,5,6,7"),
        "the axes of no mesh",
    ),
    "an array without a boundary": (
        PAIR.replace("stablehlo.multiply %1, %c", "stablehlo.multiply %1, %3").replace(
            '%2 = stablehlo.multiply %1, %3 {mhlo.sharding = "{manual}"} : tensor<4x4xf32>',
            "%n = stablehlo.slice %b [0:4, 0:4] : (tensor<8x4xf32>) -> tensor<4x4xf32>\n"
            "    %2 = stablehlo.multiply %1, %n : tensor<4x4xf32>",
        ),
        "no boundary splits",
    ),
    "another shape than the boundary says": (PAIR.replace("[4,1,2]<=[2,4]T(1,0)", "[2,1,4]<=[8]"), "tensor<2x4xf32>"),
}


@pytest.mark.parametrize(("text", "what"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_region_is_refused(text: str, what: str) -> None:
    with pytest.raises(InputError) as error:
        source_of_text(text)
    assert "GSPMD's form" in error.value.what and what in error.value.what
    assert ":" in error.value.where and "Shardy" in error.value.hint


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 4, "model": 2}, {"a": 2, "b": 2}])
def test_the_mesh_must_hold_the_same_devices(sizes: dict[str, int]) -> None:
    source = source_of_text(PAIR)
    with pytest.raises(InputError) as error:
        program_pins(source, tuple(sizes), tuple(sizes.values()))
    assert "2 × 4 devices" in error.value.what and "--mesh-shape a=2,b=4" in error.value.hint


def test_shapes_that_do_not_suit_a_region_are_not_tried(tmp_path: Path) -> None:
    path = tmp_path / "pair.mlir"
    path.write_text(PAIR)
    report = partition(Request(str(path), "h100-8", mesh_shape="auto", iterations=20)).report
    assert report.mesh.axes == {"data": 2, "model": 4}


FACTORED = [
    # tilings, devices, sizes of the axes
    (["{devices=[8]<=[8]}"], 8, (8,)),
    (["{devices=[2,1,4]<=[8] last_tile_dim_replicate}"], 8, (2, 4)),
    (["{devices=[4,2]<=[8]}", "{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}"], 8, (4, 2)),
    (["{devices=[2,4]<=[8]}", "{devices=[4,2]<=[8]}"], 8, (2, 2, 2)),
    (["{devices=[2,2]0,2,1,3}"], 4, (2, 2)),
    (["{devices=[3]<=[3]}"], 3, (3,)),
    (["{devices=[2,2]0,1,3,2}"], 4, None),
]


@pytest.mark.parametrize(("texts", "devices", "sizes"), FACTORED)
def test_the_fewest_axes_are_found(texts: list[str], devices: int, sizes: tuple[int, ...] | None) -> None:
    mesh = factored([tiling for tiling in map(read_tiling, texts) if tiling], devices)
    assert (mesh and tuple(size for _, size in mesh)) == sizes


def test_axes_are_those_with_the_same_devices() -> None:
    mesh = (("gspmd_axis_0", 2), ("gspmd_axis_1", 4))
    assert axes_on((("gspmd_axis_1",), None), mesh, ("a", "b", "c"), (2, 2, 2)) == (("b", "c"), None)
    assert axes_on((("gspmd_axis_1",), ()), mesh, ("a", "b"), (4, 2)) is None


def test_parts_by_hand_are_told_from_copies() -> None:
    tiling = read_tiling("{devices=[1,2,4]<=[4,2]T(1,0) last_tile_dims={manual, replicated}}")
    assert tiling is not None and tiling.by_hand is not None and tiling.tiles == (1,)
    assert tiling.by_hand.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
