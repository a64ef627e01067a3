"""Arrays in the host's memory count there, and moving them takes time beside computing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from emitted import emit
from programs import Case, evaluator_of, round_mesh, source_of_text

from toast_cli import xla
from toast_cli.ask_xla.compile import as_stablehlo
from toast_cli.frontend import Source, load
from toast_cli.plan.decision_space import decision_space
from toast_cli.program.values import moved, on_host

A = "tensor<64x32xf32>"
KIB = 1024


def moving(value: str, kind: str, type: str = A) -> str:
    placement = f'mhlo.frontend_attributes = {{_xla_buffer_placement = "{kind}"}}'
    return (
        f"stablehlo.custom_call @annotate_device_placement({value}) "
        f"{{has_side_effect = true, {placement}}} : ({type}) -> {type}"
    )


# A moment on the host, as JAX lowers it: what is on the device already is moved there once more at the end.
STEP = f"""func.func public @main(%w: {A} {{mhlo.memory_kind = "device", tf.aliasing_output = 0 : i32}},
    %m: {A} {{mhlo.memory_kind = "pinned_host", tf.aliasing_output = 1 : i32}})
    -> ({A} {{mhlo.memory_kind = "device"}}, {A} {{mhlo.memory_kind = "pinned_host"}}) {{
  %0 = {moving("%m", "device")}
  %1 = stablehlo.add %0, %w : {A}
  %2 = stablehlo.subtract %w, %1 : {A}
  %3 = {moving("%1", "pinned_host")}
  %4 = {moving("%2", "device")}
  %5 = {moving("%3", "pinned_host")}
  return %4, %5 : {A}, {A}
}}"""
STACK, SLICE = "tensor<4x64x32xf32>", "tensor<1x64x32xf32>"
# A loop saves what it carries, layer by layer; another reads it from the last layer on.
SAVED = f"""func.func public @main(%x: {A}) -> {A} {{
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %empty = stablehlo.constant dense<0.0> : {STACK}
  %saved:3 = stablehlo.while(%i = %zero, %h = %x, %s = %empty) : tensor<i32>, {A}, {STACK} cond {{
    %c = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  }} do {{
    %0 = {moving("%h", "pinned_host")}
    %1 = stablehlo.reshape %0 : ({A}) -> {SLICE}
    %2 = stablehlo.dynamic_update_slice %s, %1, %i, %zero, %zero
      : ({STACK}, {SLICE}, tensor<i32>, tensor<i32>, tensor<i32>) -> {STACK}
    %3 = stablehlo.tanh %h : {A}
    %4 = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %4, %3, %2 : tensor<i32>, {A}, {STACK}
  }}
  %back:2 = stablehlo.while(%i = %zero, %g = %saved#1) : tensor<i32>, {A} cond {{
    %c = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  }} do {{
    %0 = stablehlo.dynamic_slice %saved#2, %i, %zero, %zero, sizes = [1, 64, 32]
      : ({STACK}, tensor<i32>, tensor<i32>, tensor<i32>) -> {SLICE}
    %1 = stablehlo.reshape %0 : ({SLICE}) -> {A}
    %2 = {moving("%1", "device")}
    %3 = stablehlo.multiply %g, %2 : {A}
    %4 = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %4, %3 : tensor<i32>, {A}
  }}
  return %back#1 : {A}
}}"""


def case_of_text(text: str, rate: float = 0.0) -> Case:
    source, mesh = source_of_text(text), round_mesh(data=4)
    mesh = replace(mesh, chip=replace(mesh.chip, host_bytes_per_second=rate))
    return Case(source, evaluator_of(source, mesh))


def split(case: Case) -> Any:
    """The first dimension over all devices."""
    return (decision_space(case.problem).choices[0],)


def test_a_moment_on_the_host() -> None:
    case = case_of_text(STEP)
    plan = split(case)
    assert case.evaluator.exact_cost(plan).argument_bytes == 2 * KIB  # w, of 8 KiB, on each of 4 devices
    assert case.evaluator.host_bytes(plan) == 2 * KIB  # its new version takes the place of m
    assert case.evaluator.host_bytes(()) == 8 * KIB


def test_what_lies_there_is_not_moved() -> None:
    program = source_of_text(STEP).program
    assert [op.detail for op in program.ops if op.detail] == ["MoveToDevice", "MoveToHost"]
    assert len(moved(program)) == 2 and len(on_host(program)) == 3


def test_saved_activations() -> None:
    case = case_of_text(SAVED)
    plan = split(case)
    assert case.evaluator.host_bytes(plan) == 8 * KIB  # the stack, of 32 KiB, on each of 4 devices
    assert case.evaluator.exact_cost(plan).peak_bytes < 8 * KIB
    beside = case_of_text(SAVED.replace('"pinned_host"', '"device"'))
    assert beside.evaluator.host_bytes(split(beside)) == 0
    assert beside.evaluator.exact_cost(split(beside)).peak_bytes > 8 * KIB


@pytest.mark.parametrize(
    ("text", "moved_bytes"), [(STEP, 2 * 2 * KIB), (SAVED, 2 * 4 * 2 * KIB)], ids=["step", "saved"]
)
def test_transfers_take_time_beside_computing(text: str, moved_bytes: int) -> None:
    case = case_of_text(text, rate=1e3)
    cost = case.evaluator.cost(split(case))
    assert cost.transfer_seconds == pytest.approx(moved_bytes / 1e3)
    assert cost.step_seconds == pytest.approx(cost.transfer_seconds + cost.communication_seconds)
    assert case_of_text(text).evaluator.cost(split(case)).compute_seconds == cost.compute_seconds


def written(source: Source, form: Any) -> str:
    case = Case(source, evaluator_of(source, round_mesh(data=4)))
    return emit(source, case.lowered(split(case)), form).decode()


def test_what_is_written_says_which_memory() -> None:
    assert written(source_of_text(STEP), "stablehlo").count('mhlo.memory_kind = "pinned_host"') == 2
    array = "f32[64,32]{1,0"
    assert f"{{({array}}}, {array}:S(5)}})->({array}}}, {array}:S(5)}})}}" in written(source_of_text(STEP), "hlo")
    assert "S(5)" not in written(source_of_text(SAVED), "hlo")


def test_hlo_says_it_too() -> None:
    """What is written is read again."""
    text = written(source_of_text(STEP), "hlo")
    module = xla.parse_module(xla.make_context(), as_stablehlo(text.encode(), "hlo"))
    assert str(module).count('mhlo.memory_kind = "pinned_host"') == 2
    arguments = load("m.hlo", content=text.encode()).program.arguments
    assert [one.on_host for one in arguments] == [False, True]
