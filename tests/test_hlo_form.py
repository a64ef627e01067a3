"""HLO text partitions as promised where XLA's simplifications and propagation see other things than Shardy does."""

from __future__ import annotations

from dataclasses import replace

import emitted
import pytest
from emitted import strategy
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
# A product that adds nothing up: scores times a table of decays.
SCALED = """func.func public @main(%s: tensor<8x4x16x16xf32> loc("s"), %d: tensor<4x16x16xf32> loc("d"))
    -> tensor<4x16x16x8xf32> {
  %0 = stablehlo.sine %s : tensor<8x4x16x16xf32>
  %1 = stablehlo.dot_general %0, %d, batching_dims = [1, 3, 2] x [0, 1, 2], contracting_dims = [] x [] :
      (tensor<8x4x16x16xf32>, tensor<4x16x16xf32>) -> tensor<4x16x16x8xf32>
  %2 = stablehlo.cosine %1 : tensor<4x16x16x8xf32>
  return %2 : tensor<4x16x16x8xf32>
}"""
# A product of an image's points, taken as a sequence, that goes on in heads.
RESHAPED = """func.func public @main(%x: tensor<8x4x4x16xf32> loc("x"), %w: tensor<16x16xf32> loc("w"))
    -> tensor<8x16x2x8xf32> {
  %0 = stablehlo.sine %x : tensor<8x4x4x16xf32>
  %1 = stablehlo.reshape %0 : (tensor<8x4x4x16xf32>) -> tensor<8x16x16xf32>
  %2 = stablehlo.dot_general %1, %w, contracting_dims = [2] x [0] :
      (tensor<8x16x16xf32>, tensor<16x16xf32>) -> tensor<8x16x16xf32>
  %3 = stablehlo.reshape %2 : (tensor<8x16x16xf32>) -> tensor<8x16x2x8xf32>
  %4 = stablehlo.cosine %3 : tensor<8x16x2x8xf32>
  return %4 : tensor<8x16x2x8xf32>
}"""
# A row that is repeated for each of many.
REPEATED = """func.func public @main(%x: tensor<16x8xf32> loc("x"), %b: tensor<8xf32> loc("b")) -> tensor<16x8xf32> {
  %0 = stablehlo.sine %b : tensor<8xf32>
  %1 = stablehlo.broadcast_in_dim %0, dims = [1] : (tensor<8xf32>) -> tensor<16x8xf32>
  %2 = stablehlo.multiply %x, %1 : tensor<16x8xf32>
  return %2 : tensor<16x8xf32>
}"""


# Two products that are added up, transposed, and added to a third.
TRANSPOSED_SUM = """func.func public @main(%x: tensor<64x16xf32> loc("x"), %y: tensor<64x8xf32> loc("y"))
    -> tensor<8x16xf32> {
  %0 = stablehlo.dot_general %x, %y, contracting_dims = [0] x [0] :
      (tensor<64x16xf32>, tensor<64x8xf32>) -> tensor<16x8xf32>
  %1 = stablehlo.sine %y : tensor<64x8xf32>
  %2 = stablehlo.dot_general %x, %1, contracting_dims = [0] x [0] :
      (tensor<64x16xf32>, tensor<64x8xf32>) -> tensor<16x8xf32>
  %3 = stablehlo.add %0, %2 : tensor<16x8xf32>
  %4 = stablehlo.transpose %3, dims = [1, 0] : (tensor<16x8xf32>) -> tensor<8x16xf32>
  %5 = stablehlo.sine %x : tensor<64x16xf32>
  %6 = stablehlo.dot_general %y, %5, contracting_dims = [0] x [0] :
      (tensor<64x8xf32>, tensor<64x16xf32>) -> tensor<8x16xf32>
  %7 = stablehlo.add %4, %6 : tensor<8x16xf32>
  return %7 : tensor<8x16xf32>
}"""
# A product with what a transpose makes.
TURNED_OPERAND = """func.func public @main(%x: tensor<64x16xf32> loc("x"), %w: tensor<8x16xf32> loc("w"))
    -> tensor<64x8xf32> {
  %0 = stablehlo.sine %w : tensor<8x16xf32>
  %1 = stablehlo.transpose %0, dims = [1, 0] : (tensor<8x16xf32>) -> tensor<16x8xf32>
  %2 = stablehlo.dot_general %x, %1, contracting_dims = [1] x [0] :
      (tensor<64x16xf32>, tensor<16x8xf32>) -> tensor<64x8xf32>
  return %2 : tensor<64x8xf32>
}"""
# Elementwise work that is read as it lies, and through a view: transposed, by a product with a vector that adds up over
# its first dimension, and with a dimension of size 1 in front.
VIEWED = """func.func public @main(%x: tensor<64x16xf32> loc("x"), %v: tensor<64xf32> loc("v"))
    -> (tensor<64x16xf32>, RESULT) {
  %0 = stablehlo.sine %x : tensor<64x16xf32>
  %1 = VIEW
  %2 = stablehlo.cosine %1 : RESULT
  return %0, %2 : tensor<64x16xf32>, RESULT
}"""
VIEWS = {
    "transpose": ("stablehlo.transpose %0, dims = [1, 0] : (tensor<64x16xf32>) -> RESULT", "tensor<16x64xf32>"),
    "dot": (
        "stablehlo.dot_general %0, %v, contracting_dims = [0] x [0] : (tensor<64x16xf32>, tensor<64xf32>) -> RESULT",
        "tensor<16xf32>",
    ),
    "reshape": ("stablehlo.reshape %0 : (tensor<64x16xf32>) -> RESULT", "tensor<1x64x16xf32>"),
}


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


