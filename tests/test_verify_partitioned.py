"""Collectives of the module right after partitioning: read from hand-written text, and from what XLA's partitioner
makes of small programs.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from toast_cli import xla
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.collectives import CompiledCollective, partitioned_collectives, without_padding
from toast_cli.ask_xla.compile import (
    CompilationTarget,
    collectives_after_partitioning,
    compile_for,
    compile_here,
    virtual_devices,
)
from toast_cli.ask_xla.hlo_text import graphs, places

MESH = (("data", "model"), (4, 2))
DATA, MODEL, BOTH = "{{0,2,4,6},{1,3,5,7}}", "{{0,1},{2,3},{4,5},{6,7}}", "{{0,1,2,3,4,5,6,7}}"

HEAD = """HloModule jit_f, num_partitions=8

FileNames
1 "/home/someone/model.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %r = f32[] add(%a, %b)
}

%max (a: f32[], b: f32[]) -> f32[] {
  ROOT %m = f32[] maximum(%a, %b)
}

ENTRY %main (p: f32[8,4], q: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %q = f32[8,4]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %id = u32[] partition-id()
  %by_data = s32[8]{0} constant({0, 0, 2, 2, 4, 4, 6, 6})
  %by_model = s32[8]{0} constant({0, 2, 0, 2, 0, 2, 0, 2})
  %d1 = s32[1]{0} dynamic-slice(%by_data, %id), dynamic_slice_sizes={1}
  %d = s32[] reshape(%d1)
  %m1 = s32[1]{0} dynamic-slice(%by_model, %id), dynamic_slice_sizes={1}
  %m = s32[] reshape(%m1)
  %step = s32[] multiply(%two, %id)
"""


def found_in(*lines: str) -> list[tuple[str, tuple[str, ...], int]]:
    body = "".join(f"  {line}\n" for line in lines)
    return [(c.kind, c.axes, c.bytes) for c in partitioned_collectives(HEAD + body + "}\n", *MESH)]


def reduced(name: str, operand: str, groups: str, *, kind: str = "f32[8,4]{1,0}", apply: str = "add") -> str:
    return f"%{name} = {kind} all-reduce(%{operand}), channel_id=1, replica_groups={groups}, to_apply=%{apply}"


ROWS = {
    "an all-reduce": ([reduced("x", "p", DATA)], [("all-reduce", ("data",), 128)]),
    "a piece by the reduced axis is kept": (
        [reduced("x", "p", DATA), "%s = f32[2,4]{1,0} dynamic-slice(%x, %d, %zero), dynamic_slice_sizes={2,4}"],
        [("reduce-scatter", ("data",), 32)],
    ),
    "a piece by another axis is kept": (
        [reduced("x", "p", DATA), "%s = f32[8,2]{1,0} dynamic-slice(%x, %zero, %m), dynamic_slice_sizes={8,2}"],
        [("all-reduce", ("data",), 128)],
    ),
    "of a sum over both, a piece by one is kept": (
        [reduced("x", "p", BOTH), "%s = f32[2,4]{1,0} dynamic-slice(%x, %d, %zero), dynamic_slice_sizes={2,4}"],
        [("all-reduce", ("data", "model"), 128)],
    ),
    "a piece of a piece": (
        [
            reduced("x", "p", BOTH),
            "%s = f32[2,4]{1,0} dynamic-slice(%x, %d, %zero), dynamic_slice_sizes={2,4}",
            "%c = f32[2,4]{0,1} copy(%s)",
            "%t = f32[2,2]{1,0} dynamic-slice(%c, %zero, %m), dynamic_slice_sizes={2,2}",
        ],
        [("all-reduce", ("data", "model"), 128)],
    ),
    "pieces along two dimensions": (
        [reduced("x", "p", BOTH), "%s = f32[2,2]{1,0} dynamic-slice(%x, %d, %m), dynamic_slice_sizes={2,2}"],
        [("all-reduce", ("data", "model"), 128)],
    ),
    "the whole is read as well": (
        [
            reduced("x", "p", DATA),
            "%s = f32[2,4]{1,0} dynamic-slice(%x, %d, %zero), dynamic_slice_sizes={2,4}",
            "%n = f32[8,4]{1,0} negate(%x)",
        ],
        [("all-reduce", ("data",), 128)],
    ),
    "where the piece lies depends on data": (
        [reduced("x", "p", DATA), "%s = f32[2,4]{1,0} dynamic-slice(%x, %i, %zero), dynamic_slice_sizes={2,4}"],
        [("all-reduce", ("data",), 128)],
    ),
    "two sums are added up": (
        [reduced("x", "p", DATA), reduced("y", "q", DATA), "%s = f32[8,4]{1,0} add(%x, %y)"],
        [("all-reduce", ("data",), 128)],
    ),
    "two sums are added up after conversion: XLA:TPU reduces each as it is": (
        [
            *(reduced(name, "p", DATA, kind="bf16[8,4]{1,0}") for name in "xy"),
            *(f"%{name}f = f32[8,4]{{1,0}} convert(%{name})" for name in "xy"),
            "%s = f32[8,4]{1,0} add(%xf, %yf)",
        ],
        [("all-reduce", ("data",), 64), ("all-reduce", ("data",), 64)],
    ),
    "three pieces of sums are added up after conversion": (
        [
            *(reduced(name, "p", DATA, kind="bf16[8,4]{1,0}") for name in "xyz"),
            *(
                f"%{name}s = bf16[2,4]{{1,0}} dynamic-slice(%{name}, %d, %zero), dynamic_slice_sizes={{2,4}}"
                for name in "xyz"
            ),
            *(f"%{name}f = f32[2,4]{{1,0}} convert(%{name}s)" for name in "xyz"),
            "%s = f32[2,4]{1,0} add(%xf, %yf)",
            "%u = f32[2,4]{1,0} add(%s, %zf)",
        ],
        [("reduce-scatter", ("data",), 16)] * 3,
    ),
    "a piece is kept of a sum after conversion": (
        [
            reduced("x", "p", DATA, kind="bf16[8,4]{1,0}"),
            "%xf = f32[8,4]{1,0} convert(%x)",
            "%t = f32[2,4]{1,0} dynamic-slice(%xf, %d, %zero), dynamic_slice_sizes={2,4}",
        ],
        [("reduce-scatter", ("data",), 16)],
    ),
    "pieces of two sums are added up": (
        [
            *(reduced(name, "p", BOTH) for name in "xy"),
            *(
                f"%{name}s = f32[2,4]{{1,0}} dynamic-slice(%{name}, %d, %zero), dynamic_slice_sizes={{2,4}}"
                for name in "xy"
            ),
            "%t = f32[2,4]{1,0} add(%xs, %ys)",
        ],
        [("all-reduce", ("data", "model"), 128)],
    ),
    "different pieces of two sums are added up": (
        [
            reduced("x", "p", BOTH),
            reduced("y", "q", BOTH, kind="f32[4,4]{1,0}"),
            "%xs = f32[2,4]{1,0} dynamic-slice(%x, %d, %zero), dynamic_slice_sizes={2,4}",
            "%ys = f32[2,4]{1,0} dynamic-slice(%y, %m, %zero), dynamic_slice_sizes={2,4}",
            "%t = f32[2,4]{1,0} add(%xs, %ys)",
        ],
        [("all-reduce", ("data", "model"), 128), ("all-reduce", ("data", "model"), 64)],
    ),
    "sums in different types stay two": (
        [
            reduced("x", "p", DATA, kind="bf16[8,4]{1,0}"),
            "%xf = f32[8,4]{1,0} convert(%x)",
            reduced("y", "q", DATA),
            "%s = f32[8,4]{1,0} add(%xf, %y)",
        ],
        [("all-reduce", ("data",), 64), ("all-reduce", ("data",), 128)],
    ),
    "what was widened before it is gathered counts as it is written": (
        [
            "%n = bf16[8,4]{1,0} convert(%p)",
            "%w = f32[8,4]{1,0} convert(%n)",
            f"%x = f32[32,4]{{1,0}} all-gather(%w), channel_id=1, replica_groups={DATA}, dimensions={{0}}",
        ],
        [("all-gather", ("data",), 512)],
    ),
    "pieces of one sum for two readers": (
        [
            reduced("x", "p", DATA),
            "%s = f32[2,4]{1,0} dynamic-slice(%x, %d, %zero), dynamic_slice_sizes={2,4}",
            "%t = f32[2,4]{1,0} dynamic-slice(%x, %d, %zero), dynamic_slice_sizes={2,4}",
        ],
        [("reduce-scatter", ("data",), 32)],
    ),
    "sums over different axes stay two": (
        [reduced("x", "p", DATA), reduced("y", "q", MODEL), "%s = f32[8,4]{1,0} add(%x, %y)"],
        [("all-reduce", ("data",), 128), ("all-reduce", ("model",), 128)],
    ),
    "maxima stay two": (
        [reduced("x", "p", DATA, apply="max"), reduced("y", "q", DATA, apply="max"), "%s = f32[8,4]{1,0} add(%x, %y)"],
        [("all-reduce", ("data",), 128), ("all-reduce", ("data",), 128)],
    ),
    "a sum that is read twice stays": (
        [
            reduced("x", "p", DATA),
            reduced("y", "q", DATA),
            "%s = f32[8,4]{1,0} add(%x, %y)",
            "%n = f32[8,4]{1,0} negate(%x)",
        ],
        [("all-reduce", ("data",), 128), ("all-reduce", ("data",), 128)],
    ),
    "the others": (
        [
            f"%x = f32[32,4]{{1,0}} all-gather(%p), channel_id=1, replica_groups={DATA}, dimensions={{0}}",
            f"%y = f32[2,4,4]{{2,1,0}} all-to-all(%q), channel_id=2, replica_groups={MODEL}, dimensions={{0}}",
            "%z = f32[8,4]{1,0} collective-permute(%q), channel_id=3, source_target_pairs={{0,1},{2,3}}",
        ],
        [("all-gather", ("data",), 512), ("all-to-all", ("model",), 128), ("collective-permute", ("model",), 128)],
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_reading(name: str) -> None:
    lines, expected = ROWS[name]
    assert found_in(*lines) == expected


def test_where_it_comes_from() -> None:
    line = f'  {reduced("x", "p", DATA)}, metadata={{op_name="jit(f)/dot" stack_frame_id=1}}\n}}\n'
    assert partitioned_collectives(HEAD + line, *MESH) == [
        CompiledCollective("all-reduce", ("data",), 128, 1.0, "jit(f)/dot", "model.py:12")
    ]
    assert places("HloModule m\n") == {}


NUMBERS = {
    "%a = s32[] add(%d, %m)": [0, 2, 2, 4, 4, 6, 6, 8],
    "%a = u32[] remainder(%id, %two)": [0, 1, 0, 1, 0, 1, 0, 1],
    "%a = u32[] divide(%id, %two)": [0, 0, 1, 1, 2, 2, 3, 3],
    "%a = s32[] divide(%id, %zero)": None,
    "%a = s32[] add(%d, %p)": None,
    "%a = s32[] add(%a, %d)": None,
    "%a = f32[] constant(1.5)": None,
    "%a = s32[20]{0} constant({...})": None,
}


@pytest.mark.parametrize("line", NUMBERS)
def test_numbers_by_device(line: str) -> None:
    text = f"{HEAD}  %two = s32[] constant(2)\n  {line}\n}}\n"
    main = next(graph for graph in graphs(text) if graph.name == "main")
    numbers = main.device_numbers("a", 8)
    assert (None if numbers is None else numbers[:, 0].tolist()) == NUMBERS[line]


# ---------------------------------------------------------------- what XLA's partitioner does

PRODUCT = b"""
module @jit_f attributes {mhlo.num_partitions = 8 : i32} {
  sdy.mesh @mesh = <["data"=4, "model"=2]>
  func.func public @main(%x: tensor<8x16xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}]>},
                         %w: tensor<16x8xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>})
      -> (tensor<8x8xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{RESULT}, {}]>}) {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<8x16xbf16>, tensor<16x8xbf16>) -> tensor<8x8xbf16>
    return %0 : tensor<8x8xbf16>
  }
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("result", "kind", "size"), [(b"", "all-reduce", 8 * 8 * 2), (b'"data"', "reduce-scatter", 2 * 8 * 2)]
)
def test_the_partitioner_keeps_types(result: bytes, kind: str, size: int) -> None:
    """In the final module for CPUs both are all-reduces of 256 bytes: bf16 is widened, reduce-scatter is unknown."""
    found = collectives_after_partitioning(PRODUCT.replace(b"RESULT", result), "stablehlo", {"data": 4, "model": 2})
    assert not isinstance(found, Failure), found
    assert [(c.kind, c.axes, c.bytes, c.count) for c in found] == [(kind, ("data",), size, 1.0)]


