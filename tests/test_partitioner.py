"""What is written lest XLA's partitioner or its simplifications make something else of a plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import emitted
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emitted import emit, emit_shardy, strategy
from jax import lax
from op_kinds import IMAGES, X, conv, loss, pool
from programs import Case, arg, case_of, evaluator_of, round_mesh, source_of, source_of_text
from run_here import differing, run_program, wrong_in
from test_gathered import compiled, promised

from toast_cli.ask_xla.compile import as_stablehlo
from toast_cli.dimensions import analyse
from toast_cli.emit import emit_hlo, write
from toast_cli.emit.annotations import barred_values
from toast_cli.emit.minimal import choose_annotations
from toast_cli.emit.misread import misread_ops
from toast_cli.plan.decisions import Plan, Shard
from toast_cli.plan.lower import lower
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.problem import make_problem
from toast_cli.price.evaluator import Evaluator


def test_space_and_kernel_are_not_split_together() -> None:
    """An image split along space and a kernel split along its features: space is left whole."""

    def convolved(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    source = source_of(convolved, arg(2, 32, 32, 16), arg(3, 3, 16, 64))
    mesh, dimensions = round_mesh(data=4, model=2), analyse(source.program)
    case = Case(source, Evaluator(make_problem(source.program, dimensions, mesh)))
    plan = (case.shard("w.3", "model"), case.shard("x.1", "data"))
    (number,) = case.ops("convolution")
    assert case.problem.op_sharding(case.problem.op_pattern[number], plan).operands[0] == ((), (), (), ())


# -- A reduction of several arrays at once (argmax), or with a body of its own, over a split dimension: no all-reduce
# does that, so what each device has found is gathered


CASE = case_of(lambda x: jnp.argmax(x * 2, axis=1), arg(8, 64))


@pytest.mark.parametrize("plan", [("x.1=data",), ("x.1=data", "x.0=data")], ids=["kept whole", "wanted split"])
def test_partial_results_are_gathered(plan: tuple[str, ...]) -> None:
    decisions = tuple(CASE.shard(*decision.split("=")) for decision in plan)
    assert CASE.collectives(decisions) == [("all-gather", ("data",), 8 * 4 * 4, 2.0)]


def test_xla_does_so() -> None:
    found = emitted.partitioned(CASE, (CASE.shard("x.1", "data"),))
    assert [(c.kind, c.axes, c.bytes) for c in found] == [("all-gather", ("data",), 128)] * 2


def probability(x: jax.Array) -> jax.Array:
    """That one of independent events happens: a body of several ops, which no all-reduce has."""
    return lax.reduce(x, 0.0, lambda a, b: a + b - a * b, (0,))


def parity(x: jax.Array) -> jax.Array:
    return lax.reduce_xor(x > 0, (0,))


@pytest.mark.parametrize(("function", "size"), [(probability, 4), (parity, 1)])
@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_bodies_without_an_all_reduce_are_gathered(function: Any, size: int, form: Any) -> None:
    """Each of four devices finds 8 numbers, and all of them reduce what all have found."""
    case = case_of(function, arg(64, 8))
    plan = (case.shard("x.0", "data"),)
    assert promised(case, plan) == {("all-gather", ("data",)): 4 * 8 * size}
    assert compiled(case, plan, form) == promised(case, plan)


def test_a_body_that_ends_with_an_addition_adds_nothing_up() -> None:
    """Two such reductions are not added up before devices reduce them."""

    def reduced(x: jax.Array) -> jax.Array:
        return lax.reduce(x, 0.0, lambda a, b: a * b + (a + b), (0,))

    case = case_of(lambda x: reduced(x) + reduced(2 * x), arg(64, 8))
    plan = (case.shard("x.0", "data"),)
    assert case.collectives(plan) == [("all-gather", ("data",), 4 * 8 * 4, 2.0)]


# -- reductions of products that are only transposed are written behind the transpose, where XLA folds it into the
# product


CONSTRAINT = re.compile(r"(%\w+) = sdy.sharding_constraint (%\w+) <@mesh, \[(.*?)\]")


def gradient(rows: int = 64, columns: int = 32, *, twice: bool = False) -> Case:
    """A weight w [rows, columns] and the gradient of x @ w, which jax makes as dy x and transposes. twice: the product
    is read as it is, too.
    """

    def step(w: jax.Array, x: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        product = jnp.einsum("bf,bd->fd", dy, x)
        updated = w - 0.1 * product.T
        return (updated, product) if twice else (updated,)

    return case_of(step, arg(rows, columns), arg(16, rows), arg(16, columns))


def scattered(case: Case) -> Plan:
    """Over both axes, the batch and then w's first dimension."""
    return tuple(case.shard(path, axis) for path in ("x.0", "w.0") for axis in ("data", "model"))