def test_a_transposed_product_is_constrained_behind_the_transpose() -> None:
    """XLA:TPU folds the two, or moves the transpose behind what follows: a sharding on either is one of other
    dimensions."""
    source = source_of_text(SENT_BEFORE)
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    lines = emit_hlo(source, case.lowered(strategy(case, "w.1=model"))).decode().splitlines()
    (product,) = (line for line in lines if " dot(" in line)
    (turned,) = (line for line in lines if " transpose(" in line)
    assert "sharding=" not in product + turned
    name = turned.split()[0]
    assert any(f"custom-call({name})" in line and "devices=[2,1,4]" in line for line in lines)


@pytest.mark.parametrize(
    ("program", "decision", "operation", "constrained"),
    [(SCALED, "s.0=data", " dot(", True), (REPEATED, "x.0=data", " broadcast(", False)],
    ids=["product", "broadcast"],
)
def test_what_xla_writes_otherwise_before_it_partitions_has_no_sharding(
    program: str, decision: str, operation: str, constrained: bool
) -> None:
    """XLA makes such a product an elementwise one, and moves broadcasts past reshapes: a sharding on either is left on
    arrays that lie otherwise. What reads a broadcast tells how it lies."""
    source = source_of_text(program)
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    lines = emit_hlo(source, case.lowered(strategy(case, decision))).decode().splitlines()
    (made,) = (line for line in lines if operation in line)
    assert "sharding=" not in made
    name = made.split()[0]
    (read,) = (line for line in lines if f"({name})" in line or f" {name})" in line)
    assert ("custom-call" in read) == constrained
    assert "devices=[" in read


@pytest.mark.parametrize("gathered", [True, False])
def test_a_product_of_what_a_reshape_makes_has_no_sharding_of_its_own(gathered: bool) -> None:
    """XLA:TPU reshapes behind the product, and takes its sharding for that of one with more dimensions: a U-net's step
    was two thirds longer. What reads it as it lies tells how it does; a constraint would keep two reshapes apart."""
    source = source_of_text(RESHAPED)
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    lowered = case.lowered(strategy(case, "x.0=data"))
    (number,) = (k for k, op in enumerate(source.program.ops) if op.name == "stablehlo.dot_general")
    ((reader, _),) = source.program.users[source.program.ops[number].results[0]]
    if gathered:
        lowered = replace(lowered, required={**lowered.required, (reader, 0): ((), (), ())})
    lines = emit_hlo(source, lowered).decode().splitlines()
    (product,) = (line for line in lines if " dot(" in line)
    assert "sharding=" not in product
    (read,) = (line for line in lines if f"({product.split()[0]})" in line)
    assert ("custom-call" in read) == gathered
    assert "devices=[4," in read


@pytest.mark.parametrize("name", VIEWS)
def test_xla_moves_no_view_past_elementwise_work(name: str) -> None:
    """XLA:TPU makes the work anew behind the view, and leaves its sharding on what lies otherwise: of gradients of
    gradients, whole activations were exchanged."""
    view, result = VIEWS[name]
    source = source_of_text(VIEWED.replace("VIEW", view).replace("RESULT", result))
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    lines = emit_hlo(source, case.lowered(strategy(case, "x.0=data"))).decode().splitlines()
    (constraint,) = (line for line in lines if "custom-call(sine" in line)
    assert "sharding={devices=[4,1,2]<=[8]" in constraint
    (view,) = (line for line in lines if f" {name}({constraint.split()[0]}" in line)
    if name == "transpose":
        assert any(f"custom-call({view.split()[0]})" in line and "devices=[1,4,2]" in line for line in lines)


def test_a_transpose_that_goes_into_a_product_has_no_constraint_behind() -> None:
    source = source_of_text(TURNED_OPERAND)
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    lines = emit_hlo(source, case.lowered(strategy(case, "x.0=data"))).decode().splitlines()
    (turned,) = (line for line in lines if " transpose(" in line)
    (product,) = (line for line in lines if " dot(" in line)
    assert f", {turned.split()[0]})" in product


def test_a_transposed_sum_of_partial_products_has_no_constraint() -> None:
    """XLA:TPU reduces it together with what it is added to, unless a constraint keeps the transpose behind it."""
    source = source_of_text(TRANSPOSED_SUM)
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    lines = emit_hlo(source, case.lowered(strategy(case, "x.0=data", "y.0=data"))).decode().splitlines()
    (turned,) = (line for line in lines if " transpose(" in line)
    assert " transpose(add" in turned
    assert not any(f"custom-call({turned.split()[0]})" in line for line in lines)
