"""How few constraints there are, that each is needed, and GSPMD's notation of shardings."""

from __future__ import annotations

import re
from math import prod

import emitted
import numpy as np
import pytest
from emitted import TRAINED, UP_OUT, emit_shardy, shardy_annotations, strategy, text_of
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxlib.xla_client import HloSharding
from programs import Case, evaluator_of, round_mesh, source_of_text
from random_programs import cases, plans

from toast_cli.emit import emit_hlo
from toast_cli.emit.annotations import full_annotations
from toast_cli.emit.hlo import gspmd_string, without_shardy
from toast_cli.emit.minimal import choose_annotations
from toast_cli.emit.misread import misread_note
from toast_cli.emit.shardy import QUICK, propagate
from toast_cli.emit.stablehlo import constraint_line, constraints_of
from toast_cli.plan.sharding import Sharding


@pytest.fixture(scope="module")
def trained() -> Case:
    return emitted.trained()


@pytest.fixture(scope="module")
def looped() -> Case:
    return emitted.looped()


@settings(max_examples=15)
@given(st.data())
def test_any_plan_of_any_program_is_settled(data: st.DataObject) -> None:
    case = data.draw(cases())
    before = text_of(case.source)
    lowered = case.lowered(data.draw(plans(case.problem)))
    choice = choose_annotations(case.source, lowered)
    for each in (choice.annotations, full_annotations(case.source, lowered)):
        quick, whole = (
            propagate(case.source, lowered, each, passes).values for passes in (QUICK, "sdy-propagation-pipeline")
        )
        assert whole == {value: quick[value] for value in whole}
    assert text_of(case.source) == before


@pytest.mark.parametrize("name", TRAINED)
def test_few_constraints_suffice(trained: Case, name: str) -> None:
    chosen = choose_annotations(trained.source, trained.lowered(strategy(trained, *TRAINED[name][0])))
    assert chosen.astray == []
    assert len(chosen.annotations.constraints) + len(chosen.annotations.reshards) <= 4


def test_constraints_for_people(looped: Case) -> None:
    lowered = looped.lowered(strategy(looped, "x.0=data", "ws.1=data"))
    (facts,) = constraints_of(looped.source, lowered, shardy_annotations(looped.source, lowered))
    assert (facts.place, facts.type, facts.uses) == ("use", "f32[16,16]", 1)
    assert re.match(r"emitted.py:\d+ \((eval_jaxpr/)?dot_general\)", facts.location)
    assert facts.line == "x = jax.lax.with_sharding_constraint(x, P(None, P.UNCONSTRAINED))"
    assert facts.explicit == "x = jax.sharding.reshard(x, P(None, None))"


def test_constraints_on_a_mesh_of_explicit_axes(trained: Case) -> None:
    """Every dimension is spelled out, and a product is told how to shard what it makes."""
    lowered = trained.lowered(strategy(trained, "x.0=data", f"{UP_OUT}=model"))
    facts = constraints_of(trained.source, lowered, shardy_annotations(trained.source, lowered, annotate="full"))
    assert 'out_sharding=P("data", "model")' in {one.explicit for one in facts}
    assert not any("UNCONSTRAINED" in one.explicit for one in facts)


LINES = [
    (((0,), (), (0, 1)), frozenset(), 'P("data", None, ("data", "model"))'),
    (((), ()), frozenset({1}), "P(None, P.UNCONSTRAINED)"),
    ((), frozenset(), "P()"),
]


@pytest.mark.parametrize(("sharding", "open_dims", "spec"), LINES)
def test_lines_to_paste(sharding: Sharding, open_dims: frozenset[int], spec: str) -> None:
    line = constraint_line(sharding, ("data", "model"), open_dims)
    assert line == f"x = jax.lax.with_sharding_constraint(x, {spec})"


# ---------------------------------------------------------------- GSPMD's notation

TILINGS = [
    (((), ()), (4, 2), "{replicated}"),
    (((0,), ()), (4, 2), "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"),
    (((1,), ()), (4, 2), "{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}"),
    (((0, 1), ()), (4, 2), "{devices=[8,1]<=[8]}"),
    (((1, 0), ()), (4, 2), "{devices=[8,1]<=[4,2]T(1,0)}"),
    (((0,), (1,)), (4, 2), "{devices=[4,2]<=[8]}"),
    (((1,), (0,)), (4, 2), "{devices=[2,4]<=[4,2]T(1,0)}"),
    (((1,), ()), (4, 2, 3), "{devices=[2,1,12]<=[4,2,3]T(1,0,2) last_tile_dim_replicate}"),
    (((2,), (0,)), (4, 1, 3), "{devices=[3,4]<=[4,3]T(1,0)}"),
    (((1,),), (4, 1), "{replicated}"),
    ((), (4, 2), "{replicated}"),
]


@pytest.mark.parametrize(("sharding", "sizes", "expected"), TILINGS)
def test_tilings(sharding: Sharding, sizes: tuple[int, ...], expected: str) -> None:
    assert gspmd_string(sharding, sizes) == expected


@st.composite
def shardings(draw: st.DrawFn) -> tuple[Sharding, tuple[int, ...]]:
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    order = draw(st.permutations(range(len(sizes))))
    places = [draw(st.integers(-1, 2)) for _ in sizes]  # -1: the axis splits nothing
    return tuple(tuple(axis for axis in order if places[axis] == d) for d in range(3)), sizes