def chain(text: str) -> list[tuple[str, str]]:
    """(op, what it says) from the product on."""
    lines = text.splitlines()
    start = next(k for k, line in enumerate(lines) if "stablehlo.dot_general" in line)
    found = []
    for line in lines[start:]:
        constraint = CONSTRAINT.search(line)
        if constraint:
            found.append(("constraint", constraint[3]))
        elif "= stablehlo." in line:
            found.append((line.split("stablehlo.")[1].split()[0], ""))
    return found


def test_the_pins_of_a_gradient_stand_behind_its_transpose() -> None:
    case = gradient()
    found = chain(emit(case.source, lower(case.problem, scattered(case)), "stablehlo").decode())
    assert [name for name, _ in found[:4]] == ["dot_general", "transpose", "constraint", "constraint"]
    assert found[2][1].endswith("{}") and found[3][1].endswith(
        "{}"
    )  # dimensions as transposed: w's first is the one that is split


def test_a_gradient_of_narrow_pieces_is_scattered_as_it_is_made() -> None:
    """XLA:TPU lays out pieces of 1024 x 16 the other way round."""
    case = gradient(1024, 128)
    plan = tuple(case.shard(path, axis) for path in ("x.0", "w.1") for axis in ("data", "model"))
    found = chain(emit(case.source, lower(case.problem, plan), "stablehlo").decode())
    assert [name for name, _ in found[:4]] == ["dot_general", "constraint", "constraint", "transpose"]
    assert found[2][1].endswith("{}")  # the dimension that is split is the product's first


def test_what_others_read_too_is_pinned_where_it_is_made() -> None:
    case = gradient(twice=True)
    found = chain(emit(case.source, lower(case.problem, scattered(case)), "stablehlo").decode())
    assert [name for name, _ in found[:2]] == ["dot_general", "constraint"]


# -- totals that are scattered and read in parts: written with a barrier, since XLA joins slices (XLA:TPU fails then)


Read = Callable[[Any], Any]
# How x @ w is read, which is scattered along its columns -> whether it is in parts.
READERS: dict[str, tuple[Read, bool]] = {
    "whole": (jnp.tanh, False),
    "all rows but the last": (lambda y: jnp.tanh(y[:, :-1]), True),
    "all rows but the first": (lambda y: jnp.tanh(y[:, 1:]), True),
    "one row": (lambda y: jnp.tanh(y[:, 0]), True),
    "some rows": (lambda y: jnp.tanh(lax.dynamic_slice_in_dim(y, 3, 4, 1)), True),
    "in part and whole": (lambda y: (y[:, :-1] * 2, jnp.tanh(y)), True),
    "in part after arithmetic": (lambda y: (-y.astype(jnp.bfloat16))[:, :-1], True),
    "in another form": (lambda y: y.reshape(64, 8, 4, 8)[:, :-1], False),
    "with less than no padding": (lambda y: lax.pad(y, 0.0, ((0, 0, 0), (0, -1, 0), (0, 0, 0))), True),
    "padded": (lambda y: jnp.pad(y, ((0, 0), (0, 1), (0, 0))), False),
}


def case_and_plan(read: Read, mesh: dict[str, int], *, scatter: str = "w.1") -> tuple[Case, Plan]:
    case = case_of(lambda x, w: read(x @ w), arg(64, 8, 16), arg(16, 32), mesh=round_mesh(**mesh))
    plan = [case.shard("x.0", "data"), case.shard("x.2", "model")]
    return case, (*plan, *([case.shard(scatter, "model")] if scatter else []))


@pytest.mark.parametrize("name", READERS)
def test_a_total_that_is_read_in_parts_has_a_barrier(name: str) -> None:
    read, expected = READERS[name]
    case, plan = case_and_plan(read, {"data": 4, "model": 2})
    lowered = case.lowered(plan)
    assert len(barred_values(case.program, lowered)) == expected
    text = emit_shardy(case.source, lowered)
    assert text.count(b"stablehlo.optimization_barrier") == expected
    assert b"optimization_barrier" not in emit_shardy(case.source, lowered, annotate="arguments")
    assert choose_annotations(case.source, lowered).astray == []
    assert emit_shardy(case.source, lowered) == text  # the module is as it was


def test_what_is_reduced_whole_has_none() -> None:
    case, plan = case_and_plan(lambda y: y[:, :-1], {"data": 4, "model": 2}, scatter="")
    assert barred_values(case.program, case.lowered(plan)) == []


