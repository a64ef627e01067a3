"""Target descriptions for XLA:GPU, and what is said when its compiler is not there."""

from __future__ import annotations

import importlib.util
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toast_cli.ask_xla import compile
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.compile import gpu_topology
from toast_cli.ask_xla.verdict import CheckedPart, Verdict, check_memory
from toast_cli.base.errors import MissingExtraError, UsageError
from toast_cli.cli.app import run
from toast_cli.hardware import find_preset, gpu_target_text, load_spec, parse_spec
from toast_cli.hardware.chips import GPU_DEVICES
from toast_cli.plan.partitioned import Promises
from toast_cli.report.command_tables import print_verdict

GPUS = list(GPU_DEVICES)


def figures(text: str) -> dict[str, str]:
    """Scalar fields, nested ones too, by name."""
    return dict(re.findall(r"(\w+): (\"[^\"]*\"|[\w.]+)", text))


@pytest.mark.parametrize("name", GPUS)
def test_every_preset_is_described(name: str) -> None:
    chip = find_preset(name).chip
    said = figures(gpu_target_text(chip))
    assert int(said["device_memory_size"]) == chip.memory_bytes - chip.reserved_bytes
    assert int(said["memory_bandwidth"]) == chip.memory_bytes_per_second
    assert said["platform_name"] == '"CUDA"'


@pytest.mark.parametrize("name", GPUS)
def test_silicon_gives_the_published_vector_rate(name: str) -> None:
    """Multiprocessors x lanes x 2 FLOPs x clock is what the data sheet prints for fp32."""
    preset = GPU_DEVICES[name]
    device_info = preset.device_info
    assert device_info is not None
    rate = preset.multiprocessors * device_info.lanes * 2 * device_info.clock_ghz * 1e9
    assert rate == pytest.approx(find_preset(name).chip.vector_flops, rel=0.02)


def test_what_a_specification_overrides_counts() -> None:
    chip = replace(find_preset("H100").chip, memory_bytes=96 * 2**30, reserved_bytes=2**30)
    assert int(figures(gpu_target_text(chip))["device_memory_size"]) == 95 * 2**30


@pytest.mark.parametrize(
    ("name", "capability", "features"),
    [("P100", ("6", "0"), "NONE"), ("A100-80", ("8", "0"), "NONE"), ("B200", ("10", "0"), "ACCELERATED_FEATURES")],
)
def test_capabilities(name: str, capability: tuple[str, str], features: str) -> None:
    text = gpu_target_text(find_preset(name).chip)
    assert f"major: {capability[0]} minor: {capability[1]} feature_extension: {features}" in text


def test_an_unknown_chip_is_refused() -> None:
    with pytest.raises(UsageError, match="RTX 9090") as error:
        gpu_target_text(replace(find_preset("H100").chip, name="RTX 9090"))
    assert "B200" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("spec", "topology"), [("h100-8", "1x1x8"), ("a100-16", "1x2x8"), ("h100-64", "1x8x8"), ("p100-8", "1x1x8")]
)
def test_topologies(spec: str, topology: str) -> None:
    assert gpu_topology(load_spec(spec)) == topology


def test_one_gpu() -> None:
    assert gpu_topology(parse_spec("name: one\nchip: H100\n", "one.yaml")) == "1x1x1"


def test_a_torus_is_no_topology_of_gpus() -> None:
    with pytest.raises(UsageError, match="torus"):
        gpu_topology(load_spec("v4-32"))


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as error:
        compile.target_of(load_spec("h100-8"))
    assert error.value.hint == "pip install '.[gpu]' in a clone of toast"
    assert "jax_cuda12_plugin" in str(error.value)


@pytest.mark.parametrize("plugin", ["jax_cuda12_plugin", "jax_cuda13_plugin"])
def test_with_the_extra(monkeypatch: pytest.MonkeyPatch, plugin: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == plugin else None)
    target = compile.target_of(load_spec("a100-16"))
    assert (target.platform, target.topology, target.devices) == ("gpu", "1x2x8", 16)
    assert target.config == gpu_target_text(find_preset("A100-80").chip)


