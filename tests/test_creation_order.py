"""Operations of HLO come in the order in which they were made, which their numbers tell."""

from __future__ import annotations

from toast_cli import xla
from toast_cli.frontend.convert import in_creation_order
from toast_cli.frontend.formats import parse_here

# As XLA prints it: all that the first result needs first, and the second layer's gradient after the first one's update.
STEP = b"""HloModule step, entry_computation_layout={(f32[4]{0}, f32[4]{0})->(f32[4]{0}, f32[4]{0})}

ENTRY main.9 {
  a.1 = f32[4]{0} parameter(0)
  sine.3 = f32[4]{0} sine(a.1)
  b.1 = f32[4]{0} parameter(1)
  multiply.4 = f32[4]{0} multiply(sine.3, b.1)
  cosine.5 = f32[4]{0} cosine(multiply.4)
  multiply.7 = f32[4]{0} multiply(cosine.5, sine.3)
  subtract.9 = f32[4]{0} subtract(a.1, multiply.7)
  multiply.6 = f32[4]{0} multiply(cosine.5, b.1)
  subtract.8 = f32[4]{0} subtract(b.1, multiply.6)
  ROOT tuple.10 = (f32[4]{0}, f32[4]{0}) tuple(subtract.9, subtract.8)
}
"""
IN_ORDER = ["sine.3", "multiply.4", "cosine.5", "multiply.6", "subtract.8", "multiply.7", "subtract.9"]


def names(data: bytes) -> list[str]:
    _, module = parse_here(data, "<test>")
    found = [xla.location_name(view.operation.location) for view in module.body.operations[0].regions[0].blocks[0]]
    return [name for name in found if "." in name and not name.startswith("tuple")]


def test_numbers_of_one_name_tell_the_order() -> None:
    assert sorted(names(STEP)) == sorted(IN_ORDER)
    places = {name: place for place, name in enumerate(names(STEP))}
    assert places["multiply.6"] < places["multiply.7"] and places["subtract.8"] < places["subtract.9"]


def test_numbers_that_say_otherwise_than_what_is_read_are_not_believed() -> None:
    backwards = STEP.replace(b"multiply.4", b"multiply.99").replace(b"sine.3", b"multiply.98")
    places = {name: place for place, name in enumerate(names(backwards))}
    assert places["multiply.98"] < places["multiply.99"] < places["cosine.5"] < places["multiply.6"]


def test_what_loops_hold_is_sorted() -> None:
    text = """func.func public @main(%n: tensor<i32>, %x: tensor<4xf32>) -> tensor<4xf32> {
      %0:2 = stablehlo.while(%i = %n, %y = %x) : tensor<i32>, tensor<4xf32>
      cond {
        %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %c : tensor<i1>
      } do {
        %b = stablehlo.sine %y : tensor<4xf32> loc("sine.9")
        %a = stablehlo.sine %y : tensor<4xf32> loc("sine.8")
        %s = stablehlo.add %a, %b : tensor<4xf32> loc("add.1")
        stablehlo.return %i, %s : tensor<i32>, tensor<4xf32>
      }
      return %0#1 : tensor<4xf32>
    }"""
    module = xla.parse_module(xla.make_context(), text.encode())
    in_creation_order(module)
    found = [xla.location_name(one.location) for one in xla.walk_ops(module.operation, "stablehlo.sine")]
    assert module.operation.verify() and found == ["sine.8", "sine.9"]