def test_a_piece_that_is_cut_further_has_a_barrier() -> None:
    """By an axis that the sum does not go over: XLA joins both cuts, and they lie along two dimensions."""
    case = case_of(
        lambda x, g: x.T @ g, arg(64, 32), arg(64, 16), mesh=round_mesh(data=4, model=2), pins=("result=model,data",)
    )
    plan = (case.shard("x.0", "data"), case.shard("g.1", "data"))
    assert len(barred_values(case.program, case.lowered(plan))) == 1


def test_a_barrier_of_the_program_stays_beside_one_that_is_added() -> None:
    def read(y: Any) -> Any:
        return lax.optimization_barrier(jnp.tanh(y[:, :-1]))

    case, plan = case_and_plan(read, {"data": 4, "model": 2})
    lowered = case.lowered(plan)
    text = emit_shardy(case.source, lowered)
    assert text.count(b"stablehlo.optimization_barrier") == 2
    assert choose_annotations(case.source, lowered).astray == []


@pytest.mark.parametrize(("sums", "expected"), [(jnp.float32, 1), (jnp.bfloat16, 0)])
def test_what_a_loop_adds_up_in_another_type_has_a_barrier(sums: Any, expected: int) -> None:
    """XLA:TPU moves such a reduce-scatter behind the loop, and fails at the conversion."""

    def accumulated(xs: Any, gs: Any) -> Any:
        def step(held: Any, pair: tuple[Any, Any]) -> tuple[Any, None]:
            return held + (pair[0].T @ pair[1]).astype(sums), None

        return lax.scan(step, jnp.zeros((32, 16), sums), (xs, gs))[0]

    arrays = (arg(4, 64, 32, dtype=jnp.bfloat16), arg(4, 64, 16, dtype=jnp.bfloat16))
    case = case_of(accumulated, *arrays, mesh=round_mesh(data=4))
    plan = (case.shard("xs.1", "data"), case.shard("xs.2", "data"))
    lowered = case.lowered(plan)
    assert len(barred_values(case.program, lowered)) == expected
    text = write(case.source, lowered, "stablehlo", "minimal").content
    assert (b"optimization_barrier" in text) == bool(expected)


# -- ops that XLA partitions into wrong numbers are regions in the annotated form


def by_channel() -> tuple[Case, PartitionedProgram]:
    """The gradient of a convolution by channel, its images split: the gradient of the kernel is a sum over devices."""
    gradient = jax.grad(loss(conv("SAME", feature_group_count=4)), (0, 1))
    case = case_of(lambda a, k: gradient(a, k), IMAGES, arg(4, 1, 3, 3))
    return case, case.lowered((case.shard("a.0", "data"),))


def overlapping() -> tuple[Case, PartitionedProgram]:
    gradient = jax.grad(loss(pool(2, 1, "VALID")))
    case = case_of(lambda a: gradient(a), X)
    return case, case.lowered((case.shard("a.0", "data"),))


@pytest.mark.parametrize("make", [by_channel, overlapping])
def test_what_xla_misreads_is_a_region(make: Callable[[], tuple[Case, PartitionedProgram]]) -> None:
    case, lowered = make()
    before = str(case.source.module)
    assert len(misread_ops(case.source, lowered)) == 1
    written = write(case.source, lowered, "stablehlo")
    assert written.content.count(b"sdy.manual_computation") == 1
    assert not written.notes
    assert differing(case.source, {"": written.content}, 8) == {}
    assert str(case.source.module) == before


def test_hlo_text_holds_regions() -> None:
    case, lowered = by_channel()
    text = emit(case.source, lowered, "hlo")
    assert b"SPMDFullToShardShape" in text
    assert wrong_in(case.source, text, 8, "hlo") == []


def test_forms_without_regions_say_so() -> None:
    case, lowered = by_channel()
    (note,) = write(case.source, lowered, "specs").notes
    assert re.match(
        r"XLA's partitioner gets wrong numbers for \S+:\d+ .* if it splits it as the plan does; --format", note
    )


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_a_slice_of_which_devices_keep_a_part_is_clamped_first(form: str) -> None:
    """16 of 64 rows from the 60th on are the last 16, of which each of four devices has 4."""
    case = case_of(
        lambda x, i: jnp.sin(lax.dynamic_slice(jnp.cos(x), (i, 0), (16, 8))), arg(64, 8), arg(dtype=jnp.int32)
    )
    rows = case.problem.dimensions.factor_classes[case.program.producer[case.program.results[0].value]][0]
    plan = (Shard(case.problem.dimensions.class_group[rows], 0),)
    x = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    written = emit(case.source, case.lowered(plan), form)
    program = as_stablehlo(written, "hlo") if form == "hlo" else written
    (found,) = run_program(program, [x, np.array(60, np.int32)], [(16, 8)], 8, shardy=form != "hlo")
    np.testing.assert_allclose(found, np.sin(np.cos(x[48:])), rtol=1e-5)


