"""Operations that do something besides computing: each is written with a device, or refused with the reason."""

from __future__ import annotations

import pytest
from emitted import emit
from programs import Case, evaluator_of, round_mesh, source_of_text

from toast_cli import xla
from toast_cli.ask_xla.compile import as_stablehlo
from toast_cli.ask_xla.numbers import compare_here, refuse_effects
from toast_cli.base.errors import UsageError

TEXT = """module @m attributes {{mhlo.num_partitions = 4 : i32}} {{
  func.func public @main(%x: tensor<64x16xf32>, %w: tensor<16x16xf32>) -> tensor<64x16xf32> {{
    %t = stablehlo.create_token : !stablehlo.token
    %0 = stablehlo.dot %x, %w : (tensor<64x16xf32>, tensor<16x16xf32>) -> tensor<64x16xf32>
    {body}
    return %r : tensor<64x16xf32>
  }}
}}
"""
HOST = "<{{channel_handle = #stablehlo.channel_handle<handle = {}, type = {}>, is_host_transfer = true}}>"
RECEIVED = (
    "(!stablehlo.token) -> (tensor<64x16xf32>, !stablehlo.token)\n    %r = stablehlo.add %0, %i#0 : tensor<64x16xf32>"
)
GIVEN = "(tensor<64x16xf32>, !stablehlo.token) -> !stablehlo.token\n    %r = stablehlo.tanh %0 : tensor<64x16xf32>"
CALL = "stablehlo.custom_call @log_it(%0) {has_side_effect = true} : (tensor<64x16xf32>) -> "
BODIES = {
    "infeed": f'%i:2 = "stablehlo.infeed"(%t) <{{infeed_config = "", layout = [[1, 0]]}}> : {RECEIVED}',
    "outfeed": f'%o = "stablehlo.outfeed"(%0, %t) <{{outfeed_config = ""}}> : {GIVEN}',
    "recv": f'%i:2 = "stablehlo.recv"(%t) {HOST.format(1, 3)} : {RECEIVED}',
    "send": f'%o = "stablehlo.send"(%0, %t) {HOST.format(2, 2)} : {GIVEN}',
    "call": f"{CALL}()\n    %r = stablehlo.tanh %0 : tensor<64x16xf32>",
    "function": f"%r = {CALL}tensor<64x16xf32>",
    "unread": f"%u = {CALL}tensor<64x16xf32>\n    %r = stablehlo.tanh %0 : tensor<64x16xf32>",
    "partition_id": "%p = stablehlo.partition_id : tensor<ui32>\n    %r = stablehlo.tanh %0 : tensor<64x16xf32>\n"
    "    %q = stablehlo.custom_call @log_it(%p) : (tensor<ui32>) -> tensor<64x16xf32>",
}
ON_ONE = "{maximal device=0}"


def case(body: str) -> Case:
    source = source_of_text(TEXT.format(body=BODIES[body]))
    return Case(source, evaluator_of(source, round_mesh(data=2, model=2)))


def written(body: str, form: str) -> str:
    one = case(body)
    return emit(one.source, one.lowered(()), form).decode()


@pytest.mark.parametrize("body", ["infeed", "outfeed", "recv", "send", "call", "function", "unread"])
def test_hlo_says_on_which_device_it_runs(body: str) -> None:
    text = written(body, "hlo")
    assert ON_ONE in text
    try:
        xla.compile_program(as_stablehlo(text.encode(), "hlo"), xla.cpu_devices(4), shardy=False)
    except RuntimeError as refused:  # by what runs, not by the partitioner
        assert "log_it for Host" in str(refused) or "not supported by XLA:CPU ThunkEmitter" in str(refused)


@pytest.mark.parametrize("body", ["recv", "send"])
def test_shardy_is_told_on_which_device_it_runs(body: str) -> None:
    text = written(body, "stablehlo")
    assert "sdy.mesh @maximal_mesh_0 = <[], device_ids=[0]>" in text
    try:
        xla.compile_program(text.encode(), xla.cpu_devices(4), shardy=True)
    except RuntimeError as refused:
        assert "not supported by XLA:CPU ThunkEmitter" in str(refused)


@pytest.mark.parametrize("body", ["call", "function", "unread", "infeed", "outfeed"])
def test_shardy_forgets_where_it_runs(body: str) -> None:
    with pytest.raises(
        UsageError, match=r":\d+: (the custom call log_it has side effects|(in|out)feed needs).*--format hlo"
    ):
        written(body, "stablehlo")


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_a_program_that_asks_on_which_device_it_runs(form: str) -> None:
    with pytest.raises(UsageError, match="partition_id asks on which device it runs; XLA's partitioner refuses"):
        written("partition_id", form)


@pytest.mark.parametrize("form", ["stablehlo", "specs"])
def test_what_moves_arrays_to_the_host_has_no_device(form: str) -> None:
    body = (
        "%r = stablehlo.custom_call @annotate_device_placement(%0) {has_side_effect = true, mhlo.frontend_attributes = "
        '{_xla_buffer_placement = "pinned_host"}} : (tensor<64x16xf32>) -> tensor<64x16xf32>'
    )
    source = source_of_text(TEXT.format(body=body))
    assert b"maximal" not in emit(source, Case(source, evaluator_of(source, round_mesh(data=2))).lowered(()), form)


@pytest.mark.parametrize("name", ["infeed", "outfeed", "recv", "send"])
def test_nobody_waits_for_a_host(name: str) -> None:
    module = source_of_text(TEXT.format(body=BODIES[name])).module
    with pytest.raises(ValueError, match=f"has {name} operations, which wait for a host"):
        refuse_effects(module)
    content = xla.write_bytecode(module)
    with pytest.raises(ValueError, match="wait for a host"):
        compare_here(content, content, 1, 0, "stablehlo", 1.0)
