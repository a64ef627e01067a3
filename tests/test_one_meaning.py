"""What the evaluator prices, what the lowered program lists, what a report promises and what XLA:CPU partitions are the
same collectives."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_meaning import disagreements, plans_of
from random_programs import cases, plans
from sweeps import sweep

from benchmarks.common import choose, is_tiny
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.compile import collectives_after_partitioning
from toast_cli.ask_xla.verdict import compare_traffic
from toast_cli.pipeline import Outcome, partition
from toast_cli.report.build import collective_facts
from toast_cli.request import Request

TWINS = {name: str(path) for name, path in choose([]).items() if is_tiny(name)}
# Specifications, and a shape behind a blank.
MESHES = ("v4-32", "h100-8", "v4-32 data=4,context=2,model=2")


def outcome_of(name: str, mesh: str) -> Outcome:
    spec, _, shape = mesh.partition(" ")
    return partition(Request(TWINS[name], spec, shape or None, iterations=1))


@pytest.mark.parametrize(("name", "mesh"), sweep(product(TWINS, MESHES), ("itx_decode_tiny", "v4-32")))
def test_evaluator_lowering_and_report_say_the_same(name: str, mesh: str) -> None:
    outcome = outcome_of(name, mesh)
    found = {
        label: disagreements(outcome.source, outcome.evaluator, plan)
        for label, plan in plans_of(outcome.problem).items()
    }
    assert len(found) > 5
    assert {label: texts for label, texts in found.items() if texts} == {}


COMPILED = [
    ("rnn_tiny", "v4-32", "data-parallel x megatron+sequence"),
    ("rnn_tiny", "h100-8", "megatron"),
    ("rnn_tiny", "h100-8", "megatron+sequence"),
    ("rnn_tiny", MESHES[2], "zero2 x context"),
    ("itx_prefill_tiny", MESHES[2], "context"),
    ("resnet50_tiny", "h100-8", "fsdp x megatron"),
    ("t2b_tiny", "v4-32", "context x megatron"),
    ("t2b_tiny", "v4-32", "fsdp x megatron+sequence"),
    ("moe_tiny", "v4-32", "context x expert"),
    ("moe_tiny", "v4-32", "megatron+sequence"),
    ("moe_tiny", MESHES[2], "context x context x megatron"),
    ("long_tiny", "v4-32", "megatron+sequence"),
    ("unet_tiny", "h100-8", "spatial"),
    ("unet_tiny", "v4-32", "fsdp"),
    ("ssm_tiny", "v4-32", "context"),
]


COMPILED_HERE = [
    ("rnn_tiny", MESHES[2], "zero2 x context"),
    ("itx_prefill_tiny", MESHES[2], "context"),
]


@pytest.mark.parametrize(("name", "mesh", "label"), sweep(COMPILED, *COMPILED_HERE))
def test_xla_partitions_what_is_promised(name: str, mesh: str, label: str) -> None:
    outcome = outcome_of(name, mesh)
    axes = dict(zip(outcome.problem.mesh.names, outcome.problem.mesh.sizes, strict=True))
    plan = plans_of(outcome.problem)[label]
    chosen = replace(outcome, result=replace(outcome.result, plan=plan))
    compiled = collectives_after_partitioning(chosen.emit("stablehlo").content, "stablehlo", axes)
    assert not isinstance(compiled, Failure), compiled
    promised = [one.as_written() for one in collective_facts(outcome.source, outcome.evaluator, plan)]
    assert compare_traffic(promised, compiled, axes).differences == []


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_of_random_programs_too(data: st.DataObject) -> None:
    case = data.draw(cases())
    for plan in data.draw(st.lists(plans(case.problem), min_size=1, max_size=4)):
        assert disagreements(case.source, case.evaluator, plan) == []
