"""The trace of a step: valid, nested, and as long as the step's compute and communication."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import SAMPLES

from toast_cli import pipeline
from toast_cli.cli import main
from toast_cli.report.step import trace
from toast_cli.request import Request


def test_slices_nest_and_add_up() -> None:
    (path,) = SAMPLES.glob("t2b_tiny.*")
    found = pipeline.partition(Request(str(path), "v4-32", "data=4,model=4", strategy="fsdp:data+megatron:model"))
    events = json.loads(trace(found.source, found.evaluator, found.result))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    expected = {
        1: sum(kernel.seconds for kernel in found.evaluator.kernels(found.result.plan)),
        2: sum(use.seconds for use in found.evaluator.collectives(found.result.plan)),
    }
    for thread, seconds in expected.items():
        assert seconds > 0
        open_slices: list[tuple[float, float]] = []
        top = 0.0
        for one in (event for event in slices if event["tid"] == thread):
            start, end = one["ts"], one["ts"] + one["dur"]
            while open_slices and start >= open_slices[-1][1] - 1e-6:
                open_slices.pop()
            if open_slices:
                assert end <= open_slices[-1][1] + 1e-6, "a slice ends with the one around it, or before"
            else:
                top += one["dur"]
            open_slices.append((start, end))
        assert top == pytest.approx(seconds * 1e6)
    named = {event["name"] for event in slices}
    assert any(name.startswith("decoder.py:") for name in named)
    assert any(" over data" in name for name in named)


def test_the_command_writes_it(tmp_path: Path) -> None:
    target = tmp_path / "step.json"
    (path,) = SAMPLES.glob("mlp_tiny.*")
    words = ["partition", str(path), "--mesh", "v4-32", "--strategy", "fsdp:data", "--quiet", "--trace", str(target)]
    assert main(words) == 0
    assert {event["ph"] for event in json.loads(target.read_text())["traceEvents"]} == {"M", "X"}
