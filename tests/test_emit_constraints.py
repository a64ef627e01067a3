"""How few constraints there are, that each is needed, and GSPMD's notation of shardings."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import emitted
import jax.numpy as jnp
import numpy as np
import pytest
from emitted import TRAINED, UP_OUT, by_hand, emit_shardy, shardy_annotations, strategy, text_of
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jaxlib.xla_client import HloSharding
from programs import Case, arg, case_of, evaluator_of, problem_of, round_mesh, sample, source_of_text
from random_programs import cases, plans
from sweeps import sweep

from toast_cli.emit import emit_hlo
from toast_cli.emit.annotations import Annotations, full_annotations
from toast_cli.emit.hlo import gspmd_string, without_shardy
from toast_cli.emit.minimal import choose_annotations, declining, reduced_behind_transposes
from toast_cli.emit.misread import misread_note
from toast_cli.emit.shardy import QUICK, propagate, without_units
from toast_cli.emit.stablehlo import constraint_line, constraints_of
from toast_cli.frontend.source import Source
from toast_cli.plan.lower import lower
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding
from toast_cli.program.model import Rule
from toast_cli.program.ops import CARRY, REDUCE
from toast_cli.tactics import starting_plans


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


# -- constraints that Shardy's propagation could do without, and XLA:TPU's, which sees a simplified program, could
# not


def few(case: Case, lowered: PartitionedProgram) -> Annotations:
    chosen = choose_annotations(case.source, lowered)
    assert chosen.astray == []
    return chosen.annotations


def test_what_a_reduction_reads_a_piece_of_is_cut_in_front_of_it() -> None:
    """XLA sums up all of it else, on each device, and cuts the result."""
    case = case_of(lambda x: jnp.sin(x).sum(1), arg(64, 64), mesh=round_mesh(data=4))
    (reduction,) = (number for number, op in enumerate(case.program.ops) if op.name == REDUCE)
    shardings: list[Sharding] = [((),) * len(value.shape) for value in case.program.values]
    shardings[case.program.ops[reduction].results[0]] = ((0,),)
    lowered = by_hand({"data": 4}, shardings, required={(reduction, 0): ((0,), ())})
    found = [(reshard.edges, case.text(reshard.sharding)) for reshard in few(case, lowered).reshards]
    assert (((reduction, 0),), "data|-") in found


@pytest.mark.parametrize(
    ("decisions", "pinned"), [("w.1:data x.0:data x.0:model", True), ("x.0:data x.0:model", False)]
)
def test_what_a_loop_carries_is_pinned_where_its_axes_come_in_another_order_elsewhere(
    decisions: str, pinned: bool
) -> None:
    """The product's columns take one of the two axes of the batch, the first one: the other comes first on the way."""

    def run(x: Any, w: Any) -> Any:
        return lax.fori_loop(0, 4, lambda _, x: jnp.sin(x) * 2.0, x) @ w

    case = case_of(run, arg(16, 16), arg(16, 16), mesh=round_mesh(data=2, model=4))
    plan = tuple(case.shard(*decision.split(":")) for decision in decisions.split())
    results = (op.results[0] for op in case.program.ops if op.name == CARRY)
    carried = {case.source.definitions[value] for value in results if case.program.values[value].shape}
    constraints = few(case, case.lowered(plan)).constraints
    assert any(constraint.handle in carried for constraint in constraints) is pinned


# -- the plan comes out in whatever order the compiler's propagation visits the ops


WHOLE, DATA, MODEL = (), (0,), (1,)
MATMUL = Rule((8, 8, 8), (((0,), (2,)), ((2,), (1,))), (((0,), (1,)),), reduction=frozenset({2}))
ADD = Rule((8, 8), (((0,), (1,)), ((0,), (1,))), (((0,), (1,)),))
MERGE = Rule((4, 8), (((0,), (1,)),), (((0, 1),),))  # a reshape of 4 x 8 to 32
SORT = Rule((8, 8), (((0,), (1,)),), (((0,), (1,)),), need_replication=frozenset({1}))


@pytest.mark.parametrize(
    ("rule", "shardings", "contested"),
    [
        # every array is split alike: nobody offers more than there is
        (ADD, ((DATA, WHOLE), (DATA, WHOLE), (DATA, WHOLE)), (False, False, False)),
        # the first operand is split further than the plan has the others
        (ADD, ((DATA, MODEL), (DATA, WHOLE), (DATA, WHOLE)), (False, True, True)),
        # along different dimensions: each wants the others
        (ADD, ((DATA, WHOLE), (WHOLE, DATA), (WHOLE, DATA)), (True, True, True)),
        # a reduce-scattered product: its columns would split those of the weight
        (MATMUL, ((WHOLE, DATA), (DATA, WHOLE), (WHOLE, DATA)), (False, True, False)),
        # an axis of another order counts as another axis
        (ADD, (((0, 1), WHOLE), ((1, 0), WHOLE), ((1, 0), WHOLE)), (True, True, True)),
        # the major factor takes the first axis, the minor one the second
        (MERGE, ((DATA, MODEL), ((0, 1),)), (False, False)),
        (MERGE, ((DATA, WHOLE), ((0, 1),)), (True, False)),
        # what an op needs whole is offered to nobody
        (SORT, ((WHOLE, MODEL), (WHOLE, WHOLE)), (False, False)),
    ],
)
def test_a_value_is_contested_where_a_neighbour_splits_it_further(
    rule: Rule, shardings: tuple[Sharding, ...], contested: tuple[bool, ...]
) -> None:
    assert declining(rule, shardings, (False,) * len(shardings), (4, 2)) == contested


def test_values_made_for_each_use_offer_nothing() -> None:
    shardings = ((DATA, MODEL), (DATA, WHOLE), (DATA, WHOLE))
    assert declining(ADD, shardings, (True, False, False), (4, 2)) == (False, False, False)


@pytest.mark.parametrize("name", sweep(["scan_tiny", "gns_tiny", "moe_tiny", "itx_decode_tiny"], "itx_decode_tiny"))
def test_the_order_of_propagation_does_not_matter(name: str) -> None:
    """Shardy propagates through elementwise ops first, then through others. XLA:TPU simplifies the program before that,
    so that the same sharding reaches a value sooner or later: a decoder's scanned layers sent 169 GiB for 3."""
    source, _ = sample(name)
    problem = problem_of(source, "v4-32")
    for plan in starting_plans(problem):
        lowered = reduced_behind_transposes(source, lower(problem, plan))
        assert strays_in_another_order(source, lowered) == []


def strays_in_another_order(source: Source, lowered: PartitionedProgram) -> list[int]:
    """Values that lie elsewhere than planned when all kinds of ops are propagated through alike."""
    annotations = choose_annotations(source, lowered).annotations
    passes = QUICK.replace("sdy-user-priority-propagate", "sdy-aggressive-propagate")
    found = propagate(source, lowered, annotations, passes).values
    return [
        value
        for value, got in found.items()
        if got not in {without_units(at, lowered.axis_sizes) for at in lowered.path(value)}
    ]
