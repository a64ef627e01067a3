"""The op table: complete, read the same everywhere, and as Shardy and XLA see the ops."""

import pickle
from dataclasses import fields

import pytest
from jaxlib.mlir.dialects import chlo, stablehlo

from toast_cli import xla
from toast_cli.emit.regions.rules import on_every_device, rule_of
from toast_cli.program.model import Op, Rule
from toast_cli.program.ops import OP_KINDS, OpKind, kind_of


def test_every_op_of_the_dialects_has_a_row() -> None:
    named = {
        kind.OPERATION_NAME
        for dialect in (stablehlo, chlo)
        for kind in vars(dialect).values()
        if hasattr(kind, "OPERATION_NAME")
    }
    assert len(named) > 150
    assert {name for name in named if kind_of(name) is not OP_KINDS.get(name) and "broadcast_" not in name} == set()
    assert {name for name in named if name.startswith("chlo.broadcast_") and not kind_of(name).elementwise} == set()


def test_ops_that_move_elements_have_a_lowering_for_one_device() -> None:
    """Other forms of them are rewritten as these, or refused, when a program is read."""
    whole = {kind.name for kind in OP_KINDS.values() if rule_of(kind) is on_every_device}
    moving = {kind.name for kind in OP_KINDS.values() if kind.rearranges or kind.lookup or kind.matrix_unit}
    other_forms = {name for name in moving if "dynamic_" in name} - {"stablehlo.dynamic_slice"}
    other_forms |= {f"stablehlo.{name}" for name in ("broadcast", "torch_index_select", "dot", "einsum")}
    assert whole & moving == other_forms


def test_an_op_has_the_kind_of_its_name() -> None:
    op = Op("stablehlo.tanh", (0,), (1,), Rule((), (), ()))
    assert op.kind is kind_of("stablehlo.tanh")
    assert op.kind.transcendental
    assert pickle.loads(pickle.dumps(op)).kind is op.kind
    assert words("nobody.knows") == set()


def words(name: str) -> set[str]:
    kind = kind_of(name)
    return {field.name for field in fields(OpKind) if getattr(kind, field.name) is True}


# Where the tables that this one replaces said something else, in all of them or in some.
MENDED = [
    ("stablehlo.count_leading_zeros", "fusible", True, "elementwise for Shardy, and a kernel of its own before"),
    ("stablehlo.reduce_precision", "rematerialised", True, "fusible before, and Shardy computes it again, too"),
    ("chlo.erf", "rematerialised", True, "Shardy computes every elementwise op again"),
    (
        "chlo.square",
        "transcendental",
        False,
        "every CHLO op was taken for a transcendental function: it is one product",
    ),
    ("chlo.is_inf", "transcendental", False, "a comparison"),
    ("chlo.broadcast_add", "transcendental", False, "an addition"),
    ("chlo.mulhi", "elementwise", True, "had no rule"),
    ("chlo.ragged_dot", "elementwise", False, "every CHLO op but top_k was taken for elementwise"),
    ("chlo.ragged_dot", "matrix_unit", True, "the same"),
    ("stablehlo.rsqrt", "transcendental", True, "counted as one, and not taken for one by fusion"),
    ("stablehlo.dynamic_iota", "computes_nothing", True, "an iota did, and a dynamic one did not"),
    ("stablehlo.collective_broadcast", "computes_nothing", True, "other collectives that move did"),
]
# What looks like a difference and is none by accident.
MEANT = [
    ("stablehlo.transpose", "view", True, "its elements are its operand's"),
    ("stablehlo.transpose", "rematerialised", False, "Shardy's splitter stops at it"),
    ("stablehlo.convert", "view", False, "it rounds: no sum of partial results goes through it"),
    ("stablehlo.convert", "view_or_convert", True, "XLA reads it in place"),
    ("stablehlo.select", "rearranges", False, "it is elementwise, though it changes no element"),
    ("stablehlo.divide", "transcendental", False, "several steps of the vector unit"),
    ("stablehlo.pad", "view", False, "it adds elements"),
    ("stablehlo.subtract", "positive", False, "positive numbers make a negative one"),
    ("stablehlo.gather", "fusible", False, "XLA:TPU gives it a kernel of its own"),
    ("stablehlo.scatter", "computes_operands", False, "the same"),
]


@pytest.mark.parametrize(("name", "word", "holds", "why"), MENDED + MEANT)
def test_what_is_true_of_an_op(name: str, word: str, holds: bool, why: str) -> None:
    assert getattr(kind_of(name), word) is holds, why


def test_what_belongs_together() -> None:
    for name, kind in OP_KINDS.items():
        assert not (kind.view and not kind.rearranges), name
        assert not (kind.polynomial and not kind.transcendental), name
        assert not (kind.transcendental and not kind.elementwise), name
        assert not (kind.updates and not kind.in_place), name
        assert sum((kind.source, kind.elementwise, kind.rearranges, kind.matrix_unit, kind.lookup)) <= 1, name