# ---------------------------------------------------------------- the verdict


def test_memory_beside_the_prediction() -> None:
    facts = compile.Answer("HloModule m", 1.5, 600, 500, 400, 300, 1000, 0.0)
    target = compile.CompilationTarget("gpu", "1x1x8", 8, chip="H100")
    promised = Promises({"data": 8}, [], peak_bytes=900, argument_bytes=600, limit_bytes=1000, fits=True)
    part = check_memory(facts, promised)
    assert (part.outcome, target.label) == ("agreed", "H100:1x1x8")
    assert "cycles" not in part.facts
    assert (part.facts["peak_bytes"], part.facts["predicted_peak_bytes"]) == (1000, 900)
    over = check_memory(facts, replace(promised, limit_bytes=999))
    assert over.outcome == "disagreed" and "out of memory" in over.text


@pytest.mark.parametrize(("temporaries", "peak", "device"), [(50, 1000, 750), (900, 1000, 1000), (0, 650, 650)])
def test_neither_on_chip_memory_nor_gaps_count(temporaries: int, peak: int, device: int) -> None:
    facts = compile.Answer("HloModule m", 1.5, 600, 500, 400, temporaries, peak, 0.0)
    promised = Promises({"data": 8}, [], peak_bytes=900, argument_bytes=600, limit_bytes=2000, fits=True)
    assert check_memory(facts, promised).facts["peak_bytes"] == device


def test_the_terminal_shows_memory() -> None:
    facts = {"argument_bytes": 1024, "temp_bytes": 2048, "peak_bytes": 3072, "compile_seconds": 1.0}
    part = CheckedPart("memory", "agreed", "peak", facts | {"predicted_peak_bytes": 4096, "limit_bytes": 8192})
    stream = io.StringIO()
    print_verdict(Verdict("H100:1x1x8", [part]), stream)
    said = stream.getvalue()
    assert "H100:1x1x8" in said
    for figure in ("1.00 KiB", "2.00 KiB", "3.00 KiB", "4.00 KiB", "8.00 KiB"):
        assert figure in said


def test_a_machine_of_another_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "p.mlir"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    program.write_text(
        'module attributes {mhlo.num_partitions = 8 : i32} {\n  sdy.mesh @mesh = <["data"=8]>\n'
        '  func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}]>}) -> tensor<8xf32> {\n'
        "    return %x : tensor<8xf32>\n  }\n}\n"
    )
    assert run(["verify", str(program), "--compiler", "gpu", "--mesh", "a100-16"]) == 2
    assert "a100-16 has 16 devices" in capsys.readouterr().err


def test_the_command_line_says_how_to_get_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "p.mlir"
    program.write_text("module {}\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(["verify", str(program), "--compiler", "gpu", "--mesh", "h100-8"]) == 2
    said = capsys.readouterr().err
    assert "pip install '.[gpu]' in a clone of toast" in said and "Traceback" not in said


def test_a_failed_compilation_is_unchecked() -> None:
    failure = Failure("NOT_FOUND: Couldn't find a suitable version of ptxas. Looked in: a")
    promised = Promises({"data": 8}, [], peak_bytes=900, argument_bytes=600, limit_bytes=1000, fits=True)
    assert check_memory(failure, promised).outcome == "unchecked"


def test_what_triton_has_no_tiles_for_is_compiled_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:GPU of jaxlib 0.10.2 on a product of f32[3152,3072] and f32[3072,768], without a GPU to time kernels on."""
    asked: list[dict[str, str]] = []

    def ask(*arguments: Any, timeout_seconds: float) -> Failure:
        asked.append(arguments[-1])
        return Failure("INTERNAL: Couldn't find output tile sizes that satisfy hlo" if len(asked) == 1 else "no memory")

    monkeypatch.setattr(compile, "ask", ask)
    target = compile.CompilationTarget("gpu", "1x1x8", 8, chip="H100", config="")
    assert compile.compile_for(b"", "stablehlo", target, options={"a": "1"}) == Failure("no memory")
    assert asked == [{"a": "1"}, {"a": "1", "xla_gpu_enable_triton_gemm": "False"}]
