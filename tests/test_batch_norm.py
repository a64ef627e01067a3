"""Batch normalisations are written out, compute what XLA computes, and can be split."""

from __future__ import annotations

import numpy as np
import pytest
from normalised_programs import main_of, names, normalised
from programs import source_of_text
from run_here import run_program

from toast_cli import xla

X, C = "tensor<4x6x5xf32>", "tensor<6xf32>"
HOW = "{epsilon = 1.0e-3 : f32, feature_index = 1 : i64}"
CALLS = {
    "training": (
        f'%y, %m, %v = "stablehlo.batch_norm_training"(%x, %s, %o) {HOW} : ({X}, {C}, {C}) -> ({X}, {C}, {C})',
        (X, C, C),
    ),
    "inference": (
        f'%y = "stablehlo.batch_norm_inference"(%x, %s, %o, %a, %b) {HOW} : ({X}, {C}, {C}, {C}, {C}) -> {X}',
        (X,),
    ),
    "gradient": (
        f'%y, %m, %v = "stablehlo.batch_norm_grad"(%x, %s, %a, %b, %g) {HOW}'
        f" : ({X}, {C}, {C}, {C}, {X}) -> ({X}, {C}, {C})",
        (X, C, C),
    ),
}


@pytest.mark.parametrize("which", CALLS)
def test_numbers_do_not_change(which: str) -> None:
    call, kinds = CALLS[which]
    results = ", ".join(("%y", "%m", "%v")[: len(kinds)])
    text = f"""func.func public @main(%x: {X}, %s: {C}, %o: {C}, %a: {C}, %b: {C}, %g: {X}) -> ({", ".join(kinds)}) {{
      {call}
      return {results} : {", ".join(kinds)} }}"""
    rng = np.random.default_rng(0)
    inputs = [rng.uniform(0.5, 1.5, shape).astype("f4") for shape in ((4, 6, 5), (6,), (6,), (6,), (6,), (4, 6, 5))]
    module = normalised(text).module
    shapes = [tuple(xla.ir.ShapedType(t).shape) for t in main_of(module).type.results]
    assert not any("batch_norm" in name for name in names(module))
    there, here = (
        run_program(xla.write_bytecode(m), inputs, shapes, 1, shardy=True)
        for m in (xla.parse_module(xla.make_context(), text), module)
    )
    for wanted, got in zip(there, here, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_layer_normalisation_of_pytorch_can_be_split_by_rows() -> None:
    """PyTorch/XLA normalises the rows of [batch × sequence, width] as the features of [1, rows, width]."""
    program = source_of_text("""
    func.func public @main(%x: tensor<64x16xf32>, %one: tensor<64xf32>) -> tensor<64x16xf32> {
      %0 = stablehlo.reshape %x : (tensor<64x16xf32>) -> tensor<1x64x16xf32>
      %y, %m, %v = "stablehlo.batch_norm_training"(%0, %one, %one) {epsilon = 1.0e-5 : f32, feature_index = 1 : i64}
        : (tensor<1x64x16xf32>, tensor<64xf32>, tensor<64xf32>) -> (tensor<1x64x16xf32>, tensor<64xf32>, tensor<64xf32>)
      %1 = stablehlo.reshape %y : (tensor<1x64x16xf32>) -> tensor<64x16xf32>
      return %1 : tensor<64x16xf32> }""").program
    assert not any(op.opaque for op in program.ops)
    sums = [op.rule for op in program.ops if op.name == "stablehlo.reduce"]
    assert len(sums) == 2 and all({rule.sizes[f] for f in rule.reduction} == {16, 1} for rule in sums)
