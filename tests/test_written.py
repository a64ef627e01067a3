"""What is written is read again: the constraints in the report, and notes on what lies elsewhere than planned."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emitted import shardy_annotations
from programs import source_of

from toast_cli import xla
from toast_cli.ask_xla.compile import as_stablehlo
from toast_cli.emit import emit_hlo, minimal, stablehlo, write
from toast_cli.emit.annotations import boundary_annotations
from toast_cli.emit.shardy import write_shardy
from toast_cli.emit.stablehlo import check_note
from toast_cli.frontend import Source
from toast_cli.pipeline import Outcome, partition
from toast_cli.plan.lower import lower
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.request import Request
from toast_cli.tactics import strategies

TINY = Path(__file__).parents[1] / "sample_models" / "block_tiny.mlirbc.zst"


@pytest.fixture(scope="module")
def found() -> Outcome:
    """A tiny transformer's training step under FSDP and Megatron."""
    outcome = partition(Request(str(TINY), "v4-32", iterations=10))
    plan = strategies(outcome.problem)["fsdp x megatron"]
    return replace(outcome, result=replace(outcome.result, plan=plan))


@pytest.fixture(scope="module")
def planned(found: Outcome) -> tuple[Source, PartitionedProgram]:
    return found.source, lower(found.problem, found.result.plan)


def test_constraints_reach_the_report(found: Outcome) -> None:
    sizes = {}
    for annotate in ("minimal", "full", "arguments"):
        emitted = found.emit("stablehlo", annotate)
        sizes[annotate] = len(emitted.report.constraints)
        assert emitted.content.count(b"sdy.sharding_constraint") >= sizes[annotate]
        assert emitted.report.timings["emit"] > 0
    assert found.report.constraints == [] and "emit" not in found.report.timings
    assert 0 == sizes["arguments"] < sizes["minimal"] < sizes["full"]


def test_each_constraint_can_be_found_and_pasted(found: Outcome) -> None:
    for fact in found.emit("bytecode").report.to_json()["constraints"]:
        assert set(fact) == {"place", "location", "type", "name", "uses", "line", "explicit"}
        assert re.match(r"\w+\.py:\d+", fact["location"]) and fact["uses"] > 0
        assert re.fullmatch(r"x = jax\.lax\.with_sharding_constraint\(x, P\(.*\)\)", fact["line"])


def test_formats_without_constraints_have_none(found: Outcome) -> None:
    for format in ("hlo", "specs", "python"):
        report = found.emit(format).report
        assert report.constraints == [] and report.analysis.notes == found.report.analysis.notes


@pytest.mark.parametrize("annotate", ["minimal", "full"])
@pytest.mark.parametrize("form", ["stablehlo", "bytecode"])
def test_what_is_written_lies_as_planned(planned: tuple[Source, PartitionedProgram], annotate: str, form: str) -> None:
    assert write(*planned, form, annotate).notes == ()


@pytest.mark.parametrize("binary", [False, True])
def test_what_was_seen_to_settle_is_read_back_and_not_propagated_again(
    planned: tuple[Source, PartitionedProgram], binary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, lowered = planned
    annotations = shardy_annotations(source, lowered)
    content = write_shardy(source, lowered, annotations, binary=binary)
    asked = []
    monkeypatch.setattr(stablehlo, "ops_astray", lambda *_: asked.append(1) or [])
    assert check_note(source, lowered, annotations, content, settled=True) == "" and asked == []
    assert check_note(source, lowered, annotations, content) == "" and asked == [1]
    for other in (b"// not what was written\n" + content, content[: len(content) // 2]):
        note = check_note(source, lowered, annotations, other, settled=True)
        assert note.startswith("the written program is another one when it is read again")


@pytest.mark.parametrize("lost", [{"reshards": ()}, {"constraints": (), "reshards": ()}])
def test_what_lies_elsewhere_is_a_note(planned: tuple[Source, PartitionedProgram], lost: dict[str, Any]) -> None:
    source, lowered = planned
    annotations = replace(shardy_annotations(source, lowered), **lost)
    note = check_note(source, lowered, annotations, write_shardy(source, lowered, annotations))
    assert re.match(r"sharding in the output differs from the plan for \d+ values, first at \w+\.py:\d+", note)


def test_it_is_said_when_few_constraints_do_not_do(
    planned: tuple[Source, PartitionedProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, lowered = planned
    monkeypatch.setattr(minimal, "few_annotations", boundary_annotations)
    monkeypatch.setattr(minimal, "ops_astray", lambda *_: [3])
    written = write(source, lowered, "stablehlo")
    assert written.notes == ("few constraints do not reproduce the plan, so every value is constrained",)
    assert len(written.constraints) == len(write(source, lowered, "stablehlo", "full").constraints)


def test_a_host_callback_can_be_written_as_hlo() -> None:
    """Shardy binds it to a mesh of one device; GSPMD says the same with `maximal`."""

    def f(x: jax.Array) -> jax.Array:
        doubled = jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct((64, 32), np.float32), x)
        return doubled + 1

    source = source_of(f, jnp.zeros((64, 32)))
    ranks = [len(value.shape) for value in source.program.values]
    split = PartitionedProgram(
        axis_names=("data",),
        axis_sizes=(8,),
        shardings=[((),) * rank for rank in ranks],
        required={},
        computed={},
    )
    text = emit_hlo(source, split)
    assert re.search(rb'custom_call_target="xla_\w*callback".*sharding=\{maximal device=0\}', text)
    assert xla.compile_program(as_stablehlo(text, "hlo"), xla.cpu_devices(8), shardy=False)
