"""The recorder of plans, reports and written files: the same twice, and every difference told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.golden import cases, main


def record(file: Path, *words: str) -> Path:
    assert main(["record", str(file), "--quick", "--only", *words]) == 0
    return file


def changed(file: Path, old: str, new: str) -> Path:
    """A copy of a record with other words in it."""
    text = file.read_text()
    assert old in text
    other = file.with_name("changed.json")
    other.write_text(text.replace(old, new))
    return other


def test_a_record_is_the_same_twice_and_a_difference_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (record(tmp_path / name, "mlp_tiny", "fsdp") for name in ("one.json", "two.json"))
    assert one.read_bytes() == two.read_bytes()
    assert main(["compare", str(one), str(two)]) == 0
    facts = json.loads(one.read_text())["cases"]["mlp_tiny v4-32 fsdp"]
    assert facts["plan"]["tactics"] == ["fsdp"] and set(facts["emitted"]) == {"plan", "stablehlo"}
    assert "seconds" not in facts["search"] and "timings" not in facts
    capsys.readouterr()
    for old, new, told in (
        (facts["emitted"]["stablehlo"], "0123", "\nmlp_tiny v4-32 fsdp\n    emitted.stablehlo: differs\n"),
        (repr(facts["predicted"]["compute_seconds"]), "1e-3", "predicted.compute_seconds: "),
        ('"kind":"all-gather"', '"kind":"all-to-all"', "- kind=all-gather axes="),
        ('"mlp_tiny v4-32 fsdp"', '"mlp_tiny v4-32 zero2"', "only before: mlp_tiny v4-32 fsdp\nonly after: mlp_tiny"),
    ):
        assert main(["compare", str(one), str(changed(one, old, new))]) == 1
        assert told in capsys.readouterr().out


def test_the_quick_list_is_part_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1] / "sample_models")
    names, quick = ([case.name for case in cases(quick=quick)] for quick in (False, True))
    assert len(set(names)) == len(names) and set(quick) < set(names)
    assert {name.split()[0] for name in quick} == {name.split()[0] for name in names if "_tiny" in name}
