"""Programs on wide numbers instead of narrow ones: what is rewritten, and what the numbers check sees because of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import arg
from run_here import run_program

from toast_cli import xla
from toast_cli.ask_xla.numbers import ResultError, compare_here, widened

BF16 = jnp.bfloat16
MANY = np.linspace(-3, 3, 200).astype(BF16)

# name, function of one array, type of the argument: all give numbers that a bf16 holds.
PROGRAMS: list[tuple[str, Any, Any]] = [
    ("a product", lambda x: x @ x.T, BF16),
    ("a constant of many numbers", lambda x: x[:, :1] * 0 + jnp.asarray(MANY), BF16),
    ("infinities", lambda x: jnp.where(x > 0, -jnp.inf, jnp.asarray([jnp.nan] + [1.0] * 15, BF16)), BF16),
    ("a reduction with a region", lambda x: lax.reduce(x, np.array(-np.inf, BF16), lax.max, (0,)), BF16),
    ("a loop", lambda x: lax.fori_loop(0, 3, lambda _, c: c * 0.5, x), BF16),
    ("half precision", lambda x: x * jnp.float16(0.5) + jnp.float16(jnp.inf), jnp.float16),
    ("eight bits", lambda x: x.astype(jnp.float8_e4m3fn).astype(BF16) * 2, BF16),
]


def module_of(run: Any, *shapes: Any) -> Any:
    text = jax.jit(run).lower(*shapes).as_text()
    return xla.parse_module(xla.make_context(), text)


def test_conversions_that_change_nothing_say_no_sharding() -> None:
    """On a result of a barrier XLA would take it for that of all results, of whatever rank."""
    split = '{mhlo.sharding = "{devices=[2]<=[2]}"}'
    text = f"""func.func @main(%a: tensor<4xbf16>, %b: tensor<2x4xbf16>) -> (tensor<4xf32>, tensor<4xf32>) {{
      %0:2 = stablehlo.optimization_barrier %a, %b : tensor<4xbf16>, tensor<2x4xbf16>
      %1 = stablehlo.convert %0#0 {split} : (tensor<4xbf16>) -> tensor<4xf32>
      %2 = stablehlo.add %1, %1 {split} : tensor<4xf32>
      return %1, %2 : tensor<4xf32>, tensor<4xf32>
    }}"""
    wide = widened(xla.parse_module(xla.make_context(), text))
    assert wide and "bf16" not in wide
    assert [line.count("mhlo.sharding") for line in wide.splitlines() if "convert" in line or "add" in line] == [0, 1]


@pytest.mark.parametrize(("run", "dtype"), [case[1:] for case in PROGRAMS], ids=[case[0] for case in PROGRAMS])
def test_the_same_program_on_wide_numbers(run: Any, dtype: Any) -> None:
    text = widened(module_of(run, arg(8, 16, dtype=dtype)))
    assert text is not None
    module = xla.parse_module(xla.make_context(), text)
    assert not any(kind.startswith(("bf", "f16", "f8")) for kind in xla.element_types(module))
    x = np.round(np.linspace(-4, 4, 128).reshape(8, 16)).astype(np.float32)
    shape, _ = xla.shape_and_element_type(xla.main_function(module).type.results[0]) or ((), "")
    (found,) = run_program(xla.write_bytecode(module), [x], [shape], 1, shardy=True)
    expected = np.asarray(run(jnp.asarray(x, dtype)), np.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-2)


def test_who_looks_at_the_bits_of_a_narrow_number_is_left_alone() -> None:
    assert widened(module_of(lambda x: lax.bitcast_convert_type(x, jnp.int16), arg(8, dtype=BF16))) is None
    assert widened(module_of(lambda x: lax.bitcast_convert_type(x, jnp.int32), arg(8))) is not None


def judged(whole: Any, split: Any) -> list[ResultError]:
    texts = [jax.jit(run).lower(arg(64, 8, dtype=BF16)).as_text().encode() for run in (whole, split)]
    return compare_here(*texts, 1, 0, "stablehlo", 60.0)


def total(x: Any) -> Any:
    return jnp.sum(x, 0, dtype=BF16)


def test_a_wrong_part_as_small_as_rounding_is_found() -> None:
    """One row of 64 twice: some two percent, where bf16 allows four."""
    (error,) = judged(total, lambda x: total(x) + x[0] * jnp.asarray(0.1, BF16))
    assert error.wrong
    assert error.type == "bf16[8]"


def test_sums_that_cancel_out_are_no_error() -> None:
    """Partial sums far larger than their sum, each rounded to bf16, as devices do before they add up."""

    def in_parts(x: Any) -> Any:
        large = x[:32] + jnp.asarray(16.0, BF16)
        return (total(large) - jnp.asarray(512.0, BF16)) + total(x[32:])

    (error,) = judged(lambda x: total(x.astype(jnp.float32)).astype(BF16), in_parts)
    assert not error.wrong
