"""The page of one run: its numbers add up to the report's, and it needs nothing from outside."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from toast_cli.cli import main
from toast_cli.pipeline import Outcome, Request, partition
from toast_cli.report.page import page
from toast_cli.report.pictures import Pictures, pictures
from toast_cli.report.tiles import mesh_grid, tile

ROOT = Path(__file__).resolve().parents[1]
AXES = {"data": 4, "model": 2}


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    program = str(ROOT / "sample_models/t2b_tiny.mlirbc.zst")
    return partition(Request(program, "h100-8", "data=4,model=2", iterations=60, memory_limit=4 * 2**20))


@pytest.fixture(scope="module")
def drawn(outcome: Outcome) -> Pictures:
    return pictures(outcome.source, outcome.evaluator, outcome.result)


def test_memory_by_role_peaks_where_the_report_does(outcome: Outcome, drawn: Pictures) -> None:
    total = [sum(sizes) for sizes in zip(*drawn.memory.values(), strict=True)]
    assert max(total) == pytest.approx(outcome.report.predicted.peak_bytes, abs=1)
    assert drawn.moments == sorted(drawn.moments)
    assert "argument" in drawn.memory


def test_places_and_kernels_take_the_reports_time(outcome: Outcome, drawn: Pictures) -> None:
    predicted = outcome.report.predicted
    places = [*drawn.places, drawn.elsewhere]
    assert sum(p.compute for p in places) == pytest.approx(predicted.compute_seconds)
    assert sum(p.communication for p in places) == pytest.approx(predicted.communication_seconds)
    assert any(p.location.startswith("decoder.py:") for p in places)
    for kernel in drawn.kernels:
        assert kernel.flops / kernel.seconds <= 1.001 * drawn.matrix_flops
        assert kernel.bytes / kernel.seconds <= 1.001 * drawn.memory_rate


def test_the_trail_ends_at_the_plan(outcome: Outcome, drawn: Pictures) -> None:
    numbers = [number for number, *_ in drawn.trail]
    assert numbers == sorted(numbers)
    assert drawn.trail[0][0] == 0
    assert drawn.trail[-1][3] == outcome.report.predicted.fits
    assert drawn.trail[-1][1] == pytest.approx(outcome.report.predicted.step_seconds)


class Outside(HTMLParser):
    """Collects whatever a browser would fetch, and the ids of what is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.fetched += [str(found[key]) for key in ("src", "href") if key in found]
        self.ids += [str(found["id"])] if "id" in found else []


def test_the_page_stands_alone(outcome: Outcome, drawn: Pictures) -> None:
    text = page(outcome.report, drawn).decode()
    reader = Outside()
    reader.feed(text)
    assert not reader.fetched
    assert reader.ids == ["memory", "places", "roofline", "strategies", "search"]
    assert "@import" not in text
    for heading in ("Mesh", "Alive at the peak", "Arguments at rest"):
        assert f"<h2>{heading}</h2>" in text


def test_names_are_escaped(outcome: Outcome, drawn: Pictures) -> None:
    from dataclasses import replace

    bad = "<script>alert(1)</script>"
    facts = replace(outcome.report, program=replace(outcome.report.program, name=bad))
    facts = replace(facts, arguments=[replace(facts.arguments[0], name=bad)], plan=replace(facts.plan, summary=bad))
    assert bad not in page(facts, drawn).decode()


# shape, sharding -> cuts to the right, cuts downwards
TILES = [
    ([16, 8], [[], []], 0, 0), ([16, 8], [["data"], []], 0, 3), ([16, 8], [[], ["data"]], 3, 0),
    ([16, 8], [["data"], ["model"]], 1, 3), ([16], [["data", "model"]], 7, 0), ([], [], 0, 0),
    ([2, 16, 8], [["model"], ["data"], []], 3, 1), ([4, 4, 4], [["data"], [], []], 0, 3),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "sharding", "right", "down"), TILES)
def test_tiles_have_a_cut_between_neighbouring_pieces(
    shape: list[int], sharding: list[list[str]], right: int, down: int
) -> None:
    lines = re.findall(r'<line (x1="[\d.]+" x2|y1="[\d.]+" y2)', tile(shape, sharding, AXES))
    assert (sum(line[0] == "x" for line in lines), sum(line[0] == "y" for line in lines)) == (right, down)


def test_the_mesh_has_a_cell_per_device() -> None:
    assert mesh_grid(AXES).count("<rect") == 8
    assert mesh_grid({"x": 2, "y": 3, "z": 5}).count("<rect") == 30


def test_partition_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    command = ["partition", str(ROOT / "sample_models/mlp_tiny.mlir"), "--mesh", "h100-8", "--quiet"]
    assert main([*command, "--html", str(target)]) == 0
    assert target.read_text().startswith("<!doctype html>")


def test_without_plotly_one_line_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toast_cli.report.pages.find_spec", lambda name: None)
    command = ["partition", str(ROOT / "sample_models/mlp_tiny.mlir"), "--mesh", "h100-8"]
    assert main([*command, "--html", str(tmp_path / "page.html")]) == 2
    assert "pip install 'toast-partitioner[html]'" in capsys.readouterr().err
