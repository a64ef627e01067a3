"""Ops that XLA partitions into wrong numbers are regions in the annotated form."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import pytest
from op_kinds import IMAGES, X, conv, loss, pool
from programs import Case, arg, case_of
from spmd_cases import differing, wrong_in

from toast_cli.emit import emit, write
from toast_cli.emit.misread import misread_ops
from toast_cli.plan.partitioned import PartitionedProgram


def by_channel() -> tuple[Case, PartitionedProgram]:
    """The gradient of a convolution by channel, its images split: the gradient of the kernel is a sum over devices."""
    gradient = jax.grad(loss(conv("SAME", feature_group_count=4)), (0, 1))
    case = case_of(lambda a, k: gradient(a, k), IMAGES, arg(4, 1, 3, 3))
    return case, case.lowered((case.shard("a.0", "data"),))


def overlapping() -> tuple[Case, PartitionedProgram]:
    gradient = jax.grad(loss(pool(2, 1, "VALID")))
    case = case_of(lambda a: gradient(a), X)
    return case, case.lowered((case.shard("a.0", "data"),))


@pytest.mark.parametrize("make", [by_channel, overlapping])
def test_what_xla_misreads_is_a_region(make: Callable[[], tuple[Case, PartitionedProgram]]) -> None:
    case, lowered = make()
    before = str(case.source.module)
    assert len(misread_ops(case.source, lowered)) == 1
    written = write(case.source, lowered, "stablehlo")
    assert written.content.count(b"sdy.manual_computation") == 1
    assert not written.notes
    assert differing(case.source, {"": written.content}, 8) == {}
    assert str(case.source.module) == before


def test_hlo_text_holds_regions() -> None:
    case, lowered = by_channel()
    text = emit(case.source, lowered, "hlo")
    assert b"SPMDFullToShardShape" in text
    assert wrong_in(case.source, text, 8, "hlo") == []


def test_forms_without_regions_say_so() -> None:
    case, lowered = by_channel()
    (note,) = write(case.source, lowered, "specs").notes
    assert re.match(r"XLA's partitioner gets wrong numbers for \S+:\d+ .*, as the plan splits it; --format", note)
