"""Reading compiled HLO, random inputs, and work in child processes."""

from __future__ import annotations

import math
import os
import time

import numpy as np
import pytest

from toast_cli import xla
from toast_cli.ask_xla import confirm
from toast_cli.ask_xla.child import Failure, ask
from toast_cli.ask_xla.collectives import UNKNOWN, CompiledCollective, axes_of, collectives_in, groups_in, permuted_axes
from toast_cli.ask_xla.hlo_text import array_bytes, cycles_of
from toast_cli.ask_xla.numbers import ResultError, compare_numbers, input_sets, relative_error
from toast_cli.base.children import abort_reason
from toast_cli.hardware import load_spec

MESH = (("data", "model"), (4, 2))

GROUPS = [
    ("replica_groups={{0,1},{2,3},{4,5},{6,7}}, x", ("model",)),
    ("replica_groups={{0,2,4,6},{1,3,5,7}}", ("data",)),
    ("replica_groups={{0,1,2,3,4,5,6,7}}", ("data", "model")),
    ("replica_groups={}", ("data", "model")),
    ("replica_groups=[4,2]<=[8]", ("model",)),
    ("replica_groups=[2,4]<=[4,2]T(1,0)", ("data",)),
    ("replica_groups=[1,8]<=[8]", ("data", "model")),
    ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, dimensions={0}", ("data",)),
    ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}", ("data", "model")),
    ("replica_groups=mesh['axis_0'=1,'axis_1'=2,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_1'}", ("model",)),
    ("replica_groups={{0,3},{1,2},{4,7},{5,6}}", ("groups of 2",)),
    ("replica_groups={{0,3,1},{2,4,7,5,6}}", UNKNOWN),
]


@pytest.mark.parametrize(("attributes", "axes"), GROUPS)
def test_replica_groups(attributes: str, axes: tuple[str, ...]) -> None:
    groups = groups_in(attributes, 8)
    assert groups is not None
    assert axes_of(groups, *MESH) == axes


def test_no_replica_groups() -> None:
    assert groups_in("dimensions={0}", 8) is None


def test_permuted_axes() -> None:
    assert permuted_axes("source_target_pairs={{0,2},{2,4},{4,6},{6,0}}", *MESH) == ("data",)
    assert permuted_axes("source_target_pairs={{0,1},{1,0}}", *MESH) == ("model",)


SIZES = [
    ("f32[8,16]{1,0}", (512,)),
    ("bf16[4,512]{1,0:T(8,128)(2,1)S(1)}", (4096,)),
    ("(f32[2]{0}, s8[3]{0}, pred[5]{0}, c64[2]{0}, u4[4]{0}, f8e4m3fn[6]{0})", (8, 3, 5, 16, 2, 6)),
    ("f32[]", (4,)),
]


@pytest.mark.parametrize(("kind", "sizes"), SIZES)
def test_array_bytes(kind: str, sizes: tuple[int, ...]) -> None:
    assert array_bytes(kind) == sizes


COMPILED = """HloModule jit_f, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %r = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (p: f32[8,4]) -> f32[2,4] {
  %ar = f32[8,4]{1,0} all-reduce(%p), channel_id=5, replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  ROOT %ds = f32[2,4]{1,0} dynamic-slice(%ar), dynamic_slice_sizes={2,4}
}

%overlapping (p: f32[4]) -> f32[8] {
  ROOT %ag.2 = f32[8]{0} all-gather(%p), channel_id=7, replica_groups=[4,2]<=[8], dimensions={0}
}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %ag = f32[8]{0} all-gather(%x), channel_id=7, replica_groups=[4,2]<=[8], dimensions={0}, metadata={op_name="jit(f)/dot"}
  %f = f32[8]{0} fusion(%x), kind=kCustom, calls=%overlapping
  ROOT %t2 = (s32[], f32[8]{0}) tuple(%i, %ag)
}

%condition (t: (s32[], f32[8])) -> pred[] {
  %limit = s32[] constant(5)
  ROOT %c = pred[] compare(%i, %limit), direction=LT
}

%left (p: f32[4]) -> f32[4] {
  ROOT %cp = f32[4]{0} collective-permute(%p), channel_id=9, source_target_pairs={{0,1},{1,0}}
}

%right (p: f32[4]) -> f32[4] {
  ROOT %n = f32[4]{0} negate(%p)
}

%unused (p: f32[4]) -> f32[4] {
  ROOT %lost = f32[4]{0} all-reduce(%p), channel_id=11, replica_groups={}, to_apply=%add
}

ENTRY %main (a: f32[8,4], p: pred[]) -> f32[2,4] {
  %rs = f32[2,4]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1
  %w = (s32[], f32[8]{0}) while(%init), condition=%condition, body=%body
  %two = (f32[4]{0}, f32[2]{0}) all-reduce(%x, %y), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add
  %parts = (f32[1,2]{1,0}, f32[1,2]{1,0}) all-to-all(%x, %y), channel_id=2, replica_groups=[4,2]<=[8]
  %start = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), channel_id=3, replica_groups=[4,2]<=[8], dimensions={0}
  %done = f32[8]{0} all-gather-done(%start)
  %b = f32[4]{0} conditional(%p, %x, %x), true_computation=%left, false_computation=%right
}
"""  # noqa: E501


