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
from toast_cli.report.command_tables import DOES_NOT_FIT, FAILED, FITS, SweepRow
from toast_cli.report.comparison import compare
from toast_cli.report.html import pages
from toast_cli.report.html.frame import chart
from toast_cli.report.html.pages import front_line, run_page, step_chart
from toast_cli.report.html.pictures import OTHERS, Branch, Pictures, memory_bands, pictures, plain
from toast_cli.report.model import ConfirmationFacts, ConfirmedPlanFacts
from toast_cli.request import Request

ROOT = Path(__file__).resolve().parents[1]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    program = str(ROOT / "sample_models/t2b_tiny.mlirbc.zst")
    return partition(Request(program, "h100-8", "data=4,model=2", iterations=60, memory_limit=4 * 2**20))


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


def test_scopes_that_hold_arrays_and_other_scopes_are_split() -> None:
    sizes = {("f",): 9.0, ("f", "g"): 4.0, ("f", "g", "h"): 3.0, ("f", "g", "h", "i"): 2.0, ("f", "j"): 3.0}
    bands = memory_bands({path: np.array([size]) for path, size in sizes.items()})
    assert bands == {"f": [9.0], "f/g": [4.0], "f/g/h": [5.0], "f/j": [3.0]}, "less than a quarter is not split further"


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


def test_time_by_module_adds_up(outcome: Outcome, drawn: Pictures) -> None:
    assert drawn.time.amount == pytest.approx(outcome.report.predicted.step_seconds_upper)
    layers = drawn.time.below["layer_*"]
    assert {"attention", "mlp"} <= layers.below.keys()
    assert layers.amount == pytest.approx(sum(part.amount for part in layers.below.values()))
    assert any(name.startswith("decoder.py:") for name in layers.below["mlp"].below)


def test_the_lines_that_take_longest_are_those_of_the_step(outcome: Outcome, drawn: Pictures) -> None:
    rows, step = outcome.report.time_by_line, drawn.step
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)
    mlp = next(row for row in rows if row.location.startswith("decoder.py") and row.module == "layer_*/mlp")
    in_mlp = [one for one in step.slices if drawn.modules.of(one.op)[-1] == "mlp"]
    members = [one for one in in_mlp if drawn.places[one.op] == mlp.location]
    assert mlp.seconds == pytest.approx(sum(one.seconds for one in members), rel=0.01)
    assert mlp.communication_seconds == pytest.approx(sum(one.seconds for one in members if one.lane), rel=0.01)
    assert mlp.share == pytest.approx(mlp.seconds / step.seconds)


def test_alive_at_the_peak_adds_up(outcome: Outcome, drawn: Pictures) -> None:
    live = outcome.report.predicted.live_at_peak
    assert drawn.alive.amount == pytest.approx(sum(one.bytes for one in live), rel=1e-3)
    arguments = sum(one.bytes for one in live if one.role == "argument")
    assert drawn.alive.below["arguments"].amount == pytest.approx(arguments, rel=1e-3)


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
    assert read.charts.keys() == {"step", "icicle", "treemap", "points"}
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
    branch = Branch(HOSTILE)
    branch.add([HOSTILE, HOSTILE + "x"], 1.0, "compute", HOSTILE)
    hostile = replace(drawn, time=branch, alive=branch, places=dict.fromkeys(drawn.places, HOSTILE))
    found = Page(run_page(facts, hostile))
    assert set(found.tags) == set(tags)
    assert found.tags.count("script") == tags.count("script")
    assert not found.fetched
    assert found.charts["step"]["places"] == [HOSTILE]
    assert found.charts["icicle"]["root"]["c"][0]["n"] == HOSTILE


def test_numbers_that_are_none_are_null_and_text_ends_no_script() -> None:
    text = chart("points", HOSTILE, {"a": [float("nan"), float("inf"), 1 / 3], HOSTILE: "\ud800"})
    assert text.count("<script") == text.count("</script") == 1
    inside = text.partition('json">')[2].partition("</script>")[0]
    assert json.loads(inside) == {"a": [None, None, 0.3333333], HOSTILE: "\ud800"}


def test_small_parts_of_a_tree_stand_together() -> None:
    root = Branch("all")
    root.add(["large", "one"], 1000.0, "a")
    root.add(["tiny"], 0.4, "b")
    root.add(["least"], 0.1, "b")
    found: dict[str, Any] = plain(root)
    assert found["a"] == 1000.5
    assert [(part["n"], part["a"]) for part in found["c"]] == [("large", 1000.0), ("2 smaller", 0.5)]
    assert "k" not in found


def test_the_front_is_drawn_in_steps() -> None:
    (line,) = front_line([(2.0, 3.0), (1.0, 5.0), (4.0, 1.0), (3.0, 4.0)])
    assert line["points"][:-1] == [[1.0, 5.0], [2.0, 5.0], [2.0, 3.0], [4.0, 3.0], [4.0, 1.0]]
    assert front_line([]) == []


def test_the_page_of_a_comparison(outcome: Outcome) -> None:
    found = compare(outcome.evaluator, outcome.report, [outcome.result.plan])
    read = Page(pages.comparison_page(found))
    assert not read.fetched
    points = read.charts["points"]["points"]
    assert {one["n"] for one in points} == {one.label for one in found.contenders}
    assert {one["n"] for one in points if one["bad"]} == {one.name for one in found.contenders if not one.fits}


def test_the_page_of_a_sweep() -> None:
    rows = [
        SweepRow("a.mlir", "v4-32", "data=16", FITS, "", 0.2, 0.1, 0.1, 2**30, 2**34, 0.4, "batch", best=True),
        SweepRow("a.mlir", "v4-32", "data=8,model=2", DOES_NOT_FIT, "", 0.1, 0.1, 0.0, 2**35, 2**34, 0.4, "heads"),
        SweepRow(HOSTILE, "v5e-4", "", FAILED, HOSTILE),
    ]
    content = pages.sweep_page(rows)
    read = Page(content)
    assert [one["n"] for one in read.charts["points"]["points"]] == ["data=16", "data=8,model=2"]
    assert "img" not in read.tags
    assert content.count(b"<span class='bad'>does not fit in 16.0 GiB</span>") == 1


@pytest.mark.parametrize(
    "words",
    [["partition", "--strategy", "fsdp:data"], ["compare", "--iterations", "20"], ["sweep", "--iterations", "20"]],
    ids=lambda words: words[0],
)
def test_commands_write_pages(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    command, *options = words
    program = str(ROOT / "sample_models/mlp_tiny.mlir")
    assert main([command, program, "--mesh", "h100-8", "--quiet", *options, "--html", str(target)]) == 0
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
