"""`toast inspect` says what a program is made of; `toast diff` what changed between two reports."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from report_sample import WIDTHS, nothing_cut_off

from toast_cli.cli import main
from toast_cli.dimensions import analyse
from toast_cli.frontend import load
from toast_cli.report.checks import FigureChange
from toast_cli.report.inspection import Inspection, inspect_program
from toast_cli.report.inspection import blocks as inspection_blocks
from toast_cli.report.model import ArgumentFacts, Report, read_report
from toast_cli.report.resharding import resharding

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = str(ROOT / "sample_models/mlp_tiny.mlir")


def looped(w: Any, x: Any) -> Any:
    def layer(h: Any, one: Any) -> Any:
        return jnp.tanh(h @ one), None

    h = jax.lax.scan(layer, x, w)[0]
    return h @ h.T  # a covariance: the batch twice in one array


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inspect") / "looped.mlir"
    shapes = jax.ShapeDtypeStruct((6, 16, 16), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    path.write_text(jax.jit(looped).lower(*shapes).as_text(debug_info=True))
    return path


def test_inspect_finds_ops_loops_dimensions_conflicts_and_arrays(program: Path, tmp_path: Path) -> None:
    target = tmp_path / "facts.json"
    assert main(["inspect", str(program), "--json", str(target)]) == 0
    facts = json.loads(target.read_text())
    assert facts["schema"] == "toast.inspection/1"
    assert (facts["name"], facts["format"], facts["arguments"]) == ("looped", "stablehlo", 2)
    assert facts["argument_bytes"] == 4 * (6 * 16 * 16 + 8 * 16)
    kinds = {kind["name"]: kind for kind in facts["op_kinds"]}
    assert kinds["stablehlo.dot_general"]["count"] == 2
    # Six products of [8, 16] and [16, 16] in the loop, one of [8, 16] and [16, 8].
    assert kinds["stablehlo.dot_general"]["flops"] == 2 * (6 * 8 * 16 * 16 + 8 * 16 * 8)
    assert [(loop["trips"], loop["trips_known"], loop["depth"]) for loop in facts["loops"]] == [(6, True, 0)]
    assert {one["size"] for one in facts["classes"]} >= {6, 8, 16}
    # The weights are square, so their two dimensions are one class by way of the loop; and the covariance.
    assert sorted((one["sides"], one["values"]) for one in facts["conflicts"]) == [(2, 1), (2, 3)]
    assert all(one["locations"][0].startswith("test_inspect_and_diff.py:") for one in facts["conflicts"])
    assert (facts["tensors"][0]["name"], facts["tensors"][0]["type"]) == ("w", "f32[6,16,16]")


def test_inspect_is_readable(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(program)]) == 0
    shown = capsys.readouterr().out
    for line in ("program  looped (stablehlo)", "stablehlo.dot_general", "conflicts: an array", "f32[6,16,16]"):
        assert line in shown
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["looped", "t2b_tiny.mlirbc.zst"])
def test_inspect_is_whole_at_any_width(program: Path, name: str, width: int) -> None:
    found = inspected(program if name == "looped" else ROOT / "sample_models" / name)
    nothing_cut_off(lambda _: inspection_blocks(found, verbose=False), width)


@cache
def inspected(path: Path) -> Inspection:
    source = load(str(path))
    return inspect_program(source, analyse(source.program))


def test_inspect_refuses_what_is_no_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "nothing.mlir")]) == 2
    assert "no such file" in capsys.readouterr().err


def report(path: Path, *options: str) -> str:
    assert (
        main(["partition", SAMPLE, "--mesh", "h100-8", "--iterations", "20", "--quiet", "--json", str(path), *options])
        == 0
    )
    return str(path)


def test_diff_of_a_report_with_itself_is_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = report(tmp_path / "a.json"), report(tmp_path / "b.json")
    assert main(["diff", one, two]) == 0
    assert "the same decisions and shardings" in capsys.readouterr().out


def test_diff_lists_figures_decisions_and_shardings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = report(tmp_path / "a.json", "--mesh-shape", "data=8")
    two = report(tmp_path / "b.json", "--mesh-shape", "data=8", "--strategy", "fsdp")
    capsys.readouterr()
    assert main(["diff", one, two, "--json", str(tmp_path / "diff.json")]) == 1
    shown = capsys.readouterr().out
    assert "+ split" in shown
    assert "→" in shown
    assert "to the same devices: a device receives at most" in " ".join(shown.split())
    facts = json.loads((tmp_path / "diff.json").read_text())
    assert not facts["same"] and facts["resharding"]["arrays"] > 0
    assert [figure["name"] for figure in facts["figures"]] == ["step time", "communication", "peak memory"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return read_report(report(tmp_path_factory.mktemp("diff") / "report.json"))


# [64, 32] f32, 8,192 bytes: axes of the meshes, shardings before and after; bytes that a device receives at most, that
# all do, that other devices would, and that a device holds meanwhile.
RESHARDED = [
    ({"x": 4}, {"x": 4}, [[], []], [["x"], []], (0, 0, 2048, 8192 + 2048)),
    ({"x": 4}, {"x": 4}, [["x"], []], [[], []], (6144, 4 * 6144, 8192, 2048 + 8192)),
    ({"x": 4}, {"x": 4}, [["x"], []], [[], ["x"]], (1536, 4 * 1536, 2048, 4096)),
    ({"x": 2}, {"x": 4}, [["x"], []], [["x"], []], (2048, 3 * 2048, 2048, 4096 + 2048)),
    ({"x": 2, "y": 2}, {"y": 2, "x": 2}, [["x", "y"], []], [["x", "y"], []], (2048, 2 * 2048, 2048, 4096)),
]  # fmt: skip


@pytest.mark.parametrize(("axes", "later_axes", "sharding", "later", "expected"), RESHARDED)
def test_diff_says_what_moves(
    axes: dict[str, int],
    later_axes: dict[str, int],
    sharding: Any,
    later: Any,
    expected: tuple[int, ...],
    stored: Report,
) -> None:
    def of(axes: dict[str, int], sharding: Any) -> Report:
        argument = ArgumentFacts(0, "w", "f32[64,32]", True, sharding)
        return replace(stored, arguments=[argument], mesh=replace(stored.mesh, name="own", axes=axes))

    found = resharding(of(axes, sharding), of(later_axes, later))
    assert found is not None and found.moved_seconds is None
    assert (found.moved_bytes, found.moved_bytes_of_all, found.copied_bytes, found.held_bytes) == expected
    assert resharding(of(axes, sharding), of(axes, sharding)) is None


def test_diff_says_how_long_it_takes_on_a_known_machine(stored: Report) -> None:
    mesh = replace(stored.mesh, name="h100:4", axes={"x": 4})  # 450 GB/s to the switch, 50 GB/s to the network
    before, now = (
        replace(stored, arguments=[ArgumentFacts(0, "w", "f32[64,32]", True, sharding)], mesh=mesh)
        for sharding in ([["x"], []], [[], ["x"]])
    )
    found = resharding(before, now)
    assert found is not None
    assert (found.moved_seconds, found.copied_seconds) == (pytest.approx(1536 / 450e9), pytest.approx(2048 / 50e9))


def test_diff_refuses_what_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", SAMPLE, SAMPLE]) == 2
    assert "is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "now", "change"),
    [(2.0, 2.0, ""), (2.0, 3.0, "+50.0%"), (4.0, 3.0, "-25.0%"), (0.0, 1.0, "new"), (0.0, 0.0, "")],
)
def test_change_in_words(before: float, now: float, change: str) -> None:
    assert FigureChange("step time", before, now).change == change