def test_collectives() -> None:
    found = collectives_in(COMPILED, *MESH)
    assert sorted(found, key=lambda c: (c.kind, c.bytes, c.count)) == [
        CompiledCollective("all-gather", ("model",), 32, 1.0),
        CompiledCollective("all-gather", ("model",), 32, 5.0, "jit(f)/dot"),
        CompiledCollective("all-reduce", ("model",), 8, 1.0),
        CompiledCollective("all-reduce", ("model",), 16, 1.0),
        CompiledCollective("all-to-all", ("model",), 16, 1.0),
        CompiledCollective("collective-permute", ("model",), 16, 0.5),
        CompiledCollective("reduce-scatter", ("data",), 32, 1.0),
    ]


ONE_CHANNEL = """HloModule jit_f

%step (p: f32[4]) -> f32[4] {
  %k = f32[4]{0} collective-permute(%a), channel_id=1, source_target_pairs={{0,1},{1,0}}, metadata={op_name="jit(f)/ppermute"}
  ROOT %v = f32[4]{0} collective-permute(%b), channel_id=1, source_target_pairs={{0,1},{1,0}}, metadata={op_name="jit(f)/ppermute"}
}

%overlapped (p: f32[4]) -> f32[4] {
  ROOT %sum = f32[4]{0} all-reduce(%p), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add, metadata={op_name="jit(f)/psum"}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %one = f32[4]{0} call(%p), to_apply=%step
  %again = f32[4]{0} call(%one), to_apply=%overlapped
  %first = f32[4]{0} all-reduce(%p), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add, metadata={op_name="jit(f)/psum"}
  ROOT %other = f32[4]{0} all-reduce(%p), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add, metadata={op_name="jit(f)/grad/psum"}
}
"""  # noqa: E501


def test_collectives_that_share_a_channel() -> None:
    """JAX gives one channel to all collectives in `shard_map`. Two in one computation are two; those in others, where
    they have one place, are repeated."""
    found = collectives_in(ONE_CHANNEL, *MESH)
    assert sorted((c.kind, c.name) for c in found) == [
        ("all-reduce", "jit(f)/grad/psum"),
        ("all-reduce", "jit(f)/psum"),
        ("collective-permute", "jit(f)/ppermute"),
        ("collective-permute", "jit(f)/ppermute"),
    ]


def test_the_compilers_trip_count_goes_first() -> None:
    line = "condition=%condition, body=%body"
    text = COMPILED.replace(line, line + ', backend_config={"known_trip_count":{"n":"3"}}')
    assert [c.count for c in collectives_in(text, *MESH) if c.name] == [3.0]


