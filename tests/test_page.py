"""The pages: their numbers add up to the report's, and they need nothing from outside."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toast_cli.cli import main
from toast_cli.pipeline import Outcome, partition
from toast_cli.report.html.pages import chart, run_page, step_chart
from toast_cli.report.html.pictures import OTHERS, Pictures, memory_bands, pictures
from toast_cli.report.model import ConfirmationFacts, ConfirmedPlanFacts
from toast_cli.request import Request

ROOT = Path(__file__).resolve().parents[1]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    program = str(ROOT / "sample_models/t2b_tiny.mlirbc.zst")
    return partition(Request(program, "h100-8", "data=4,model=2", iterations=20, memory_limit=4 * 2**20))


@pytest.fixture(scope="module")
def drawn(outcome: Outcome) -> Pictures:
    return pictures(outcome.source, outcome.evaluator, outcome.result)


def test_memory_peaks_where_the_report_does_however_it_is_grouped(outcome: Outcome, drawn: Pictures) -> None:
    memory = drawn.memory
    assert memory.moments == sorted(memory.moments)
    assert memory.moments[-1] <= drawn.step.seconds
    for groups in (memory.by_role, memory.by_module):
        total = [sum(sizes) for sizes in zip(*groups.values(), strict=True)]
        assert max(total) == pytest.approx(outcome.report.predicted.peak_bytes, abs=1)
    assert "arguments" in memory.by_role
    assert len(memory.by_module.keys() - {OTHERS}) > 2


def test_the_modules_that_hold_most_at_the_peak_have_a_band() -> None:
    sizes = {("f",): 9.0, ("f", "g"): 4.0, ("h",): 0.01, **{(str(k),): 2.0 for k in range(7)}}
    bands = memory_bands({path: np.array([size]) for path, size in sizes.items()})
    assert bands == {"f": [9.0], "f/g": [4.0], **{str(k): [2.0] for k in range(6)}, OTHERS: [2.01]}


def test_the_step_is_as_long_as_predicted_and_in_order(outcome: Outcome, drawn: Pictures) -> None:
    predicted, step = outcome.report.predicted, drawn.step
    assert step.seconds == pytest.approx(predicted.step_seconds_upper)
    assert sum(one.seconds for one in step.slices if one.lane == 0) == pytest.approx(predicted.compute_seconds)
    starts = [one.start for one in step.slices]
    assert starts == sorted(starts)
    times = outcome.evaluator.items.lives.times
    assert [times[one.op] for one in step.slices] == sorted(times[one.op] for one in step.slices)
    layers = {name for one in step.slices for name in drawn.modules.of(one.op) if name.startswith("layer_")}
    assert layers == {"layer_0", "layer_1"}, "each layer has its own kernels"


def test_the_lines_that_take_longest_are_those_of_the_step(outcome: Outcome, drawn: Pictures) -> None:
    rows, step = outcome.report.time_by_line, drawn.step
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)
    mlp = next(row for row in rows if row.location.startswith("decoder.py") and row.module == "layer_*/mlp")
    in_mlp = [one for one in step.slices if drawn.modules.of(one.op)[-1] == "mlp"]
    members = [one for one in in_mlp if drawn.places[one.op] == mlp.location]
    assert mlp.seconds == pytest.approx(sum(one.seconds for one in members), rel=0.01)
    assert mlp.communication_seconds == pytest.approx(sum(one.seconds for one in members if one.lane), rel=0.01)
    assert mlp.share == pytest.approx(mlp.seconds / step.seconds)


class Page(HTMLParser):
    """Collects whatever a browser would fetch, the charts with their numbers, headings and tags."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.charts: dict[str, Any] = {}
        self.headings: list[str] = []
        self.tags: list[str] = []
        self._chart = self._inside = ""
        self.feed(content.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.fetched += [str(found[key]) for key in ("src", "href") if key in found]
        self._chart = str(found.get("data-chart", self._chart))
        self._inside = str(found.get("type", tag))

    def handle_data(self, data: str) -> None:
        if self._inside == "application/json":
            self.charts[self._chart] = json.loads(data)
        if self._inside == "h2":
            self.headings.append(data)
        self._inside = ""


def test_the_page_stands_alone_and_is_small(outcome: Outcome, drawn: Pictures) -> None:
    content = run_page(outcome.report, drawn)
    read = Page(content)
    assert not read.fetched
    assert b"@import" not in content
    assert b"url(http" not in content
    assert len(content) < 300_000
    assert read.charts.keys() == {"step"}
    assert {"decisions", "predicted, per device and step", "arguments"} <= set(read.headings)


def test_the_numbers_of_the_step_fit_each_other(outcome: Outcome, drawn: Pictures) -> None:
    step = Page(run_page(outcome.report, drawn)).charts["step"]
    columns = step["slices"]
    assert len({len(column) for column in columns.values()}) == 1
    assert columns["start"] == sorted(columns["start"])
    assert sum(columns["long"]) == pytest.approx(outcome.report.predicted.step_seconds_upper, rel=1e-4)
    assert max(columns["module"]) < len(step["modules"]) == len(step["bands"]) == len(step["tops"])
    for view in step["memory"]["views"].values():
        assert {len(one["v"]) for one in view.values()} == {len(step["memory"]["moments"])}


def test_names_are_escaped_everywhere(outcome: Outcome, drawn: Pictures) -> None:
    report = outcome.report
    tags = Page(run_page(report, drawn)).tags
    facts = replace(
        report,
        program=replace(report.program, name=HOSTILE),
        plan=replace(report.plan, summary=HOSTILE, decisions=[replace(d, text=HOSTILE) for d in report.plan.decisions]),
        arguments=[replace(one, name=HOSTILE + one.name) for one in report.arguments],
        collectives=[replace(one, location=HOSTILE + one.location) for one in report.collectives],
        baselines={HOSTILE + name: facts for name, facts in report.baselines.items()},
        predicted=replace(
            report.predicted,
            peak_location=HOSTILE,
            live_at_peak=[replace(one, name=HOSTILE + one.name) for one in report.predicted.live_at_peak],
        ),
    )
    hostile = replace(drawn, places=dict.fromkeys(drawn.places, HOSTILE))
    found = Page(run_page(facts, hostile))
    assert set(found.tags) == set(tags)
    assert found.tags.count("script") == tags.count("script")
    assert not found.fetched
    assert found.charts["step"]["places"] == [HOSTILE]


def test_numbers_that_are_none_are_null_and_text_ends_no_script() -> None:
    text = chart(HOSTILE, {"a": [float("nan"), float("inf"), 1 / 3], HOSTILE: "\ud800"})
    assert text.count("<script") == text.count("</script") == 1
    inside = text.partition('json">')[2].partition("</script>")[0]
    assert json.loads(inside) == {"a": [None, None, 0.3333333], HOSTILE: "\ud800"}


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    target, program = tmp_path / "page.html", str(ROOT / "sample_models/mlp_tiny.mlir")
    options = ["--mesh", "h100-8", "--quiet", "--strategy", "fsdp:data"]
    assert main(["partition", program, *options, "--html", str(target)]) == 0
    assert target.read_text().startswith("<!doctype html>")


def test_the_pages_say_what_a_compiler_says(outcome: Outcome, drawn: Pictures) -> None:
    row = ConfirmedPlanFacts(HOSTILE, 0.2, 2**30, "compiled", "", 0.25, 0.2, 0.05, 2**31, True)
    refused = replace(
        row, name="fsdp", outcome="refused", reason=HOSTILE, step_seconds=None, peak_bytes=None, fits=None
    )
    told = ConfirmationFacts("XLA:TPU", HOSTILE, [row, refused], 3.0)
    content = run_page(replace(outcome.report, confirmation=told), drawn)
    read = Page(content)
    told_of = set(read.headings) - set(Page(run_page(outcome.report, drawn)).headings)
    assert len(told_of) == 1
    assert "img" not in read.tags
    assert b"<td class='n'>250 ms</td>" in content


def test_a_step_of_very_many_slices_is_bounded(outcome: Outcome, drawn: Pictures) -> None:
    step = drawn.step
    short = [replace(step.slices[0], start=step.seconds * k / 1e5, seconds=step.seconds / 1e5) for k in range(100_000)]
    text = step_chart(outcome.report, replace(drawn, step=replace(step, slices=tuple(short))))
    columns = Page(text.encode()).charts["step"]["slices"]
    assert len(columns["long"]) < 10_000
    assert sum(columns["long"]) == pytest.approx(step.seconds, rel=1e-4)