# -- HLO text partitions as promised where XLA's simplifications and propagation see other things than Shardy does


# Zeros of an array of one shape and number are one array in HLO.
ZEROS = """func.func public @main(%a: tensor<64x8xf32> loc("a"), %i: tensor<16x1xi32> loc("i"),
    %u: tensor<16x8xf32> loc("u")) -> (tensor<64x8xf32>, tensor<64x8xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<f32>) -> tensor<64x8xf32>
  %1 = stablehlo.maximum %a, %0 : tensor<64x8xf32>
  %2 = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<f32>) -> tensor<64x8xf32>
  %3 = "stablehlo.scatter"(%2, %i, %u) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1],
      inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> ({
  ^bb0(%p: tensor<f32>, %q: tensor<f32>):
    %s = stablehlo.add %p, %q : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) : (tensor<64x8xf32>, tensor<16x1xi32>, tensor<16x8xf32>) -> tensor<64x8xf32>
  return %1, %3 : tensor<64x8xf32>, tensor<64x8xf32>
}"""
# A product that only a transpose reads, and that is sent elsewhere before.
SENT_BEFORE = """func.func public @main(%x: tensor<4x64xf32> loc("x"), %w: tensor<64x16xf32> loc("w"))
    -> tensor<16x4xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] :
      (tensor<4x64xf32>, tensor<64x16xf32>) -> tensor<4x16xf32>
  %1 = stablehlo.transpose %0, dims = [1, 0] : (tensor<4x16xf32>) -> tensor<16x4xf32>
  %2 = stablehlo.sine %1 : tensor<16x4xf32>
  return %2 : tensor<16x4xf32>
}"""
# A product that is scattered over one axis, and of which the pieces are reduced over another.
BESIDE = """func.func public @main(%x: tensor<16x64xf32> loc("x"), %w: tensor<64x16xf32> loc("w"))
    -> tensor<16x16xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] :
      (tensor<16x64xf32>, tensor<64x16xf32>) -> tensor<16x16xf32>
  %1 = stablehlo.sine %0 : tensor<16x16xf32>
  return %1 : tensor<16x16xf32>
}"""
# A layer that is split and one that is not: both read zeros of one shape, which are one array in HLO.
TWO_LAYERS = """func.func public @main(%x: tensor<64x16xf32> loc("x"), %y: tensor<64x16xf32> loc("y"))
    -> (tensor<64x16xf32>, tensor<64x16xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<64x16xf32>
  %0 = stablehlo.maximum %x, %zero : tensor<64x16xf32>
  %1 = stablehlo.maximum %y, %zero : tensor<64x16xf32>
  return %0, %1 : tensor<64x16xf32>, tensor<64x16xf32>
}"""


@pytest.mark.parametrize(
    ("program", "decisions"),
    [
        (ZEROS, ("a.1=data", "a.1=model", "u.0=data", "u.0=model")),
        (SENT_BEFORE, ("x.1=data", "x.0=data", "x.0=model")),
        (BESIDE, ("x.1=data", "x.1=model", "w.1=data")),
    ],
    ids=["zeros", "sent before a transpose", "beside"],
)
@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_compiles_to_what_is_promised(program: str, decisions: tuple[str, ...], form: str) -> None:
    source = source_of_text(program)
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    plan = strategy(case, *decisions)
    planned = emitted.on_cpu(case, case.collectives(plan))
    assert emitted.collectives(case, emitted.compiled(case, plan, form)) == planned != []


@pytest.mark.parametrize("decision", ["x.0=data", "y.1=model"])
def test_a_constant_with_many_readers_carries_no_sharding_from_one_to_another(decision: str) -> None:
    source = source_of_text(TWO_LAYERS)
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    plan = strategy(case, decision)
    assert emitted.collectives(case, emitted.compiled(case, plan, "hlo")) == case.collectives(plan) == []


def test_hlo_has_a_constraint_on_every_value_and_no_shardings_on_operations() -> None:
    source = source_of_text(SENT_BEFORE)
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    lowered = case.lowered(strategy(case, "x.1=data", "x.0=data", "x.0=model"))
    text = emit_hlo(source, lowered).decode()
    constraints = text.count('custom_call_target="Sharding"')
    assert constraints == emit_shardy(source, lowered, annotate="full").count(b"sdy.sharding_constraint") > 0
    operations = [line for line in text.splitlines() if " dot(" in line or " sine(" in line]
    assert operations and not any("sharding=" in line for line in operations)
