"""What constraints are worth: without those that carry a plan its arrays lie elsewhere, and the plan is dearer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from programs import SAMPLES

from toast_cli import pipeline
from toast_cli.emit.weigh import folded
from toast_cli.pipeline import Outcome, Request
from toast_cli.plan.lower import lower
from toast_cli.report.model import ConstraintFamilyFacts, matters


@cache
def outcome(strategy: str) -> Outcome:
    (path,) = SAMPLES.glob("t2b_tiny.*")
    return pipeline.partition(Request(str(path), "v4-32", "data=4,model=4", strategy=strategy))


def test_few_constraints_carry_the_plan() -> None:
    report = outcome("fsdp:data").emit("bytecode", weigh=True).report
    families = report.constraint_families
    assert 0 < len(families) <= 10
    assert [one.saved_seconds for one in families] == sorted((one.saved_seconds for one in families), reverse=True)
    carrying = [one for one in families if matters(one)]
    assert carrying
    assert max(one.saved_seconds / report.predicted.step_seconds for one in carrying) > 0.02
    assert all(one.values for one in carrying), "what costs something moves something"
    lines = [(one.place, one.type, one.line) for one in report.constraints]
    for one in families:
        assert lines.count((one.place, one.type, one.line)) >= one.count > 0


def test_what_lies_elsewhere_is_what_is_priced() -> None:
    """The price is asked for the plan as it is, then once for each family without which something moves."""
    found = outcome("fsdp:data")
    asked = []

    def price(elsewhere: dict[int, object]) -> tuple[float, int]:
        asked.append(len(elsewhere))
        return float(len(elsewhere)), 0

    from toast_cli.emit.stablehlo import write_checked

    written = write_checked(found.source, lower(found.problem, found.result.plan), price=price)
    families = written.families
    assert asked[0] == 0
    assert 1 < len(asked) <= 12
    assert sorted(asked[1:]) == sorted(one.values for one in families if one.values)
    assert [one.saved_seconds for one in families] == [float(one.values) for one in families]
    assert all(one.values for one in families if one.saved_seconds)


def test_nothing_is_weighed_unasked() -> None:
    assert outcome("fsdp:data").emit("bytecode").report.constraint_families == []


def test_layers_fold() -> None:
    assert folded("model.py:7 f (jit(f)/layer_12/mul)") == "model.py:7 f (jit(f)/layer_*/mul)"
    assert folded("model.py:7 f2") == "model.py:7 f2"


def test_what_saves_nothing_does_not_matter() -> None:
    facts = ConstraintFamilyFacts("", "use", "f32[2]", "", 1, 3, 0.0, 0)
    assert not matters(facts)
    assert matters(replace(facts, saved_bytes=1))
