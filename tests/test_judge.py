"""Who judges a written program: by what is asked for, what is installed and what can be compiled for."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

import pytest

from toast_cli.ask_xla import verdict
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.verdict import CheckedPart, Judge, Verdict, choose_judge
from toast_cli.base.errors import MissingExtraError, ToastError, UsageError
from toast_cli.hardware import Spec, load_spec, parse_spec
from toast_cli.report.command_tables import print_verdict

ALL, NOTHING = ("libtpu", "jax_cuda12_plugin"), ()
SLICES = parse_spec("chip: v5e\ntopology: {torus: [2, 2], network: {slices: 2}}\n", "two.yaml")
MY_TPU = parse_spec(
    "chip: {name: mine, platform: tpu, matrix_flops: {bf16: 1TFLOP/s}, vector_flops: 1TFLOP/s, memory: 8GB, "
    "memory_bandwidth: 1TB/s}\ntopology: {torus: [2, 2], link: {bandwidth: 45GB/s, latency: 1us}}\n",
    "mine.yaml",
)
OWN = parse_spec(
    "chip: {name: mine, platform: gpu, matrix_flops: {bf16: 1TFLOP/s}, vector_flops: 1TFLOP/s, memory: 8GB, "
    "memory_bandwidth: 1TB/s}\ntopology: {switch: {size: 8, bandwidth: 1GB/s, latency: 1us}}\n",
    "mine.yaml",
)
TPU, GPU = load_spec("v4-32"), load_spec("h100-8")
HOW_TPU, HOW_GPU = "--compiler tpu asks the real one", "--compiler gpu asks the real one"

# machine, installed, asked for -> the target's label, or what is left unasked, or the error
CHOICES: list[tuple[Spec | None, tuple[str, ...], str | None, str | type[ToastError], str]] = [
    (TPU, ALL, None, "v4:2x2x4", ""),
    (TPU, NOTHING, None, "", HOW_TPU),
    (TPU, ("jax_cuda12_plugin",), None, "", HOW_TPU),
    (TPU, ALL, "cpu", "", HOW_TPU),
    (TPU, ALL, "tpu", "v4:2x2x4", ""),
    (TPU, NOTHING, "tpu", MissingExtraError, ""),
    (GPU, ALL, None, "H100:1x1x8", ""),
    (GPU, ("libtpu",), None, "", HOW_GPU),
    (GPU, ("jax_cuda13_plugin",), None, "H100:1x1x8", ""),
    (SLICES, ALL, None, "2xv5e:2x2", ""),
    (MY_TPU, ALL, None, "", "libtpu has no topology for mine"),
    (MY_TPU, ALL, "cpu", "", "libtpu has no topology for mine"),
    (MY_TPU, ALL, "tpu", UsageError, ""),
    (OWN, ALL, None, "", "XLA's GPU compiler has no target description of mine"),
    (None, ALL, None, "", ""),
    (None, ALL, "cpu", "", ""),
]


@pytest.mark.parametrize(("spec", "installed", "asked", "found", "unasked"), CHOICES)
def test_who_judges(
    spec: Spec | None,
    installed: tuple[str, ...],
    asked: str | None,
    found: str | type[ToastError],
    unasked: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in installed or None)
    if not isinstance(found, str):
        with pytest.raises(found):
            choose_judge(spec, asked, "--compiler")
        return
    judge = choose_judge(spec, asked, "--compiler")
    assert (judge.target.label if judge.target else "", judge.unasked) == (found, unasked)
    assert judge.by_name == (asked is not None)


# by name, the failure -> who judged, in the end
FAILURES = [
    (False, 'INVALID_ARGUMENT: Topology layout "v4:5x3x1" is not divisible', "cpu"),
    (True, 'INVALID_ARGUMENT: Topology layout "v4:5x3x1" is not divisible', "v4:2x2x4"),
    (False, "RESOURCE_EXHAUSTED: Ran out of memory", "v4:2x2x4"),
]


@pytest.mark.parametrize(("by_name", "reason", "compiler"), FAILURES)
def test_a_program_that_the_real_compiler_does_not_take(
    by_name: bool, reason: str, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory is a verdict; anything else leaves the partitioner on the CPU, unless the user chose."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    target = choose_judge(TPU, None, "--compiler").target
    monkeypatch.setattr(verdict, "compile_for", lambda *_, **__: Failure(reason))
    monkeypatch.setattr(verdict, "collectives_after_partitioning", lambda *_: [])
    found = verdict.verify(b"", "stablehlo", {"data": 16}, None, None, Judge(target, by_name=by_name))
    assert found.compiler == compiler
    assert found.unasked == (f"XLA:TPU did not compile it: {reason}" if compiler == "cpu" else "")
    assert found.to_json()["unasked"] == found.unasked


SAID = [
    (("cpu", HOW_TPU), "XLA agreed (CPU partitioner; --compiler tpu asks the real one)"),
    (("cpu", ""), "XLA agreed (CPU partitioner)"),
    (("v4:2x2x4", ""), "XLA (v4:2x2x4) agreed"),
]


@pytest.mark.parametrize(("asked", "line"), SAID)
def test_a_verdict_says_what_was_not_asked(asked: tuple[str, str], line: str) -> None:
    found = Verdict(asked[0], [CheckedPart("collectives", "agreed", "all")], asked[1])
    streams: list[Any] = [io.StringIO(), io.StringIO()]
    print_verdict(found, streams[0], quiet=True)
    print_verdict(found, streams[1])
    assert streams[0].getvalue() == line + "\n"
    assert " ".join(streams[1].getvalue().split()).startswith(f"verdict of {line.replace(' agreed', ': agreed')}")