WINDOWED = """HloModule jit_f, num_partitions=8

%wide.windowed_dot_general_body_KIND.clone.sunk (t: (bf16[4,8], u32[])) -> (bf16[4,8], u32[]) {
  %start = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[], u32[]) collective-permute-start(%a), channel_id=3, source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}
  %done = bf16[4,8]{1,0} collective-permute-done(%start), metadata={op_name="jit(f)/dot"}
  %start.1 = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[], u32[]) collective-permute-start(%b), channel_id=4, source_target_pairs={{2,0},{4,2},{6,4},{0,6},{3,1},{5,3},{7,5},{1,7}}
  ROOT %t2 = (bf16[4,8], u32[]) tuple(%done, %i)
}

%cond (t: (bf16[4,8], u32[])) -> pred[] {
  %limit = u32[] constant(4)
  ROOT %c = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (a: bf16[4,8]) -> bf16[4,8] {
  %w = (bf16[4,8]{1,0}, u32[]) while(%init), condition=%cond, body=%wide.windowed_dot_general_body_KIND.clone.sunk
  %w.1 = (bf16[4,8]{1,0}, u32[]) while(%init), condition=%cond, body=%wide.windowed_dot_general_body_KIND.clone.sunk
}
"""  # noqa: E501


@pytest.mark.parametrize(("kind", "name", "size"), [("ag", "all-gather", 256), ("rs", "reduce-scatter", 64)])
def test_windowed_products(kind: str, name: str, size: int) -> None:
    """A ring over data=4 that passes 64 bytes around, both ways at once, is one gather to 256 bytes or one scatter to
    64.
    """
    found = collectives_in(WINDOWED.replace("KIND", kind), *MESH)
    assert found == [CompiledCollective(name, ("data",), size, 2.0)]
    body = "body=%wide.windowed_dot_general_body_KIND.clone.sunk"
    counted = WINDOWED.replace(body, body + ', backend_config={"known_trip_count":{"n":"2"}}')
    assert collectives_in(counted.replace("KIND", kind), *MESH) == found


@pytest.mark.parametrize(("kind", "made"), [("rs", ("reduce-scatter", 64)), ("ag", ("all-gather", 256))])
def test_the_permute_before_or_after_a_windowed_product_is_part_of_it(kind: str, made: tuple[str, int]) -> None:
    pairs = "source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}"
    named = WINDOWED.replace(pairs, pairs + ', metadata={op_name="jit(f)/dot"}').replace("KIND", kind)
    closing = "  %home = bf16[4,8]{1,0} collective-permute(%sum), channel_id=9, " + pairs
    own, other = (f'{closing}, metadata={{op_name="jit(f)/{name}"}}\n}}' for name in ("dot", "roll"))
    around = CompiledCollective(made[0], ("data",), made[1], 2.0, "jit(f)/dot")
    assert collectives_in(named[: named.rindex("}")] + own, *MESH) == [around]
    moved = CompiledCollective("collective-permute", ("data",), 64, 1.0, "jit(f)/roll")
    assert collectives_in(named[: named.rindex("}")] + other, *MESH) == [around, moved]


def test_the_permutes_of_an_unrolled_scatter() -> None:
    """Around 4 devices: zeros both ways, which scatters of one shape share; then a sum each way, and one that brings it
    home. Without zeros, of another op, or with one more, permutes are what they are.
    """
    there = "source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}"
    back = "source_target_pairs={{2,0},{4,2},{6,4},{0,6},{3,1},{5,3},{7,5},{1,7}}"

    def text(op: str, permutes: list[tuple[str, str]]) -> str:
        permute = (
            "  %p.{n} = bf16[4,8]{{1,0}} collective-permute({what}), channel_id={n}, {way}, "
            'metadata={{op_name="jit(f)/{op}"}}'
        )
        lines = [permute.format(n=n, what=what, way=way, op=op) for n, (what, way) in enumerate(permutes, 1)]
        return "\n".join(
            ["HloModule jit_f, num_partitions=8", "", "ENTRY %main (a: bf16[4,8]) -> bf16[4,8] {", *lines, "}"]
        )

    zeros = [("%broadcast.3", there), ("%broadcast.3", back)]
    sums = [("%fusion.1", there), ("%gte.2", back), ("%add", there)]
    scatter = CompiledCollective("reduce-scatter", ("data",), 64, 1.0, "jit(f)/dot_general")
    assert collectives_in(text("dot_general", zeros + sums), *MESH) == [scatter]
    assert collectives_in(text("dot_general", zeros + sums * 2), *MESH) == [scatter] * 2
    for op, permutes in (("dot_general", sums), ("roll", sums), ("dot_general", [*sums, sums[0]])):
        whole = permutes if len(permutes) == 3 else zeros + permutes
        assert [c.kind for c in collectives_in(text(op, whole), *MESH)] == ["collective-permute"] * len(whole)


