"""What the body of a reduction may read from outside; the corpus (`cases.bodies`) has the programs that may."""

from __future__ import annotations

import pytest
from cases.bodies import OUTSIDE, reading_outside
from programs import source_of_text

from toast_cli.base.errors import InputError


def test_a_body_reads_only_constants_from_outside() -> None:
    operation, result = OUTSIDE["reduce"]
    program = reading_outside(operation, result, "stablehlo.custom_call @number() : () -> tensor<f32>")
    with pytest.raises(InputError, match=r"the body of stablehlo.reduce reads a value that is computed outside it"):
        source_of_text(program)
