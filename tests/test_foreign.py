"""Programs of other dialects are refused by name, with the way out."""

from __future__ import annotations

import pytest
from programs import source_of_text

from toast_cli.base.errors import InputError

TEXT = "func.func @main(%a: tensor<8x4xf32>) -> tensor<8x4xf32> {{\n  {body}\n  return %0 : tensor<8x4xf32>\n}}"


@pytest.mark.parametrize(
    ("body", "what", "hint"),
    [
        ("%0 = arith.addf %a, %a : tensor<8x4xf32>", "arith.addf is not StableHLO", "lower the program"),
        ("%0 = tosa.abs %a : (tensor<8x4xf32>) -> tensor<8x4xf32>", "'tosa' not found", "lower the program"),
        (
            "%0 = stablehlo.abs %a : (tensor<8x4x!quant.uniform<i8:f32, 0.1:3>>) -> tensor<8x4xf32>",
            "unregistered dialect",
            "quantized types",
        ),
    ],
)
def test_another_dialect(body: str, what: str, hint: str) -> None:
    with pytest.raises(InputError) as refused:
        source_of_text(TEXT.format(body=body))
    assert what in refused.value.what.replace("`", "'")
    assert (refused.value.hint or "").startswith(hint)
    assert ":2:" in str(refused.value)


def test_what_xla_takes_is_taken() -> None:
    body = "%b = arith.constant dense<1.0> : tensor<8x4xf32>\n  %0 = stablehlo.add %a, %b : tensor<8x4xf32>"
    assert len(source_of_text(TEXT.format(body=body)).program.results) == 1


FOREIGN = """module attributes {{tt.device = #tt.device<a, b>}} {{
  llvm.module_flags [#llvm.mlir.module_flag<error, "Debug Info Version", 3 : i32>]
  func.func public @main(%a: tensor<8x4xf32> {{ttcore.kind = #ttcore.kind<input>, jax.buffer_donor = true}})
      -> (tensor<8x4xf32> {{tt.x = [#tt<y>]}}) attributes {{enzymexla.t = !enzymexla.t}} {{
    %c = stablehlo.constant dense<(1.0, 2.0)> : tensor<complex<f32>>
    %0 = stablehlo.add %a, %a {{plain = #tt<z>, mhlo.frontend_attributes = {{note = "#a!b"}}}} : tensor<8x4xf32>
    %1 = stablehlo.custom_call @f(%0) {{mhlo.backend_config = {{a = {value}}}, tt.w = #tt<v>}} : (tensor<8x4xf32>) -> tensor<8x4xf32>
    return %1 : tensor<8x4xf32>
  }}
}}"""  # noqa: E501


def test_attributes_of_other_dialects_are_taken_off() -> None:
    source = source_of_text(FOREIGN.format(value="1 : i32"))
    text = str(source.module)
    assert "tt" not in text.replace("attributes", "")
    assert "enzymexla" not in text
    assert "llvm" not in text
    assert 'note = "#a!b"' in text
    assert "backend_config = {a = 1 : i32}" in text
    assert source.program.arguments[0].donated


def test_what_a_custom_call_reads_is_not_taken_off() -> None:
    with pytest.raises(InputError, match="unregistered dialect"):
        source_of_text(FOREIGN.format(value="#tt<u>"))