# ---------------------------------------------------------------- inputs and numbers

READERS = """
func.func public @main(%table: tensor<10x4xf32>, %i: tensor<3x1xi32>, %v: tensor<4xf32>, %n: tensor<5xi64>, %b: tensor<2xi1>,
                       %h: tensor<4xbf16>, %e: tensor<4xf8E4M3FN>, %c: tensor<4xcomplex<f32>>, %u: tensor<4xui8>) -> tensor<3x4xf32> {
  %0 = "stablehlo.gather"(%table, %i) <{dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, 4>}> : (tensor<10x4xf32>, tensor<3x1xi32>) -> tensor<3x4xf32>
  %1 = stablehlo.multiply %v, %v : tensor<4xf32>
  %2 = stablehlo.sqrt %1 : tensor<4xf32>
  return %0 : tensor<3x4xf32>
}
"""  # noqa: E501


def test_random_inputs() -> None:
    module = xla.parse_module(xla.make_context(), READERS)
    table, index, moment, plain, flag, half, eighth, wave, small = input_sets(module, 3, 1)[0]
    assert table.shape == (10, 4) and (table < 0).any()
    assert index.dtype == np.int32 and index.min() >= 0 and index.max() < 10
    assert (moment >= 0).all()
    assert plain.dtype == np.int64 and plain.max() < 8
    dtypes = [str(a.dtype) for a in (flag, half, eighth, wave, small)]
    assert dtypes == ["bool", "bfloat16", "float8_e4m3fn", "complex64", "uint8"]
    again = input_sets(module, 3, 1)[0]
    assert all(np.array_equal(a, b) for a, b in zip(again[:3], (table, index, moment), strict=True))


ERRORS = [
    ([1.0, 2.0], [1.0, 2.0], 0.0),
    ([1.0, -4.0], [1.0, -3.0], 0.25),
    ([0.0, 0.0], [0.0, 0.5], 0.5),
    ([np.nan, 1.0], [np.nan, 1.0], 0.0),
    ([np.nan, 1.0], [0.0, 1.0], np.inf),
    ([1.0, 1.0], [np.inf, 1.0], np.inf),
    ([np.inf, 2.0], [np.inf, 2.0], 0.0),
    ([], [], 0.0),
]


@pytest.mark.parametrize(("expected", "found", "error"), ERRORS)
def test_relative_error(expected: list[float], found: list[float], error: float) -> None:
    assert relative_error(np.array(expected), np.array(found)) == error


# ---------------------------------------------------------------- child processes

PROGRAM = b"""
module @jit_f {
  func.func public @main(%arg0: tensor<8x16xf32>, %arg1: tensor<16x4xf32>) -> tensor<8x4xf32> {
    %0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0] : (tensor<8x16xf32>, tensor<16x4xf32>) -> tensor<8x4xf32>
    return %0 : tensor<8x4xf32>
  }
}
"""  # noqa: E501
MARKS = [
    (
        b"module @jit_f {",
        b'module @jit_f attributes {mhlo.num_partitions = 4 : i32} {\n  sdy.mesh @mesh = <["data"=4]>',
    ),
    (b"%arg0: tensor<8x16xf32>,", b'%arg0: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}]>},'),
]


def split_program() -> bytes:
    text = PROGRAM
    for before, after in MARKS:
        assert before in text
        text = text.replace(before, after)
    return text


def test_compare_numbers() -> None:
    errors = compare_numbers(PROGRAM, split_program(), 4)
    assert isinstance(errors, list)
    (error,) = errors
    assert isinstance(error, ResultError)
    assert (error.index, error.type) == (0, "f32[8,4]") and error.error < 1e-6


@pytest.mark.children
def test_a_child_that_dies() -> None:
    assert ask(os.abort) == Failure("the compiler ended with signal 6", aborted=True)


@pytest.mark.children
def test_a_child_says_what_a_function_returns_or_raises() -> None:
    assert ask(math.sqrt, 4.0) == (2.0, "")
    assert ask(math.sqrt, -1.0) == Failure("math domain error")


@pytest.mark.children
def test_a_child_that_does_not_end() -> None:
    assert ask(time.sleep, 60, timeout_seconds=0.2) == Failure("no answer within 0.2 seconds", aborted=True)