@given(shardings())
def test_a_tiling_puts_every_device_where_the_sharding_does(drawn: tuple[Sharding, tuple[int, ...]]) -> None:
    sharding, sizes = drawn
    text = gspmd_string(sharding, sizes)
    mesh = np.arange(prod(sizes)).reshape(sizes)
    if text == "{replicated}":
        assert prod(sizes[a] for axes in sharding for a in axes) == 1
        return
    as_read = HloSharding.from_string(text)
    tiles, copies = as_read.tile_assignment_dimensions(), as_read.replicate_on_last_tile_dim()
    assert tiles[:3] == [prod(sizes[a] for a in axes) for axes in sharding]
    grid = np.array(as_read.tile_assignment_devices()).reshape([*tiles, *([] if copies else [1])])
    for place in np.ndindex(*grid.shape[:3]):
        for device in grid[place]:
            at = np.argwhere(mesh == device)[0]
            for part, axes in zip(place, sharding, strict=True):
                assert part == np.ravel_multi_index([at[a] for a in axes] or [0], [sizes[a] for a in axes] or [1])


# What the converter writes, and what is left without Shardy.
WITH_SHARDY = """HloModule m, frontend_attributes={xla.sdy.meshes={mesh = #sdy.mesh<["a"=2]>},fingerprint="1,}"}
ENTRY main.5 {
  x.1 = f32[4] parameter(0), sharding={devices=[2]<=[2]}, frontend_attributes={xla.sdy.sharding="<[{\\"a\\"}]>"}
  x.2 = f32[4] custom-call(x.1), custom_call_target="f", frontend_attributes={k="{\\"}",xla.sdy.sharding="<@mesh>"}
  x.3 = f32[4] custom-call(x.2), custom_call_target="xla.sdy.FuncResultSharding", custom_call_has_side_effect=true
  x.31 = f32[4] custom-call(x.1), custom_call_target="xla.sdy.FuncResultSharding", custom_call_has_side_effect=true
  ROOT t = (f32[4], f32[4]) tuple(x.3, x.31), sharding={{devices=[2]<=[2]}, {replicated}}
}
"""
WITHOUT_SHARDY = """HloModule m, frontend_attributes={fingerprint="1,}"}
ENTRY main.5 {
  x.1 = f32[4] parameter(0), sharding={devices=[2]<=[2]}
  x.2 = f32[4] custom-call(x.1), custom_call_target="f", frontend_attributes={k="{\\"}"}
  ROOT t = (f32[4], f32[4]) tuple(x.2, x.1), sharding={{devices=[2]<=[2]}, {replicated}}
}
"""


def test_only_what_is_shardys_is_removed() -> None:
    assert without_shardy(WITH_SHARDY) == WITHOUT_SHARDY


RESHAPED_BACK = """func.func public @main(%x: tensor<64x16xf32> loc("x"), %w: tensor<16xf32>) -> tensor<64x16xf32> {
  %0:2 = stablehlo.optimization_barrier %x, %w : tensor<64x16xf32>, tensor<16xf32>
  %1 = stablehlo.broadcast_in_dim %0#1, dims = [1] : (tensor<16xf32>) -> tensor<1x16xf32>
  %2 = stablehlo.reshape %1 : (tensor<1x16xf32>) -> tensor<16xf32>
  %3 = stablehlo.broadcast_in_dim %2, dims = [1] : (tensor<16xf32>) -> tensor<64x16xf32>
  %4 = stablehlo.multiply %0#0, %3 : tensor<64x16xf32>
  %5 = stablehlo.sine %4 : tensor<64x16xf32>
  return %5 : tensor<64x16xf32>
}"""


def test_what_folds_away_leaves_shardings_of_several_results_alone() -> None:
    """XLA puts the sharding of a reshape that folds away on what it reshapes, here on both results of a barrier."""
    source = source_of_text(RESHAPED_BACK)
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    plan = strategy(case, "x.0=data")
    for form in ("stablehlo", "hlo"):
        assert emitted.collectives(case, emitted.compiled(case, plan, form)) == case.collectives(plan) == []


COMPLEX_SUM = """func.func public @main(%x: tensor<64x16xf32> loc("x")) -> tensor<64x16xf32> {
  %zero = stablehlo.constant dense<(0.0,-0.0)> : tensor<complex<f32>>
  %0 = stablehlo.complex %x, %x : tensor<64x16xcomplex<f32>>
  %1 = stablehlo.reduce(%0 init: %zero) applies stablehlo.add across dimensions = [0]
      : (tensor<64x16xcomplex<f32>>, tensor<complex<f32>>) -> tensor<16xcomplex<f32>>
  %2 = stablehlo.abs %1 : (tensor<16xcomplex<f32>>) -> tensor<16xf32>
  %3 = stablehlo.broadcast_in_dim %2, dims = [1] : (tensor<16xf32>) -> tensor<64x16xf32>
  return %3 : tensor<64x16xf32>
}"""


def test_sums_of_complex_numbers_are_in_regions_where_xla_can_read_them() -> None:
    """XLA:TPU gathers what it takes apart of them; without Shardy XLA aborts on larger programs with such regions."""
    source = source_of_text(COMPLEX_SUM)
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    plan = strategy(case, "x.0=data")
    shardy, hlo = (emit(source, case.lowered(plan)).decode() for emit in (emit_shardy, emit_hlo))
    assert shardy.count("sdy.manual_computation") == 1 and "partition_id" not in shardy
    assert "SPMDFullToShardShape" not in hlo
    assert misread_note(source, case.lowered(plan)) == ""
    for form in ("stablehlo", "hlo"):
        assert emitted.collectives(case, emitted.compiled(case, plan, form)) == case.collectives(plan)
