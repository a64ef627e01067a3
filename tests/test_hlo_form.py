"""HLO text partitions as promised where XLA's simplifications and propagation see other things than Shardy does."""

from __future__ import annotations

import emitted
import pytest
from emitted import emit_shardy, strategy
from programs import Case, evaluator_of, round_mesh, source_of_text

from toast_cli.emit import emit_hlo

# Zeros of an array of one shape and number are one array in HLO.
ZEROS = """func.func public @main(%a: tensor<64x8xf32> loc("a"), %i: tensor<16x1xi32> loc("i"),
    %u: tensor<16x8xf32> loc("u")) -> (tensor<64x8xf32>, tensor<64x8xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<f32>) -> tensor<64x8xf32>
  %1 = stablehlo.maximum %a, %0 : tensor<64x8xf32>
  %2 = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<f32>) -> tensor<64x8xf32>
  %3 = "stablehlo.scatter"(%2, %i, %u) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1],
      inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> ({
  ^bb0(%p: tensor<f32>, %q: tensor<f32>):
    %s = stablehlo.add %p, %q : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) : (tensor<64x8xf32>, tensor<16x1xi32>, tensor<16x8xf32>) -> tensor<64x8xf32>
  return %1, %3 : tensor<64x8xf32>, tensor<64x8xf32>
}"""
# A product that only a transpose reads, and that is sent elsewhere before.
SENT_BEFORE = """func.func public @main(%x: tensor<4x64xf32> loc("x"), %w: tensor<64x16xf32> loc("w"))
    -> tensor<16x4xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] :
      (tensor<4x64xf32>, tensor<64x16xf32>) -> tensor<4x16xf32>
  %1 = stablehlo.transpose %0, dims = [1, 0] : (tensor<4x16xf32>) -> tensor<16x4xf32>
  %2 = stablehlo.sine %1 : tensor<16x4xf32>
  return %2 : tensor<16x4xf32>
}"""
# A product that is scattered over one axis, and of which the pieces are reduced over another.
BESIDE = """func.func public @main(%x: tensor<16x64xf32> loc("x"), %w: tensor<64x16xf32> loc("w"))
    -> tensor<16x16xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] :
      (tensor<16x64xf32>, tensor<64x16xf32>) -> tensor<16x16xf32>
  %1 = stablehlo.sine %0 : tensor<16x16xf32>
  return %1 : tensor<16x16xf32>
}"""
# A layer that is split and one that is not: both read zeros of one shape, which are one array in HLO.
TWO_LAYERS = """func.func public @main(%x: tensor<64x16xf32> loc("x"), %y: tensor<64x16xf32> loc("y"))
    -> (tensor<64x16xf32>, tensor<64x16xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<64x16xf32>
  %0 = stablehlo.maximum %x, %zero : tensor<64x16xf32>
  %1 = stablehlo.maximum %y, %zero : tensor<64x16xf32>
  return %0, %1 : tensor<64x16xf32>, tensor<64x16xf32>
}"""


@pytest.mark.parametrize(
    ("program", "decisions"),
    [
        (ZEROS, ("a.1=data", "a.1=model", "u.0=data", "u.0=model")),
        (SENT_BEFORE, ("x.1=data", "x.0=data", "x.0=model")),
        (BESIDE, ("x.1=data", "x.1=model", "w.1=data")),
    ],
    ids=["zeros", "sent before a transpose", "beside"],
)
@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_compiles_to_what_is_promised(program: str, decisions: tuple[str, ...], form: str) -> None:
    source = source_of_text(program)
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    plan = strategy(case, *decisions)
    planned = emitted.on_cpu(case, case.collectives(plan))
    assert emitted.collectives(case, emitted.compiled(case, plan, form)) == planned != []


@pytest.mark.parametrize("decision", ["x.0=data", "y.1=model"])
def test_a_constant_with_many_readers_carries_no_sharding_from_one_to_another(decision: str) -> None:
    source = source_of_text(TWO_LAYERS)
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    plan = strategy(case, decision)
    assert emitted.collectives(case, emitted.compiled(case, plan, "hlo")) == case.collectives(plan) == []


def test_hlo_has_a_constraint_on_every_value_and_no_shardings_on_operations() -> None:
    source = source_of_text(SENT_BEFORE)
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    lowered = case.lowered(strategy(case, "x.1=data", "x.0=data", "x.0=model"))
    text = emit_hlo(source, lowered).decode()
    constraints = text.count('custom_call_target="Sharding"')
    assert constraints == emit_shardy(source, lowered, annotate="full").count(b"sdy.sharding_constraint") > 0
    operations = [line for line in text.splitlines() if " dot(" in line or " sine(" in line]
    assert operations and not any("sharding=" in line for line in operations)