REASONS = [
    ("noise\nF1121 04:00:00.1 1 a.cc:3] Check failed: a == b (1 vs. 2)\n*** trace", "a == b (1 vs. 2)"),
    ("F1121 04:00:00.1 1 a.cc:3] no such layout\n", "no such layout"),
    ("LLVM ERROR: out of memory\n", "out of memory"),
    ("ERROR: that is wrong.\n", "that is wrong"),
    ("Traceback\nKeyError: 'x'\n", ""),
]


@pytest.mark.parametrize(("log", "reason"), REASONS)
def test_abort_reasons(log: str, reason: str) -> None:
    assert abort_reason(log) == reason


@pytest.mark.parametrize(
    ("said", "cycles"),
    [('"estimated_cycles":"1824"', 1824.0), ('"estimated_cycles":"9223372036854775807"', 0.0), ("", 0.0)],
)
def test_cycles_of_an_instruction(said: str, cycles: float) -> None:
    """XLA:TPU writes the largest number where a fusion has no estimate: such a step took hundreds of years."""
    assert cycles_of(f"  %f = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%c, backend_config={{{said}}}") == cycles


# -- collectives in the text of XLA:GPU modules: combined, asynchronous, in loops and wrapped computations


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


# -- several TPU slices: what libtpu writes for collectives between them is read as collectives of the mesh


NAMES, SLICE_SIZES = ("slice", "data", "model"), (2, 2, 2)
ALL = "{1,2}x{0:3}"
EACH = "{{100000,200000},{100001,200001},{100002,200002},{100003,200003}}"
ROWS = "{{100000,100002,200000,200002},{100001,100003,200001,200003}}"
PAIRS = "{{100000->200000},{200000->100000},{100001->200001},{200001->100001}}"

# an instruction as libtpu 0.0.42.1 writes it -> the collective
WRITTEN = [
    (f'"{ALL}"', "ALL_REDUCE", "all-reduce", ("slice",)),
    (f'"{ALL}"', "REDUCE_SCATTER", "reduce-scatter", ("slice",)),
    (EACH, "ALL_TO_ALL", "all-to-all", ("slice",)),
    (ROWS, "ALL_TO_ALL", "all-to-all", ("slice", "data")),
    (PAIRS, "ONE_TO_ONE", "collective-permute", ("slice",)),
]


def module(line: str) -> str:
    return f"HloModule m, is_scheduled=true, num_partitions=4\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n  {line}\n}}\n"


@pytest.mark.parametrize(("target", "sent", "kind", "axes"), WRITTEN)
def test_between_slices(target: str, sent: str, kind: str, axes: tuple[str, ...]) -> None:
    line = (
        "%recv = (f32[4,128]{1,0:T(4,128)}, u32[], token[]) recv(%after-all), channel_id=1, is_host_transfer=true, "
        f'frontend_attributes={{_xla_host_transfer_rendezvous="x_0",_xla_megascale_target={target},'
        f'_xla_megascale_transfer_type="{sent}"}}'
    )
    assert collectives_in(module(line), NAMES, SLICE_SIZES) == [CompiledCollective(kind, axes, 2048, 1.0)]


def test_inside_each_slice() -> None:
    line = "%sum = f32[4,128]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add"
    assert collectives_in(module(line), NAMES, SLICE_SIZES) == [CompiledCollective("all-reduce", ("model",), 2048, 1.0)]


def test_a_receipt_that_is_no_collective() -> None:
    line = "%recv = (f32[4]{0}, u32[], token[]) recv(%after-all), channel_id=1, is_host_transfer=true"
    assert collectives_in(module(line), NAMES, SLICE_SIZES) == []


def test_an_axis_that_a_network_divides_is_two_for_the_schedule() -> None:
    """XLA:TPU runs a gather over it inside each slice and between slices, one after the other."""
    split = confirm._split_at_networks(load_spec("2xv5e-16").mesh({"data": 8, "model": 4}))
    assert (split.names, split.sizes) == (("data over network", "data over line", "model"), (2, 4, 4))
    whole = load_spec("2xv5e-16").mesh({"slice": 2, "data": 16})
    assert confirm._split_at_networks(whole) == whole
