"""Products of ragged groups: their rules, FLOPs and prices, and what is written for each way to split them."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import product

import numpy as np
import pytest
from cases.model import Situation
from cases.running import MESHES, Planned, Whole
from emitted import emit
from programs import Case, evaluator_of, round_mesh, source_of_text
from ragged_programs import NUMBERS, TENSORS, program
from run_here import run_program
from sweeps import sweep
from test_halo import plans

from toast_cli import xla
from toast_cli.base.errors import InputError
from toast_cli.emit import write
from toast_cli.emit.hlo import with_dense_products
from toast_cli.hardware import find_preset
from toast_cli.price.kernel import arithmetic
from toast_cli.price.profiles import find_profile
from toast_cli.program.ops import BLOCK_SCALED_DOT, RAGGED_DOT

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


@pytest.mark.parametrize("name", TENSORS)
def test_rule(name: str) -> None:
    op = next(op for op in source_of_text(program(name)).program.ops if op.name == RAGGED_DOT)
    arrays = tuple(tuple(f[0] if f else -1 for f in dims) for dims in (*op.rule.operands, *op.rule.results))
    assert (op.rule.sizes, arrays, set(op.rule.reduction), op.flops) == RULES[name]


@pytest.mark.parametrize(
    ("name", "dense"), [("rows", 1), ("contracted", 8 * 1.5), ("contracted in a batch", 8 * 1.5), ("batch", 1)]
)
def test_gradients_of_experts_multiply_all_rows_for_each(name: str, dense: float) -> None:
    """dense: products of all rows that take as long. A mask makes them half as long again."""
    given = source_of_text(program(name)).program
    (op,) = (op for op in given.ops if op.name == RAGGED_DOT)
    assert arithmetic(given, op, find_profile(find_preset("v5e").chip)) == dense * op.flops


@pytest.mark.parametrize("name", ["rows", "contracted"])
def test_kernels_of_v5p_visit_each_row_once(name: str) -> None:
    given = source_of_text(program(name)).program
    (op,) = (op for op in given.ops if op.name == RAGGED_DOT)
    assert arithmetic(given, op, find_profile(find_preset("v5p").chip)) == op.flops


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
    module = with_dense_products(xla.parse_module(xla.make_context(), program(name)))
    (found,) = run_program(xla.write_bytecode(module), [x, w, sizes], [expected.shape], 1, shardy=True)
    np.testing.assert_allclose(found, expected, atol=1e-4)


F8, SCALE = "f8E4M3FN", "f8E8M0FNU"
A, B, SA, SB = f"tensor<4x16x64x{F8}>", f"tensor<4x8x64x{F8}>", f"tensor<4x16x8x{SCALE}>", f"tensor<4x8x8x{SCALE}>"
SCALED = f"""func.func public @main(%a: {A}, %b: {B}, %s: {SA}, %t: {SB}) -> tensor<4x16x8xf32> {{
  %0 = stablehlo.custom_call @__op$block_scaled_dot(%a, %b, %s, %t) {{api_version = 2 : i32, backend_config = "{{}}"}}
    : ({A}, {B}, {SA}, {SB}) -> tensor<4x16x8xf32>
  return %0 : tensor<4x16x8xf32>
}}"""


def test_products_of_scaled_blocks() -> None:
    """Eight blocks of eight numbers, each with a scale for each row and each column."""
    op = next(op for op in source_of_text(SCALED).program.ops if op.detail == BLOCK_SCALED_DOT)
    assert op.rule.sizes == (4, 16, 8, 8, 8) and op.rule.reduction == {3} and op.kind.contraction
    assert op.rule.operands == (
        ((0,), (1,), (3, 4)), ((0,), (2,), (3, 4)), ((0,), (1,), (3,)), ((0,), (2,), (3,))
    )  # fmt: skip
    assert op.flops == 2 * 4 * 16 * 8 * 64 and not op.opaque


def test_scales_that_do_not_fit_leave_it_whole() -> None:
    text = SCALED.replace(SB, f"tensor<4x8x7x{SCALE}>")
    op = next(op for op in source_of_text(text).program.ops if op.detail == BLOCK_SCALED_DOT)
    assert op.opaque


@pytest.mark.parametrize("form", sweep(["stablehlo", "hlo"], "stablehlo"))
def test_scaled_blocks_as_promised_however_they_are_split(form: str) -> None:
    at = Planned(Whole(Situation(SCALED)), MESHES["4x2"])
    found = plans(at)
    assert len(found) > 2
    assert {plan: wrong for plan in found if (wrong := list(at.under(plan).wrong_with(form)))} == {}


@lru_cache(maxsize=2)
def planned(name: str) -> Planned:
    return Planned(Whole(Situation(program(name))), MESHES["4x2"])


FORMS = ("stablehlo", "hlo")


@pytest.mark.parametrize(
    ("name", "form"),
    sweep(product(TENSORS, FORMS), *((name, FORMS[number % 2]) for number, name in enumerate(TENSORS))),
)
def test_as_promised_however_it_is_split(name: str, form: str) -> None:
    at = planned(name)
    found = plans(at)
    assert len(found) > 2
    assert {plan: wrong for plan in found if (wrong := list(at.under(plan).wrong_with(form)))} == {}


def test_in_hlo_they_are_written_out() -> None:
    """XLA compiles them with Shardy only, and HLO is for XLA without."""
    at = planned("rows")
    written = write(at.whole.source, at.evaluator.lowered(at.result.plan), "hlo")
    assert b" ragged-dot(" not in written.content and b" dot(" in written.content
    assert any("written out, each group with all rows" in note for note in written.notes)


@pytest.mark.parametrize("model", [2, 1])
def test_a_device_with_one_group_has_an_empty_one_beside_it(model: int) -> None:
    """XLA:TPU refuses a single group whose size the program computes. 8 groups on 8 devices, and on 4."""
    source = source_of_text(program("rows").replace("xf32>, %g", 'xf32> loc("w"), %g'))
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=model)))
    plan = tuple(case.shard("w.0", axis) for axis in ("data", "model")[:model])
    text = emit(source, case.lowered(plan), "stablehlo").decode()
    assert re.search(r'"chlo.ragged_dot".* : \(tensor<64x16xf32>, tensor<2x16x32xf32>, tensor<2xi32>\) ->', text)
