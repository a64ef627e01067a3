"""Collectives in the text of XLA:GPU modules: combined, asynchronous, in loops and wrapped computations."""

from __future__ import annotations

import pytest

from toast_cli.ask_xla.collectives import CompiledCollective, collectives_in

MESH = (("data", "model"), (4, 2))
ALONG_DATA = "replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}"
ALONG_MODEL = "replica_groups=[4,2]<=[8]"

# One instruction of an entry computation, and what it says.
INSTRUCTIONS = {
    "gather": (
        f"(bf16[8,64]{{1,0}}, bf16[32,64]{{1,0}}) all-gather-start(%p), channel_id=1, {ALONG_DATA}, dimensions={{0}}",
        [CompiledCollective("all-gather", ("data",), 32 * 64 * 2, 1.0)],
    ),
    "combined scatter": (
        "((bf16[32,64]{1,0}, f32[32,2]{1,0}), (bf16[8,64]{1,0}, f32[8,2]{1,0})) reduce-scatter-start(%p, %q), "
        f"channel_id=2, {ALONG_DATA}, dimensions={{0}}, to_apply=%add",
        [
            CompiledCollective("reduce-scatter", ("data",), 1024, 1.0),
            CompiledCollective("reduce-scatter", ("data",), 64, 1.0),
        ],
    ),
    "reduction": (
        f"bf16[1024]{{0}} all-reduce-start(%concatenated), channel_id=3, {ALONG_MODEL}, to_apply=%add",
        [CompiledCollective("all-reduce", ("model",), 2048, 1.0)],
    ),
    "combined reductions": (
        f"(f32[64]{{0}}, f32[8]{{0}}) all-reduce-start(%p, %q), channel_id=4, {ALONG_MODEL}, to_apply=%add",
        [CompiledCollective("all-reduce", ("model",), 256, 1.0), CompiledCollective("all-reduce", ("model",), 32, 1.0)],
    ),
    "exchange": (
        "((f32[16,4,16]{2,0,1}), f32[16,4,16]{2,0,1}) all-to-all-start(%p), channel_id=5, "
        f"{ALONG_DATA}, dimensions={{1}}",
        [CompiledCollective("all-to-all", ("data",), 4096, 1.0)],
    ),
    "exchange of pieces": (
        "((f32[8]{0}, f32[8]{0}), (f32[8]{0}, f32[8]{0})) all-to-all-start(%p, %q), channel_id=6, " + ALONG_MODEL,
        [CompiledCollective("all-to-all", ("model",), 64, 1.0)],
    ),
    "halo": (
        "(f32[1,1,2]{1,2,0}, f32[1,1,2]{1,2,0}) collective-permute-start(%p), channel_id=7, "
        "source_target_pairs={{0,2},{1,3},{2,4},{3,5},{4,6},{5,7}}",
        [CompiledCollective("collective-permute", ("data",), 8, 1.0)],
    ),
}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_one_instruction(name: str) -> None:
    line, expected = INSTRUCTIONS[name]
    start = line.replace("-start(", "-done(").partition("-done(")[0].split()[-1]
    text = f"HloModule m\n\nENTRY %main () -> f32[] {{\n  %s = {line}\n  ROOT %d = f32[8] {start}-done(%s)\n}}\n"
    assert collectives_in(text, *MESH) == expected


LOOP = f"""HloModule jit_step, is_scheduled=true, num_partitions=8

%add.clone (x: bf16[], y: bf16[]) -> bf16[] {{
  ROOT %add.1 = bf16[] add(%x, %y)
}}

%wrapped_gather (param_0: bf16[8,64]) -> bf16[32,64] {{
  ROOT %all-gather.2 = bf16[32,64]{{1,0}} all-gather(%param_0), channel_id=11, {ALONG_DATA}, dimensions={{0}}
}}

%body (arg: (s32[], bf16[8,64])) -> (s32[], bf16[8,64]) {{
  %async-start = ((bf16[8,64]{{1,0}}), bf16[32,64]{{1,0}}, s32[]) async-start(%w), async_execution_thread="parallel", calls=%wrapped_gather
  %async-done = bf16[32,64]{{1,0}} async-done(%async-start), async_execution_thread="parallel", calls=%wrapped_gather
  %all-reduce-start = bf16[8,64]{{1,0}} all-reduce-start(%h), channel_id=12, {ALONG_MODEL}, to_apply=%add.clone, metadata={{op_name="jit(step)/while/body/dot_general"}}
  ROOT %t = (s32[], bf16[8,64]{{1,0}}) tuple(%i, %d)
}}

%condition (arg: (s32[], bf16[8,64])) -> pred[] {{
  ROOT %lt = pred[] fusion(%i), kind=kLoop, calls=%fused_compare
}}

ENTRY %main (p: bf16[8,64]) -> bf16[8,64] {{
  %while = (s32[], bf16[8,64]{{1,0}}) while(%init), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"12"}},"known_init_step":{{"init":"0","step":"1"}}}}
  ROOT %out = bf16[8,64]{{1,0}} get-tuple-element(%while), index=1
}}
"""  # noqa: E501


def test_a_loop_with_wrapped_and_named_collectives() -> None:
    assert collectives_in(LOOP, *MESH) == [
        CompiledCollective("all-gather", ("data",), 4096, 12.0),
        CompiledCollective("all-reduce", ("model",), 1024, 12.0, "jit(step)/while/body/dot_general"),
    ]
