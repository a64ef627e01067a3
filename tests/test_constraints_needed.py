"""Few constraints say everything that a plan can say."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from emitted import by_hand
from programs import arg, case_of, problem_of, sample, source_of_text
from test_features import FEATURES, case, plan_of

from toast_cli.emit import minimal
from toast_cli.emit.annotations import full_annotations
from toast_cli.emit.minimal import choose_annotations, few_annotations
from toast_cli.plan.decisions import Shard
from toast_cli.plan.lower import lower
from toast_cli.plan.sharding import Sharding
from toast_cli.program.ops import BROADCAST_IN_DIM, SCATTER
from toast_cli.program.values import remade_values
from toast_cli.tactics.strategies import strategy

MOST = 15  # constraints in any of these programs


@pytest.mark.parametrize("name", FEATURES)
def test_few_constraints_suffice(name: str) -> None:
    program, words, _ = FEATURES[name]
    of = case(program)
    chosen = choose_annotations(of.source, of.lowered(plan_of(of, words)))
    assert chosen.astray == []
    assert len(chosen.annotations.constraints) + len(chosen.annotations.reshards) <= MOST


@pytest.mark.parametrize("name", FEATURES)
def test_what_is_scattered_says_all_its_shardings(name: str) -> None:
    """Also the last one, which its reader may bring about anyway: without it XLA:TPU reduces the whole array and cuts
    it (MLP, ViT under FSDP).
    """
    program, words, _ = FEATURES[name]
    of = case(program)
    lowered = of.lowered(plan_of(of, words))
    annotations = few_annotations(of.source, lowered)
    values = {handle: value for value, handle in enumerate(of.source.definitions)}
    for pin in annotations.constraints:
        value = values.get(pin.handle)
        if value in lowered.computed and value not in lowered.by_partitioner:
            assert pin.shardings == lowered.path(value)


def test_values_that_propagation_leads_astray_get_a_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = sample("long_tiny")
    problem = problem_of(source, "v4-32")
    lowered = lower(problem, strategy(problem, "context"))
    monkeypatch.setattr(minimal, "contested_values", lambda *_: ())
    few, full = few_annotations(source, lowered), full_annotations(source, lowered)
    assert minimal.ops_astray(source, lowered, few)
    chosen = choose_annotations(source, lowered)
    assert chosen.astray == []
    assert len(few.constraints) < len(chosen.annotations.constraints) < len(full.constraints) / 2
    monkeypatch.setattr(minimal, "ops_astray", lambda *_: [0])  # as if these did not suffice
    assert choose_annotations(source, lowered).annotations == full


BIAS = """func.func public @main(%b: tensor<64xf32>, %x: tensor<8x4x16xf32>) -> tensor<8x4x16xf32> {
  %0 = stablehlo.reshape %b : (tensor<64xf32>) -> tensor<4x16xf32>
  %1 = stablehlo.broadcast_in_dim %0, dims = [1, 2] : (tensor<4x16xf32>) -> tensor<1x4x16xf32>
  %2 = stablehlo.broadcast_in_dim %1, dims = [0, 1, 2] : (tensor<1x4x16xf32>) -> tensor<8x4x16xf32>
  %3 = stablehlo.add %2, %x : tensor<8x4x16xf32>
  return %3 : tensor<8x4x16xf32>
}"""


def test_a_value_that_no_neighbour_splits_has_a_constraint() -> None:
    """A bias is cut further where it is broadcast over columns, and gathered where it is broadcast over rows: neither
    its maker nor its reader says how the array in between is split (an LSTM under FSDP)."""
    source = source_of_text(BIAS)
    numbers = [number for number, op in enumerate(source.program.ops) if op.name == BROADCAST_IN_DIM]
    row, rows, plain = ((), (0,), (1,)), ((), (0,), ()), ((0,), ())
    shardings: list[Sharding] = [((0,),), rows, plain, row, rows, rows]
    assert [len(value.shape) for value in source.program.values] == [len(at) for at in shardings]
    required = {(numbers[0], 0): ((0,), (1,)), (numbers[1], 0): rows}
    chosen = choose_annotations(source, by_hand({"data": 4, "model": 2}, shardings, required=required))
    assert chosen.astray == []
    assert (source.definitions[3], (row,)) in [(pin.handle, pin.shardings) for pin in chosen.annotations.constraints]


COLUMN = """func.func public @main(%k: tensor<1xi32>, %u: tensor<64x16xf32>, %w: tensor<1x8xf32>)
    -> tensor<64x16x8xf32> {
  %0 = stablehlo.constant dense<0.0> : tensor<64x16x1xf32>
  %1 = "stablehlo.scatter"(%0, %k, %u) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [0, 1],
    inserted_window_dims = [2], scatter_dims_to_operand_dims = [2]>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %3 = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %3 : tensor<f32>
  }) : (tensor<64x16x1xf32>, tensor<1xi32>, tensor<64x16xf32>) -> tensor<64x16x1xf32>
  %2 = stablehlo.dot_general %1, %w, contracting_dims = [2] x [0]
    : (tensor<64x16x1xf32>, tensor<1x8xf32>) -> tensor<64x16x8xf32>
  return %2 : tensor<64x16x8xf32>
}"""


def test_a_scatter_whose_readers_split_it_less_has_a_constraint() -> None:
    """The gradient of a loss by labels scatters into zeros, which propose no sharding (T5)."""
    source = source_of_text(COLUMN)
    program = source.program
    (scatter,) = (op.results[0] for op in program.ops if op.name == SCATTER)
    both, one = (((0, 1), (), ()), ((0,), (), ()))
    shardings: list[Sharding] = [()] * len(program.values)
    for value, array in enumerate(program.values):
        shardings[value] = (
            ((0, 1), (), ())[: len(array.shape)] if array.shape[:1] == (64,) else ((),) * len(array.shape)
        )
    (reader,) = (number for number, _ in program.users[scatter])
    shardings[program.ops[reader].results[0]] = one
    lowered = by_hand({"data": 4, "model": 2}, shardings, required={(reader, 0): one})
    few = few_annotations(source, lowered)
    assert (source.definitions[scatter], (both,)) in [(pin.handle, pin.shardings) for pin in few.constraints]
    assert minimal.ops_astray(source, lowered, few) == []


def scaled_twice(n: jax.Array, a: jax.Array, b: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    return a * jax.lax.rsqrt(n)[:, None], (b * jax.lax.rsqrt(n)[:, None]) @ w


def test_values_that_xla_merges_get_a_pin_each() -> None:
    """Where layers of a graph network scale by the same degrees, but split features in another order, XLA:TPU made one
    array of the scales, and gathered the updates of scatters whole: 15 % of the bytes were as promised."""
    of = case_of(scaled_twice, arg(8), arg(8, 16), arg(8, 16), arg(16, 4))
    a, b = of.group("a.1"), of.group("b.1")
    lowered = of.lowered((Shard(a, 0), Shard(b, 1)))
    remade = remade_values(of.program)
    merged = [of.program.values[v].shape for v in minimal.merged_values(of.source, lowered, remade)]
    assert merged == [(8, 16), (8, 16)]
    pinned = [pin.shardings[0] for pin in choose_annotations(of.source, lowered).annotations.constraints]
    assert ((), (0,)) in pinned
    assert ((), (1,)) in pinned
    assert not list(minimal.merged_values(of.source, of.lowered((Shard(a, 0), Shard(b, 0))), remade))


@pytest.mark.parametrize(("real", "alike"), [(1.0, True), (2.0, False)])
def test_complex_constants_of_other_elements_are_not_merged(real: float, alike: bool) -> None:
    first, second = (np.array([x, 3j] * 4, np.complex64) for x in (1.0, real))
    of = case_of(lambda a, b: (a * first, b * second), arg(8), arg(8))
    program = of.program
    constants = [op.results[0] for op in program.ops if op.name == "stablehlo.constant"][-2:]
    shardings: list[Sharding] = [((),)] * len(program.values)
    shardings[constants[-1]] = ((0,),)
    merged = minimal.merged_values(of.source, by_hand({"data": 4}, shardings), [False] * len(program.values))
    assert sorted(merged) == (constants if alike else [])


SQUARE = """func.func public @main(%g: tensor<64x8xf32>) -> tensor<f32> {
  %0 = chlo.square %g : tensor<64x8xf32> -> tensor<64x8xf32>
  %1 = stablehlo.constant dense<0.0> : tensor<f32>
  %2 = stablehlo.reduce(%0 init: %1) applies stablehlo.add across dimensions = [0, 1]
    : (tensor<64x8xf32>, tensor<f32>) -> tensor<f32>
  return %2 : tensor<f32>
}"""


def test_a_square_needs_no_constraint() -> None:
    """Shardy has no rule for it; XLA propagates through the product that it makes of it (the norm of a gradient)."""
    source = source_of_text(SQUARE)
    split: Sharding = ((0,), (1,))
    shardings = [split if value.shape else () for value in source.program.values]
    chosen = choose_annotations(source, by_hand({"data": 4, "model": 2}, shardings))
    assert chosen.astray == [] and chosen.annotations.constraints == ()