def test_waiting_without_a_bound() -> None:
    found = collectives_after_partitioning(
        PRODUCT.replace(b"RESULT", b""), "stablehlo", {"data": 4, "model": 2}, timeout_seconds=float("inf")
    )
    assert not isinstance(found, Failure), found


def test_padding_that_makes_pieces_equal_is_not_counted() -> None:
    """[10, 10] of f32, padded to [16, 10] for 16 devices: 400 bytes in all, 25 each."""
    body = "  %pad.1 = f32[16,10]{1,0} pad(%a, %zero), padding=0_6x0_0"
    assert without_padding((40, 8), body, devices=16) == (25, 8)


def test_a_program_that_does_not_compile() -> None:
    wrong = PRODUCT.replace(b"RESULT", b"").replace(b"[1] x [0]", b"[0] x [0]")
    failure = compile_for(wrong, "stablehlo", virtual_devices(8))
    assert isinstance(failure, Failure)
    assert "contracting" in failure.reason


def test_a_targets_own_partitioner_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XLA:TPU's pass has another name, and its options go with the compilation; what comes after it is not waited
    for."""
    asked: dict[str, Any] = {}
    answered, compiled = threading.Event(), threading.Event()

    def compile_ahead(_: bytes, devices: list[str], *, shardy: bool, options: dict[str, Any]) -> None:
        asked.update(devices=devices, shardy=shardy, passes=options["xla_dump_hlo_pass_re"])
        dumps = Path(options["xla_dump_to"])
        names = (
            "p.after_spmd-partitioning.before_x",
            "p.after_tpu-spmd-partitioning.before_y",
            "q.after_pipeline-start",
        )
        for number, name in enumerate(names):
            (dumps / f"module_0000.f.{number:04}.{name}.txt").write_text(name)
        answered.wait(60)
        compiled.set()

    monkeypatch.setattr(xla, "compile_ahead", compile_ahead)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(xla, "tpu_devices", lambda topology, megacore, slices: [topology, megacore, "a third"])
    target = CompilationTarget("tpu", "v4:1x2x1", 2, megacore=True, partitions_only=True)
    answer = compile_here(PRODUCT.replace(b"RESULT", b""), "stablehlo", target, {})
    assert not compiled.is_set()
    answered.set()
    assert asked == {
        "devices": ["v4:1x2x1", True],
        "shardy": True,
        "passes": "^(tpu-spmd-partitioning|pipeline-start)$",
    }
    assert answer.hlo_text == "p.after_tpu-spmd-partitioning.before_y"
