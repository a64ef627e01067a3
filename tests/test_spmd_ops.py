"""Every kind of op, split along each dimension it can be: the program of one device has the whole one's numbers."""

from __future__ import annotations

from functools import cache

import pytest
from op_kinds import OPS, TEXTS
from programs import Case, case_of, evaluator_of, round_mesh, source_of_text
from spmd_cases import differing

from toast_cli.emit.spmd import emit_spmd
from toast_cli.emit.spmd.rules.table import RULES
from toast_cli.plan.decisions import Shard
from toast_cli.plan.sharding import Sharding


@cache
def case(name: str) -> Case:
    if name in TEXTS:
        source = source_of_text(TEXTS[name])
        return Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    function, arguments = OPS[name]
    return case_of(function, *arguments)


@pytest.mark.parametrize("name", [*OPS, *TEXTS])
def test_numbers_however_it_is_split(name: str) -> None:
    """Each dimension class over an axis of 4, and every two of them over axes of 4 and 2."""
    at = case(name)
    single = [(d,) for d in at.problem.decisions.choices if isinstance(d, Shard) and d.axis == 0]
    pairs = [
        (first[0], second)
        for first in single
        for second in at.problem.decisions.choices
        if isinstance(second, Shard) and second.axis == 1 and second.group != first[0].group
    ]
    seen: set[tuple[tuple[Sharding, ...], tuple[object, ...]]] = set()
    programs = {}
    for plan in (*single, *pairs[:2]):
        lowered = at.lowered(plan)
        key = tuple(lowered.shardings), tuple(lowered.required.items())
        if key not in seen:
            seen.add(key)
            programs[plan] = emit_spmd(at.source, lowered)
    assert programs
    assert differing(at.source, programs, 8) == {}


def test_every_local_rule_is_tried() -> None:
    tried = {op.name for name in (*OPS, *TEXTS) for op in case(name).program.ops}
    unseen = set(RULES) - tried
    assert not unseen
