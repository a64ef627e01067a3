"""Products of ragged groups: their rules, FLOPs and prices, and what is written for each way to split them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from cases.model import Situation
from cases.running import MESHES, Planned, Whole
from programs import source_of_text
from test_split_ops import plans

from toast_cli import xla
from toast_cli.errors import InputError
from toast_cli.program.ops import RAGGED_DOT
from toast_cli.verify.dense_products import without_ragged_dots

TENSORS = {
    "rows": ("64x16", "8x16x32", "8", "64x32"),
    "transposed": ("64x32", "8x16x32", "8", "64x16"),
    "contracted": ("64x16", "64x32", "8", "8x16x32"),
    "batch": ("8x4x16", "8x16x32", "8", "8x4x32"),
    "in a batch": ("4x16x8", "8x4x8x16", "4x8", "4x16x16"),
    "contracted in a batch": ("4x16x8", "4x16x16", "4x8", "8x4x8x16"),
    "the same in a batch": ("4x16x8", "8x4x8x16", "8", "4x16x16"),
}
NUMBERS = {
    "rows": "lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [1], lhs_ragged_dimensions = [0], "
    "rhs_group_dimensions = [0]",
    "transposed": "lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [2], lhs_ragged_dimensions = [0], "
    "rhs_group_dimensions = [0]",
    "contracted": "lhs_contracting_dimensions = [0], rhs_contracting_dimensions = [0], lhs_ragged_dimensions = [0]",
    "batch": "lhs_batching_dimensions = [0], rhs_batching_dimensions = [0], lhs_contracting_dimensions = [2], "
    "rhs_contracting_dimensions = [1], lhs_ragged_dimensions = [0]",
    "in a batch": "lhs_batching_dimensions = [0], rhs_batching_dimensions = [1], lhs_contracting_dimensions = [2], "
    "rhs_contracting_dimensions = [2], lhs_ragged_dimensions = [1], rhs_group_dimensions = [0]",
    "contracted in a batch": "lhs_batching_dimensions = [0], rhs_batching_dimensions = [0], "
    "lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [1], lhs_ragged_dimensions = [1]",
}
NUMBERS["the same in a batch"] = NUMBERS["in a batch"]
# Sizes of factors; factors of operands and result, -1 for none; those that are summed; FLOPs: two for each row, number
# contracted, and column.
RULES = {
    "rows": ((64, 16, 8, 32), ((0, 1), (2, 1, 3), (-1,), (0, 3)), {1, 2}, 2 * 64 * 16 * 32),
    "transposed": ((64, 32, 8, 16), ((0, 1), (2, 3, 1), (-1,), (0, 3)), {1, 2}, 2 * 64 * 16 * 32),
    "contracted": ((64, 16, 32, 8), ((0, 1), (0, 2), (-1,), (3, 1, 2)), {0}, 2 * 64 * 16 * 32),
    "batch": ((8, 4, 16, 32), ((0, 1, 2), (0, 2, 3), (-1,), (0, 1, 3)), {2}, 2 * 8 * 4 * 16 * 32),
    "in a batch": ((4, 16, 8, 8, 16), ((0, 1, 2), (3, 0, 2, 4), (0, -1), (0, 1, 4)), {2}, 2 * 4 * 16 * 8 * 16),
    "contracted in a batch": (
        (4, 16, 8, 16, 8),
        ((0, 1, 2), (0, 1, 3), (0, -1), (4, 0, 2, 3)),
        {1},
        2 * 4 * 16 * 8 * 16,
    ),
    "the same in a batch": (
        (4, 16, 8, 8, 16),
        ((0, 1, 2), (3, 0, 2, 4), (-1,), (0, 1, 4)),
        {2, 3},
        2 * 4 * 16 * 8 * 16,
    ),
}


def program(name: str) -> str:
    left, right, sizes, result = (
        f"tensor<{shape}x{'i32' if k == 2 else 'f32'}>" for k, shape in enumerate(TENSORS[name])
    )
    return f"""func.func public @main(%x: {left}, %w: {right}, %g: {sizes}) -> {result} {{
      %0 = "chlo.ragged_dot"(%x, %w, %g) <{{ragged_dot_dimension_numbers = #chlo.ragged_dot<{NUMBERS[name]}>}}>
        : ({left}, {right}, {sizes}) -> {result}
      return %0 : {result}
    }}"""


@pytest.mark.parametrize("name", TENSORS)
def test_rule(name: str) -> None:
    op = next(op for op in source_of_text(program(name)).program.ops if op.name == RAGGED_DOT)
    arrays = tuple(tuple(f[0] if f else -1 for f in dims) for dims in (*op.rule.operands, *op.rule.results))
    assert (op.rule.sizes, arrays, set(op.rule.reduction), op.flops) == RULES[name]


@pytest.mark.parametrize(
    "numbers", ["lhs_ragged_dimensions = [0]", "lhs_contracting_dimensions = [1], lhs_ragged_dimensions = [7]"]
)
def test_numbers_that_fit_no_array_are_an_error_or_leave_it_whole(numbers: str) -> None:
    text = program("rows").replace(NUMBERS["rows"], numbers)
    try:
        (op,) = (op for op in source_of_text(text).program.ops if op.name == RAGGED_DOT)
    except InputError:
        return
    assert op.opaque


def test_from_hlo() -> None:
    text = """HloModule m
ENTRY e {
  x = f32[64,16] parameter(0)
  w = f32[8,16,32] parameter(1)
  g = s32[8] parameter(2)
  ROOT d = f32[64,32] ragged-dot(x, w, g), lhs_contracting_dims={1}, rhs_contracting_dims={1}, \
lhs_ragged_dims={0}, rhs_group_dims={0}
}"""
    op = next(op for op in source_of_text(text).program.ops if op.name == RAGGED_DOT)
    assert (op.rule.sizes, op.flops) == (RULES["rows"][0], RULES["rows"][3])


@pytest.mark.parametrize("name", ["rows", "contracted"])
def test_dense_form(name: str) -> None:
    """Each row with the matrix of its group, rows behind the last group with none."""
    rng = np.random.default_rng(0)
    sizes = np.array([3, 0, 20, 1, 7, 9, 11, 5], np.int32)
    x, w = (rng.normal(size=tuple(map(int, TENSORS[name][k].split("x")))).astype(np.float32) for k in (0, 1))
    expected = np.zeros(tuple(map(int, TENSORS[name][3].split("x"))), np.float32)
    row = 0
    for group, size in enumerate(sizes):
        rows = slice(row, row + size)
        if name == "rows":
            expected[rows] = x[rows] @ w[group]
        else:
            expected[group] = x[rows].T @ w[rows]
        row += size
    module = without_ragged_dots(xla.parse_module(xla.make_context(), program(name)))
    (found,) = xla.run_program(xla.write_bytecode(module), [x, w, sizes], [expected.shape], 1, shardy=True)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@lru_cache(maxsize=2)
def planned(name: str) -> Planned:
    return Planned(Whole(Situation(program(name))), MESHES["4x2"])


@pytest.mark.parametrize("form", ["stablehlo", "hlo", "spmd"])
@pytest.mark.parametrize("name", TENSORS)
def test_as_promised_however_it_is_split(name: str, form: str) -> None:
    at = planned(name)
    found = plans(at)
    assert len(found) > 2
    assert {plan: wrong for plan in found if (wrong := list(at.under(plan).wrong_with(form)))} == {}
