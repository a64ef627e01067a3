"""Programs of other dialects are refused by name, with the way out."""

from __future__ import annotations

import pytest
from programs import source_of_text

from toast_cli.errors import InputError

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


def test_an_attribute_of_another_dialect_is_refused() -> None:
    text = TEXT.format(body="%0 = stablehlo.add %a, %a {plain = #tt<z>} : tensor<8x4xf32>")
    with pytest.raises(InputError, match="unregistered dialect") as refused:
        source_of_text(text)
    assert "without attributes of other dialects" in (refused.value.hint or "")


def test_declarations_of_other_dialects_are_taken_off() -> None:
    declared = 'llvm.module_flags [#llvm.mlir.module_flag<error, "Debug Info Version", 3 : i32>]\n'
    source = source_of_text(declared + TEXT.format(body="%0 = stablehlo.add %a, %a : tensor<8x4xf32>"))
    assert "llvm" not in str(source.module)