F, N, P, C = "tensor<8x8xf32>", "tensor<8x8xi32>", "tensor<8x8xi1>", "tensor<8x8xcomplex<f32>>"
ARRAYS = {
    "f": (F, "2.0"), "i": (N, "2"), "p": (P, "true"), "z": (C, "(1.0, 2.0)"), "flat": ("tensor<64xf32>", "2.0"),
    "row": ("tensor<8xf32>", "2.0"), "tall": ("tensor<16x8xf32>", "2.0"), "half": ("tensor<4x8xf32>", "2.0"),
    "s": ("tensor<f32>", "2.0"), "n": ("tensor<i32>", "2"),
}  # fmt: skip
UNARY = (
    "abs cbrt ceil cosine exponential exponential_minus_one floor log log_plus_one logistic negate round_nearest_afz "
    "round_nearest_even rsqrt sign sine sqrt tan tanh optimization_barrier"
)
BINARY = "add atan2 divide maximum minimum multiply power remainder subtract"
BITS = "and or xor shift_left shift_right_arithmetic shift_right_logical"
# Operation -> (how it is written, type of the result).
WRITTEN = {
    **{f"stablehlo.{name}": (f"%f : {F}", F) for name in UNARY.split()},
    **{f"stablehlo.{name}": (f"%f, %f : {F}", F) for name in BINARY.split()},
    **{f"stablehlo.{name}": (f"%i : {N}", N) for name in ("not", "popcnt", "count_leading_zeros")},
    **{f"stablehlo.{name}": (f"%i, %i : {N}", N) for name in BITS.split()},
    **{f"chlo.{name}": (f"%f : {F} -> {F}", F) for name in ("erf", "square", "lgamma")},
    "stablehlo.bitcast_convert": (f"%f : ({F}) -> {N}", N),
    "stablehlo.broadcast_in_dim": (f"%row, dims = [0] : (tensor<8xf32>) -> {F}", F),
    "stablehlo.clamp": (f"%f, %f, %f : {F}", F),
    "stablehlo.compare": (f"LT, %f, %f : ({F}, {F}) -> {P}", P),
    "stablehlo.complex": (f"%f, %f : {C}", C),
    "stablehlo.concatenate": (f"%half, %half, dim = 0 : (tensor<4x8xf32>, tensor<4x8xf32>) -> {F}", F),
    "stablehlo.constant": (f"dense<3.0> : {F}", F),
    "stablehlo.convert": (f"%f : ({F}) -> {N}", N),
    "stablehlo.dot_general": (f"%f, %f, contracting_dims = [1] x [0] : ({F}, {F}) -> {F}", F),
    "stablehlo.dynamic_slice": (
        f"%tall, %n, %n, sizes = [8, 8] : (tensor<16x8xf32>, tensor<i32>, tensor<i32>) -> {F}",
        F,
    ),
    "stablehlo.imag": (f"%z : ({C}) -> {F}", F),
    "stablehlo.iota": (f"dim = 0 : {F}", F),
    "stablehlo.is_finite": (f"%f : ({F}) -> {P}", P),
    "stablehlo.pad": (
        f"%half, %s, low = [4, 0], high = [0, 0], interior = [0, 0] : (tensor<4x8xf32>, tensor<f32>) -> {F}",
        F,
    ),
    "stablehlo.real": (f"%z : ({C}) -> {F}", F),
    "stablehlo.reduce_precision": (f"%f, format = e5m10 : {F}", F),
    "stablehlo.reshape": (f"%flat : (tensor<64xf32>) -> {F}", F),
    "stablehlo.reverse": (f"%f, dims = [1] : {F}", F),
    "stablehlo.select": (f"%p, %f, %f : {P}, {F}", F),
    "stablehlo.slice": (f"%tall [0:8, 0:8] : (tensor<16x8xf32>) -> {F}", F),
    "stablehlo.transpose": (f"%f, dims = [1, 0] : ({F}) -> {F}", F),
    "sdy.constant": (f"dense<3.0> : {F}", F),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_shardy_makes_anew_for_each_use(name: str) -> None:
    rest, kind = WRITTEN[name]
    constants = "\n".join(
        f"%{array} = stablehlo.constant dense<{value}> : {of}" for array, (of, value) in ARRAYS.items()
    )
    module = xla.parse_module(
        xla.make_context(),
        f"""func.func @main() -> ({kind}, {kind}) {{
        {constants}
        %x = {name} {rest}
        %u = stablehlo.custom_call @one(%x) : ({kind}) -> {kind}
        %v = stablehlo.custom_call @other(%x) : ({kind}) -> {kind}
        return %u, %v : {kind}, {kind} }}""",
    )
    xla.run_passes(module, "sdy-constant-or-scalar-splitter")
    one, other = xla.walk_ops(module, "stablehlo.custom_call")
    assert (one.operands[0] != other.operands[0]) is (kind_of(name).source or kind_of(name).rematerialised)
