"""Bodies of reductions, sorts and scatters that read constants from outside: every form holds them inside."""

from __future__ import annotations

import pytest
from programs import Case, evaluator_of, round_mesh, source_of_text
from spmd_cases import wrong_in

from toast_cli.emit import emit
from toast_cli.errors import InputError
from toast_cli.plan.decisions import Shard

A, V = "tensor<16x8xf32>", "tensor<16xf32>"
BODIES = {
    "reduce": (
        f"""%0 = stablehlo.reduce(%a init: %zero) across dimensions = [1] : ({A}, tensor<f32>) -> {V}
          reducer(%x: tensor<f32>, %y: tensor<f32>) {{
            %m = stablehlo.maximum %y, %bound : tensor<f32>
            %s = stablehlo.add %x, %m : tensor<f32>
            stablehlo.return %s : tensor<f32>
          }}""",
        V,
    ),
    "sort": (
        f"""%0 = "stablehlo.sort"(%a) <{{dimension = 1 : i64, is_stable = true}}> ({{
          ^bb0(%x: tensor<f32>, %y: tensor<f32>):
            %m = stablehlo.maximum %x, %bound : tensor<f32>
            %n = stablehlo.maximum %y, %bound : tensor<f32>
            %c = stablehlo.compare LT, %m, %n : (tensor<f32>, tensor<f32>) -> tensor<i1>
            stablehlo.return %c : tensor<i1>
          }}) : ({A}) -> {A}""",
        A,
    ),
    "map": (
        f"""%0 = "stablehlo.map"(%a) <{{dimensions = array<i64: 0, 1>}}> ({{
          ^bb0(%x: tensor<f32>):
            %m = stablehlo.maximum %x, %bound : tensor<f32>
            stablehlo.return %m : tensor<f32>
          }}) : ({A}) -> {A}""",
        A,
    ),
    "reduce_window": (
        f"""%0 = "stablehlo.reduce_window"(%a, %zero) <{{window_dimensions = array<i64: 1, 2>,
            window_strides = array<i64: 1, 2>}}> ({{
          ^bb0(%x: tensor<f32>, %y: tensor<f32>):
            %m = stablehlo.maximum %y, %bound : tensor<f32>
            %s = stablehlo.add %x, %m : tensor<f32>
            stablehlo.return %s : tensor<f32>
          }}) : ({A}, tensor<f32>) -> tensor<16x4xf32>""",
        "tensor<16x4xf32>",
    ),
    "select_and_scatter": (
        f"""%u = stablehlo.slice %a [0:16, 0:4] : ({A}) -> tensor<16x4xf32>
          %0 = "stablehlo.select_and_scatter"(%a, %u, %zero) <{{window_dimensions = array<i64: 1, 2>,
            window_strides = array<i64: 1, 2>}}> ({{
          ^bb0(%x: tensor<f32>, %y: tensor<f32>):
            %m = stablehlo.multiply %x, %bound : tensor<f32>
            %n = stablehlo.multiply %y, %bound : tensor<f32>
            %c = stablehlo.compare GE, %m, %n : (tensor<f32>, tensor<f32>) -> tensor<i1>
            stablehlo.return %c : tensor<i1>
          }}, {{
          ^bb0(%x: tensor<f32>, %y: tensor<f32>):
            %m = stablehlo.maximum %y, %bound : tensor<f32>
            %s = stablehlo.add %x, %m : tensor<f32>
            stablehlo.return %s : tensor<f32>
          }}) : ({A}, tensor<16x4xf32>, tensor<f32>) -> {A}""",
        A,
    ),
    "scatter": (
        f"""%i = stablehlo.constant dense<[[3], [1]]> : tensor<2x1xi32>
          %u = stablehlo.slice %a [0:2, 0:8] : ({A}) -> tensor<2x8xf32>
          %0 = "stablehlo.scatter"(%a, %i, %u) <{{scatter_dimension_numbers = #stablehlo.scatter<
            update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],
            index_vector_dim = 1>}}> ({{
          ^bb0(%x: tensor<f32>, %y: tensor<f32>):
            %m = stablehlo.maximum %y, %bound : tensor<f32>
            %s = stablehlo.add %x, %m : tensor<f32>
            stablehlo.return %s : tensor<f32>
          }}) : ({A}, tensor<2x1xi32>, tensor<2x8xf32>) -> {A}""",
        A,
    ),
}
# What a body reads as its bound: a constant, and what is computed of several.
BOUNDS = {
    "a constant": "%bound = stablehlo.constant dense<0.5> : tensor<f32>",
    "computed": "%h = stablehlo.constant dense<0.5> : tensor<f32>\n%bound = stablehlo.add %h, %zero : tensor<f32>",
}


def program(body: str, bound: str) -> str:
    operation, kind = BODIES[body]
    return f"""func.func public @main(%a: {A}, %t: tensor<f32>) -> ({kind}, tensor<f32>) {{
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      {bound}
      {operation}
      return %0, %bound : {kind}, tensor<f32>
    }}"""


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("body", BODIES)
def test_every_form_has_the_numbers(body: str, bound: str) -> None:
    source = source_of_text(program(body, BOUNDS[bound]))
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    split = [(d,) for d in case.problem.decisions.choices if isinstance(d, Shard) and d.axis == 0]
    for form in ("stablehlo", "hlo", "spmd"):
        for plan in split[:2]:
            written = emit(source, case.lowered(plan), form)
            assert wrong_in(source, written, 8, "hlo" if form == "hlo" else "stablehlo") == [], (form, plan)


def test_a_body_reads_nothing_else_from_outside() -> None:
    with pytest.raises(InputError, match=r"the body of stablehlo.reduce reads a value that is computed outside it"):
        source_of_text(program("reduce", "%bound = stablehlo.negate %t : tensor<f32>"))
