"""`toast compare`: strategies beside the search, what differs, the front, and the page."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from programs import SAMPLES

from toast_cli import pipeline
from toast_cli.base.errors import UsageError
from toast_cli.cli.app import run
from toast_cli.pipeline import Outcome
from toast_cli.report import style
from toast_cli.report.comparison import SCHEMA, Comparison, compare, comparison_blocks, decisions
from toast_cli.report.words import name_list
from toast_cli.request import Request
from toast_cli.tactics import priced_strategies

T2B = str(SAMPLES / "t2b_tiny.mlirbc.zst")
MLP = str(SAMPLES / "mlp_tiny.mlir")


@cache
def outcome(limit: int | None = None) -> Outcome:
    return pipeline.partition(Request(T2B, "v4-32", memory_limit=limit, iterations=10, fit="as-written"))


@cache
def compared(limit: int | None = None) -> Comparison:
    of = outcome(limit)
    return compare(of.evaluator, of.report, [of.result.plan])


def test_every_strategy_that_applies_is_there_with_its_cost() -> None:
    found, of = compared(), outcome()
    plans, reasons = priced_strategies(of.evaluator)
    assert {one.name for one in found.contenders} == {"search", "unsharded", *plans}
    assert found.not_applicable == reasons
    for one in found.contenders:
        if one.name in plans:
            cost = of.evaluator.exact_cost(plans[one.name].plan)
            assert (one.step_seconds, one.peak_bytes) == (cost.step_seconds, round(cost.peak_bytes))
    assert found.contenders[0].name == "search"
    assert found.contenders[0].step_seconds == of.report.predicted.step_seconds


def test_the_best_is_the_fastest_that_fits() -> None:
    found = compared()
    assert found.best is not None
    assert found.best.step_seconds <= min(one.step_seconds for one in found.contenders if one.fits) * 1.006


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    rows = compared().contenders
    front = [one for one in rows if one.front]
    assert min(rows, key=lambda r: (r.step_seconds, r.peak_bytes)) in front
    assert min(rows, key=lambda r: (r.peak_bytes, r.step_seconds)) in front
    for one in rows:
        beaten = any(o.step_seconds < one.step_seconds and o.peak_bytes < one.peak_bytes for o in rows)
        assert not (beaten and one.front)
        if not one.front:
            assert any(o.step_seconds <= one.step_seconds and o.peak_bytes <= one.peak_bytes for o in front)


def test_what_differs_turns_one_plan_into_the_other() -> None:
    found = compared()
    search = set(found.contenders[0].decisions)
    for one in found.contenders[1:]:
        assert (search - set(one.lacks)) | set(one.adds) == set(one.decisions)


def test_strategies_of_ones_own_are_compared_too() -> None:
    of = outcome()
    found = compare(of.evaluator, of.report, [of.result.plan], ["fsdp:data"])
    (own,) = [one for one in found.contenders if one.name == "fsdp:data"]
    assert all(text.endswith("over data") for text in own.decisions)
    with pytest.raises(UsageError, match="unknown tactic"):
        compare(of.evaluator, of.report, [of.result.plan], ["fsdq"])


def test_nothing_is_best_where_nothing_fits() -> None:
    found = compared(1024)
    assert found.best is None
    assert not any(one.fits for one in found.contenders)


def test_the_command_shows_a_table_and_writes_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "compare.json"
    options = ["--mesh", "v4-32", "--iterations", "20", "--json", str(report)]
    assert run(["compare", MLP, *options]) == 0
    out = capsys.readouterr().out
    assert re.search(r"★  \S+", out)
    assert "fsdp x megatron" in out
    assert "decisions that a strategy has and the search's plan has not" in out
    facts = json.loads(report.read_text())
    assert facts["schema"] == SCHEMA
    assert sum(one["best"] for one in facts["contenders"]) == 1


def test_the_command_exits_like_partition_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--mesh", "v4-32", "--memory-limit", "1KiB", "--iterations", "10", "--quiet"]
    assert run(["compare", MLP, *options]) == 3
    assert "NOTHING FITS" in capsys.readouterr().out
    assert run(["compare", MLP, *options, "--json", "-"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["schema"] == SCHEMA
    assert "NOTHING FITS" in err


@pytest.mark.parametrize(
    ("names", "listed"),
    [
        (["batch", "ff"], ["batch", "ff"]),
        (["channels", "channels_2", "ff"], ["channels", "channels_2", "ff"]),
        ([*["channels"], *(f"channels_{k}" for k in range(2, 34)), "ff"], ["33 channels", "ff"]),
        (["w.0", "w.0_2", "w.0_3", "w.0_4", "w.1"], ["4 w.0", "w.1"]),
    ],
)
def test_many_of_one_name_are_counted(names: list[str], listed: list[str]) -> None:
    assert name_list(names) == listed


@pytest.mark.parametrize("width", [60, 72, 80, 100, 120, 200])
def test_figures_are_whole_at_any_width(width: int) -> None:
    found = compared()
    rows = [replace(one, name="data-parallel x megatron", axes="", step_seconds=123.4e-3) for one in found.contenders]
    console = style.make_console(io.StringIO(), width)
    text = style.render(comparison_blocks(replace(found, contenders=rows), width, verbose=False)[:1], console)
    table = text.partition("★ best by")[0].splitlines()[1:]
    assert "…" not in "".join(table)
    assert max(map(len, table)) <= width
    assert sum("123 ms" in line for line in table) == len(rows)
    assert ("communication" in table[0]) == (width >= 120)
    whole = sum("data-parallel x megatron" in line for line in table)
    assert whole == (len(rows) if width >= 80 else 0), "a name takes two lines where there is no other way"


@pytest.mark.parametrize("width", [60, 200])
def test_decisions_are_whole_at_any_width(width: int) -> None:
    found = compared()
    name, what = "fsdp x megatron+sequence", ["vocab (except in ops with batch) over data"]
    shape = {"data": 8, "model": 2}
    rows = [replace(one, axes=name, mesh=shape, decisions=what) for one in found.contenders]
    console = style.make_console(io.StringIO(), width)
    text = style.render([decisions(replace(found, contenders=rows))], console)
    assert max(map(len, text.splitlines())) <= width
    assert {"vocab", "(except", "batch)"} <= {*text.split()}
