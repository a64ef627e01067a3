"""The one number of a constant, as it is written."""

from __future__ import annotations

import pytest

from toast_cli import xla

NUMBERS = {
    "dense<2> : tensor<3xui8>": "2",
    "dense<true> : tensor<i1>": "true",
    "dense<0.000000e+00> : tensor<3xbf16>": "0.000000e+00",
    "dense<(0.000000e+00,3.000000e+00)> : tensor<2x2xcomplex<f32>>": "(0.000000e+00,3.000000e+00)",
    "dense<[(0.000000e+00,3.000000e+00), (1.000000e+00,0.000000e+00)]> : tensor<2xcomplex<f32>>": None,
    "dense<[0, 1]> : tensor<2xi32>": None,
    "dense<> : tensor<0xf32>": None,
}


@pytest.mark.parametrize("literal", NUMBERS)
def test_the_number_of_a_constant_is_as_it_is_written_where_it_is_one(literal: str) -> None:
    kind = literal.split(" : ")[1]
    text = f"func.func @main() -> {kind} {{ %0 = stablehlo.constant {literal}\n return %0 : {kind} }}"
    module = xla.parse_module(xla.make_context(), text)
    (constant,) = xla.walk_ops(module, "stablehlo.constant")
    assert xla.constant_number(constant) == NUMBERS[literal]
