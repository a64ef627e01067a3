"""Integers and indices that a program computes from nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from normalised_programs import main_of, names, normalised, parsed
from run_here import run_program

from toast_cli import xla
from toast_cli.frontend.known_numbers import MOST_ELEMENTS, counts_along, known_numbers

# Functions of nothing, as indices are made.
KNOWN: dict[str, Callable[[], Any]] = {
    "beams": lambda: jnp.reshape(jax.lax.iota("int32", 20) // 4, (5, 4)),
    "floor of negative numbers": lambda: (jax.lax.iota("int32", 20) - 10) // 3,
    "remainder of negative numbers": lambda: (jax.lax.iota("int32", 20) - 10) % 3,
    "truncated": lambda: jax.lax.div(jax.lax.iota("int32", 20) - 10, jnp.int32(3)),
    "small integers wrap": lambda: jax.lax.iota("int8", 100) * jnp.int8(3),
    "the least integer by -1": lambda: jax.lax.div(jax.lax.iota("int32", 4) + jnp.int32(-(2**31)), jnp.int32(-1)),
    "unsigned": lambda: jax.lax.iota("uint32", 7) - jnp.uint32(3),
    "widened": lambda: jax.lax.iota("uint8", 7).astype("int32") - 3,
    "rows and columns": lambda: jax.lax.broadcasted_iota("int32", (3, 4), 1).T * 5,
    "pieces": lambda: jnp.concatenate([jax.lax.iota("int32", 9)[2:8:2], jnp.array([7, 5], "int32")]),
    "negative indices": lambda: jnp.where((i := jax.lax.iota("int32", 6) - 2) < 0, i + 6, i),
    "truth": lambda: ~((jax.lax.iota("int32", 6) > 1) & (jax.lax.iota("int32", 6) != 4)),
    "rows that repeat, however many": lambda: jax.lax.broadcasted_iota("int32", (3, MOST_ELEMENTS, 1), 0) * 2 + 1,
    "bounds": lambda: jnp.clip(jax.lax.iota("int32", 9), 2, 5) | 8,
}
UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "an argument": lambda x: jax.lax.iota("int32", 4) + x,
    "floats": lambda x: jax.lax.iota("float32", 4).astype("int32"),
    "large": lambda x: jax.lax.iota("int32", MOST_ELEMENTS + 1) + 1,
    "by zero": lambda x: jax.lax.div(jnp.int32(4), jax.lax.iota("int32", 4)),
}


def result_of(run: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """The normalised module of a function, and what it returns."""
    module = normalised(jax.jit(run).lower(*arguments).as_text()).module
    block = main_of(module).regions[0].blocks[0]
    return module, block.operations[len(block.operations) - 1].operands[0]


@pytest.mark.parametrize("run", KNOWN.values(), ids=KNOWN)
def test_what_is_computed_from_nothing_is_known(run: Callable[[], Any]) -> None:
    _module, value = result_of(run)
    found = known_numbers(value)
    assert found is not None
    expected = np.asarray(run())
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("run", UNKNOWN.values(), ids=UNKNOWN)
def test_what_depends_on_data_is_not(run: Callable[[Any], Any]) -> None:
    _module, value = result_of(run, jax.ShapeDtypeStruct((4,), jnp.int32))
    assert known_numbers(value) is None


# -- the one number of a constant, as it is written


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


# -- gathers and scatters whose index counts along a batch have the batch in common with their indices


# What indices of [5, 1] count along dimension 0 are made of: as JAX up to 0.4.30 and as PyTorch/XLA write it.
COUNTS = {
    "iota": "%n = stablehlo.iota dim = 0 : tensor<5x1xi32>",
    "constant": """%k = stablehlo.constant dense<[0, 1, 2, 3, 4]> : tensor<5xi32>
      %n = stablehlo.broadcast_in_dim %k, dims = [0] : (tensor<5xi32>) -> tensor<5x1xi32>""",
    "not negative": """%k = stablehlo.iota dim = 0 : tensor<5xi32>
      %o = stablehlo.constant dense<0> : tensor<5xi32>
      %five = stablehlo.constant dense<5> : tensor<5xi32>
      %less = stablehlo.compare LT, %k, %o : (tensor<5xi32>, tensor<5xi32>) -> tensor<5xi1>
      %up = stablehlo.add %k, %five : tensor<5xi32>
      %w = stablehlo.select %less, %up, %k : tensor<5xi1>, tensor<5xi32>
      %n = stablehlo.reshape %w : (tensor<5xi32>) -> tensor<5x1xi32>""",
}
COUNTS["a floor division"] = """%k = stablehlo.iota dim = 0 : tensor<20xi32>
      %four = stablehlo.constant dense<4> : tensor<20xi32>
      %o = stablehlo.constant dense<0> : tensor<20xi32>
      %one = stablehlo.constant dense<1> : tensor<20xi32>
      %q = stablehlo.divide %k, %four : tensor<20xi32>
      %s = stablehlo.sign %k : tensor<20xi32>
      %t = stablehlo.sign %four : tensor<20xi32>
      %d = stablehlo.compare NE, %s, %t : (tensor<20xi32>, tensor<20xi32>) -> tensor<20xi1>
      %r = stablehlo.remainder %k, %four : tensor<20xi32>
      %e = stablehlo.compare NE, %r, %o : (tensor<20xi32>, tensor<20xi32>) -> tensor<20xi1>
      %both = stablehlo.and %d, %e : tensor<20xi1>
      %l = stablehlo.subtract %q, %one : tensor<20xi32>
      %f = stablehlo.select %both, %l, %q : tensor<20xi1>, tensor<20xi32>
      %g = stablehlo.reshape %f : (tensor<20xi32>) -> tensor<5x4xi32>
      %h = stablehlo.slice %g [0:5, 0:1] : (tensor<5x4xi32>) -> tensor<5x1xi32>
      %n = stablehlo.convert %h : tensor<5x1xi32>"""
DOES_NOT_COUNT = {
    "another order": "%n = stablehlo.constant dense<[[0], [1], [3], [2], [4]]> : tensor<5x1xi32>",
    "one row": "%n = stablehlo.constant dense<2> : tensor<5x1xi32>",
    "the other way": """%k = stablehlo.iota dim = 0 : tensor<5x1xi32>
      %n = stablehlo.negate %k : tensor<5x1xi32>""",
}
GATHER = """
func.func public @main(%x: tensor<5x7x3xf32>, %i: tensor<5x1xi32>, %u: tensor<5x3xf32>) -> tensor<5x3xf32> {{
  {counts}
  %j = stablehlo.concatenate %n, %i, dim = 1 : (tensor<5x1xi32>, tensor<5x1xi32>) -> tensor<5x2xi32>
  %0 = "stablehlo.gather"(%x, %j) {{dimension_numbers = #stablehlo.gather<offset_dims = [1],
    collapsed_slice_dims = [0, 1], start_index_map = [0, 1], index_vector_dim = 1>, slice_sizes = array<i64: 1, 1, 3>}}
    : (tensor<5x7x3xf32>, tensor<5x2xi32>) -> tensor<5x3xf32>
  return %0 : tensor<5x3xf32> }}"""
SCATTER = """
func.func public @main(%x: tensor<5x7x3xf32>, %i: tensor<5x1xi32>, %u: tensor<5x3xf32>) -> tensor<5x7x3xf32> {{
  {counts}
  %j = stablehlo.concatenate %n, %i, dim = 1 : (tensor<5x1xi32>, tensor<5x1xi32>) -> tensor<5x2xi32>
  %0 = "stablehlo.scatter"(%x, %j, %u) ({{
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %1 = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }}) {{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0, 1],
    scatter_dims_to_operand_dims = [0, 1], index_vector_dim = 1>}}
    : (tensor<5x7x3xf32>, tensor<5x2xi32>, tensor<5x3xf32>) -> tensor<5x7x3xf32>
  return %0 : tensor<5x7x3xf32> }}"""


def same_numbers(text: str) -> str:
    """The normalised program as text; it computes what the one given does."""
    rng = np.random.default_rng(0)
    inputs = [
        rng.normal(size=(5, 7, 3)).astype("f4"),
        rng.integers(0, 7, (5, 1)).astype("i4"),
        rng.normal(size=(5, 3)).astype("f4"),
    ]
    module = normalised(text).module
    shapes = [tuple(xla.ir.ShapedType(t).shape) for t in main_of(module).type.results]
    there, here = (
        run_program(xla.write_bytecode(m), inputs, shapes, 1, shardy=True)
        for m in (xla.parse_module(xla.make_context(), text), module)
    )
    np.testing.assert_array_equal(there[0], here[0])
    return str(module)


@pytest.mark.parametrize("program", [GATHER, SCATTER], ids=["gather", "scatter"])
@pytest.mark.parametrize("counts", [*COUNTS, *DOES_NOT_COUNT])
def test_parts_that_count_become_batching_dimensions(program: str, counts: str) -> None:
    text = same_numbers(program.format(counts=(COUNTS | DOES_NOT_COUNT)[counts]))
    assert ("indices_batching_dims = [0]" in text) == (counts in COUNTS)
    assert ("tensor<5x1xi32>, tensor<5x3xf32>) -> " in text or "tensor<5x7x3xf32>, tensor<5x1xi32>" in text) == (
        counts in COUNTS
    )


def test_a_diagonal_has_one_part_left() -> None:
    """x[n, n] counts along the same dimension twice."""
    text = GATHER.replace("tensor<5x7x3xf32>", "tensor<5x5x3xf32>").format(counts=COUNTS["iota"])
    text = text.replace("concatenate %n, %i", "concatenate %n, %n")
    found = normalised(text).module
    assert "operand_batching_dims = [0]" in str(found) and "start_index_map = [1]" in str(found)
    assert names(found).count("gather") == 1


def test_counting_outside_of_loops() -> None:
    """JAX hands what a loop reads to the loop's body as a value that each trip returns unchanged."""

    def walk(table: jax.Array, start: jax.Array, step: int) -> jax.Array:
        rows = jnp.arange(5)

        def trip(_: int, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            at, shifted = carried
            return lax.fori_loop(0, 3, lambda _, at: table[rows, at] + table[shifted, at], at), shifted + step

        return lax.fori_loop(0, 4, trip, (start, rows))[0]

    shapes = jax.ShapeDtypeStruct((5, 7), jnp.int32), jax.ShapeDtypeStruct((5,), jnp.int32)
    for step, expected in ((0, 2), (1, 1)):
        module = normalised(jax.jit(partial(walk, step=step)).lower(*shapes).as_text())
        assert str(main_of(module.module)).count("operand_batching_dims = [0]") == expected


def test_indices_that_are_all_alike_are_not_counted() -> None:
    """However many: these would not fit in memory."""
    kind = "tensor<1099511627776xi32>"
    text = f"func.func @main() -> {kind} {{ %z = stablehlo.constant dense<0> : {kind}\n return %z : {kind} }}"
    module = parsed(text)
    (returned,) = xla.terminator(module.body.operations[0].regions[0].blocks[0]).operands
    assert counts_along(returned) is None
