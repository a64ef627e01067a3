"""From a module to a `Program`: control flow laid flat, calls looked through, what nobody needs left out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import arg, program_of, source_of, source_of_text

from benchmarks.generate import recurrence_text
from toast_cli.program.model import Program


def names(program: Program) -> list[str]:
    """Ops in order, without dialects."""
    return [op.name.partition(".")[2] for op in program.ops]


def find(program: Program, name: str) -> list[int]:
    return [number for number, op in enumerate(program.ops) if op.name.partition(".")[2] == name]


def test_arguments_and_results_are_ops_in_order() -> None:
    program = program_of(lambda x, y: (x + y, x), arg(2, 3), arg(2, 3))
    assert names(program) == ["argument", "argument", "add", "result", "result"]
    assert [a.value for a in program.arguments] == [0, 1]
    assert [program.ops[n].operands for n in find(program, "result")] == [(2,), (0,)]
    assert [str(v) for v in program.values] == ["f32[2,3]"] * 3


def test_paths_and_donation() -> None:
    program = program_of(
        lambda params, x: ({"w": params["w"] * 2.0, "b": params["b"] + 1.0}, x.sum()),
        {"w": arg(8, 8), "b": arg(8)},
        arg(8, 8),
        donate=(0,),
    )
    assert [(a.path, a.donated, a.aliased_result) for a in program.arguments] == [
        ("params['b']", True, 0),
        ("params['w']", True, 1),
        ("x", False, -1),
    ]
    assert [r.path for r in program.results] == ["result[0]['b']", "result[0]['w']", "result[1]"]


def test_each_call_has_its_own_copy_of_what_it_calls() -> None:
    double = jax.jit(lambda v: jnp.sin(v) * 2.0)
    program = program_of(lambda x: double(double(x)), arg(4))
    assert len(find(program, "sine")) == 2
    assert not find(program, "call")


def test_a_loop_is_carries_then_its_body() -> None:
    program = program_of(lambda w, x: lax.scan(lambda c, _: (c @ w, None), x, None, length=4)[0], arg(8, 8), arg(8, 8))
    assert names(program) == ["argument", "argument", "carry", "dot_general", "result"]
    carry, dot = program.ops[2], program.ops[3]
    assert carry.operands == (program.arguments[1].value, dot.results[0])  # starts with x, goes on with the product
    assert dot.operands == (carry.results[0], program.arguments[0].value)  # w passes through: it is no carry
    assert (carry.loop, dot.loop, dot.trips) == (0, 0, 4.0)
    assert program.ops[4].operands == carry.results
    (loop,) = program.loops
    assert (loop.first, loop.last, loop.parent) == (2, 4, -1)


def test_swapped_carries_yield_each_other() -> None:
    program = program_of(lambda a, b: lax.fori_loop(0, 6, lambda _, c: (c[1], c[0] + c[1]), (a, b)), arg(8), arg(8))
    first, second = (program.ops[n] for n in find(program, "carry"))
    assert first.operands[1] == second.results[0]
    assert program.ops[find(program, "add")[0]].operands == first.results + second.results


def test_branches_join_and_count_in_equal_parts() -> None:
    program = program_of(
        lambda i, x: lax.fori_loop(0, 6, lambda _, c: lax.switch(i, [jnp.sin, jnp.cos, jnp.tanh], c), x),
        arg(dtype=jnp.int32),
        arg(8),
    )
    branches = [find(program, name)[0] for name in ("sine", "cosine", "tanh")]
    (join,) = find(program, "join")
    assert program.ops[join].operands == tuple(program.ops[n].results[0] for n in branches)
    assert [program.ops[n].trips for n in branches] == [2.0, 2.0, 2.0]  # 6 iterations, one branch in three


def test_what_passes_a_barrier_together_need_not_be_split_together() -> None:
    program = program_of(lambda x, y: lax.optimization_barrier((x, y)), arg(8, 8), arg(4))
    assert names(program)[2:4] == ["optimization_barrier"] * 2
    assert [program.ops[n].operands for n in (2, 3)] == [(0,), (1,)]


def test_ops_and_carries_nobody_needs_are_left_out() -> None:
    text = """
    func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
      %zero = stablehlo.constant dense<0> : tensor<i32>
      %dead = stablehlo.cosine %x : tensor<4xf32>
      %out:3 = stablehlo.while(%i = %zero, %a = %x, %b = %dead) : tensor<i32>, tensor<4xf32>, tensor<4xf32>
      cond {
        %n = stablehlo.constant dense<3> : tensor<i32>
        %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %c : tensor<i1>
      } do {
        %one = stablehlo.constant dense<1> : tensor<i32>
        %j = stablehlo.add %i, %one : tensor<i32>
        %d = stablehlo.sine %a : tensor<4xf32>
        %e = stablehlo.tanh %b : tensor<4xf32>
        stablehlo.return %j, %d, %e : tensor<i32>, tensor<4xf32>, tensor<4xf32>
      }
      return %out#1 : tensor<4xf32>
    }
    """
    program = source_of_text(text).program
    assert names(program) == ["argument", "carry", "sine", "result"]
    assert (program.loops[0].first, program.loops[0].last, program.loops[0].trips) == (1, 3, 3)


def test_what_decides_from_data_how_often_a_loop_runs_stays() -> None:
    """Its reduction over a split array costs an all-reduce in each iteration."""
    program = program_of(lambda x: lax.while_loop(lambda c: jnp.sum(c) > 1.0, lambda c: c / 2.0, x), arg(8, 8))
    assert find(program, "reduce")
    (reduce,) = find(program, "reduce")
    assert program.loops[0].first <= reduce < program.loops[0].last


def test_what_decides_between_branches_stays() -> None:
    program = program_of(lambda x: lax.cond(jnp.max(x) > 0, jnp.sin, jnp.cos, x), arg(8, 8))
    assert len(find(program, "reduce")) == 1


@pytest.mark.parametrize(
    ("run", "name", "detail"),
    [
        (lambda x: jnp.sum(x, 0), "reduce", "add"),
        (lambda x: jnp.max(x, 0), "reduce", "maximum"),
        (lambda x: x.at[jnp.array([0, 2])].add(1.0), "scatter", "add"),
        (lambda x: lax.linalg.eigh(x)[0], "custom_call", "lapack_ssyevd_ffi"),
        (lambda x: jnp.sin(x), "sine", ""),
    ],
)
def test_what_tells_ops_of_one_name_apart(run: Any, name: str, detail: str) -> None:
    program = program_of(run, arg(8, 8))
    assert [program.ops[n].detail for n in find(program, name)] == [detail]


def test_a_program_with_an_unknown_kernel_keeps_its_name() -> None:
    def solved(x: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call("mystery", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    source = source_of(solved, arg(64, 64))
    assert source.program.name == "solved" and any("mystery" in notice for notice in source.notices)


def test_scalars_and_arrays_of_one_or_no_element() -> None:
    program = program_of(lambda s, x, y, z: (s + 1.0, x @ y, z.reshape(6)), arg(), arg(4, 0), arg(0, 3), arg(1, 6))
    assert [str(program.values[r.value]) for r in program.results] == ["f32[]", "f32[4,3]", "f32[6]"]


@pytest.mark.parametrize(
    ("dtype", "text", "size"),
    [
        (jnp.bfloat16, "bf16[3]", 6),
        (jnp.float32, "f32[3]", 12),
        (jnp.bool_, "i1[3]", 3),
        (jnp.int4, "i4[3]", 2),  # 12 bits, whole bytes
        (jnp.complex64, "complex<f32>[3]", 24),
        (jnp.float8_e4m3fn, "f8E4M3FN[3]", 3),
        (jnp.uint8, "ui8[3]", 3),
    ],
)
def test_types_and_their_bytes(dtype: Any, text: str, size: int) -> None:
    value = program_of(lambda x: x, arg(3, dtype=dtype)).values[0]
    assert (str(value), value.bytes) == (text, size)


def test_locations_lead_back_to_the_source() -> None:
    def model(x: Any) -> Any:
        with jax.named_scope("block"):
            return jnp.sin(x)

    source = source_of(model, arg(4))
    (sine,) = find(source.program, "sine")
    assert source.location(sine).startswith("test_reader.py:")
    assert "block" in source.location(sine)


def test_a_use_of_a_carry_is_found_in_the_module() -> None:
    source = source_of(lambda x: lax.fori_loop(0, 3, lambda i, c: c @ c, x), arg(8, 8))
    (carry,) = find(source.program, "carry")
    (dot,) = find(source.program, "dot_general")
    start, goes_on = source.use(carry, 0), source.use(carry, 1)
    assert start.operation.name == "stablehlo.while"
    assert goes_on.operation.name == "stablehlo.return"
    assert goes_on.operation.operands[goes_on.operand] == source.definitions[source.program.ops[dot].results[0]]
    assert start.operation.operands[start.operand] == source.definitions[0]


def test_a_generated_recurrence_is_a_program() -> None:
    """In each of whose steps the array of ones is one of its own (see `frontend/attributes.py`)."""
    program = source_of_text(recurrence_text(3)).program
    assert program.source_op_count == 3 * 9
    assert [value.shape for value in program.values][-1] == program.values[0].shape


def test_equal_ops_on_equal_operands_are_repetitions() -> None:
    """The second sine is one, with what is made of it; the other product and the cosine are none. Constants of complex
    numbers, which jaxlib cannot read, are left apart."""

    def run(x: Any, w: Any) -> Any:
        turn = jnp.array([1j, 2j], jnp.complex64)
        return jnp.sin(x) @ w, jnp.sin(x) @ w, jnp.cos(x) @ w, jnp.sin(x).T @ w, w[0, :2] * turn, w[1, :2] * turn

    program = program_of(run, arg(8, 8), arg(8, 8))
    found = [op.name.partition(".")[2] for op in program.ops if op.repeats]
    assert sorted(name for name in found if name in ("sine", "cosine", "dot_general")) == ["dot_general", *["sine"] * 2]


def test_an_op_that_nothing_reads_has_no_repetitions() -> None:
    sine = "stablehlo.sine %x : tensor<8xf32>"
    text = (
        f"func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {{ %0 = {sine} %1 = {sine} return %1 : tensor<8xf32> }}"
    )
    assert not any(op.repeats for op in source_of_text(text).program.ops)
