"""Temporaries in on-chip memory: which are brief, and how much of them takes no device memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from programs import PLAIN, Case, arg, case_of, round_mesh
from random_programs import cases, plans
from test_cost import reference

from toast_cli.hardware import find_preset
from toast_cli.price.buffers import OWN, CopyFor
from toast_cli.price.cost import Alive
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.profile import CompilerProfile, OnChip
from toast_cli.price.profiles import find_profile

KIB = 1024
S = arg(16, 16)  # 1 KiB


def with_memory(kib: float, filled: float = 1.0, refills: float = 1e9) -> CompilerProfile:
    """A compiler that gives so much on-chip memory to temporaries; they may wait there as long as they like."""
    return replace(PLAIN, on_chip=OnChip(kib * KIB, filled, refills), passes=PLAIN.passes | {"memory-space-assignment"})


def chain(x: Any) -> Any:
    return x @ x @ x @ x


def peak_kib(case: Case) -> float:
    return case.evaluator.exact_cost(()).peak_bytes / KIB


@pytest.mark.parametrize(
    ("what", "fn", "kib", "filled", "refills", "peak"),
    [
        ("nothing is known of the chip: x and two products", chain, 0, 1.0, 1e9, 3),
        ("the product that is read next; the result is returned", chain, 8, 1.0, 1e9, 2),
        ("as much as fits", chain, 8, 0.0625, 1e9, 2.5),
        ("an array that is larger than all of it stays out", chain, 0.5, 1.0, 1e9, 3),
        ("what waits too long stays out", chain, 8, 1.0, 0.0, 3),
        ("what a loop carries stays out", lambda x: lax.fori_loop(0, 3, lambda _, c: c @ c, x), 8, 1.0, 1e9, 3),
    ],
)
def test_brief_temporaries_take_no_device_memory(
    what: str, fn: Any, kib: float, filled: float, refills: float, peak: float
) -> None:
    case = case_of(fn, S, mesh=round_mesh(data=1), profile=with_memory(kib, filled, refills))
    assert peak_kib(case) == pytest.approx(peak), what
    _, alive = case.evaluator.alive_at_peak(())
    assert sum(a.bytes for a in alive) / KIB == pytest.approx(peak), what
    roles = case.evaluator.memory_by((), lambda value, role: role)
    assert np.sum(list(roles.values()), axis=0).max() / KIB == pytest.approx(peak), what


def test_what_is_to_be_reduced_stays_out() -> None:
    """x @ y lies in on-chip memory; as a partial product it is whole in device memory until it is reduced."""
    case = case_of(lambda x, y: x @ y @ y, S, S, mesh=round_mesh(data=2), profile=with_memory(8))
    together, split = (), (case.shard("x.1", "data"),)
    roles = [case.evaluator.memory_by(plan, lambda value, role: role) for plan in (together, split)]
    assert roles[0]["temporary"].max() == KIB  # the result alone
    assert roles[1]["partial"].max() == KIB


def test_time_inside_a_loop_is_that_of_one_iteration_and_after_it_that_of_all() -> None:
    case = case_of(
        lambda x: lax.fori_loop(0, 100, lambda _, c: c @ c @ c, x) @ x,
        S,
        mesh=round_mesh(data=1),
        profile=with_memory(8),
    )
    elapsed, (loop,) = case.evaluator.items.compilation.elapsed, case.program.loops
    within = elapsed[2 * loop.last - 1] - elapsed[2 * loop.first]
    over = elapsed[2 * loop.last] - elapsed[2 * loop.first]
    assert over == pytest.approx(100 * within)
    assert (np.diff(elapsed) >= 0).all()


def test_the_largest_get_a_place_first() -> None:
    on_chip = case_of(chain, S, mesh=round_mesh(data=1), profile=with_memory(4)).evaluator._buffers.on_chip
    arrays = [
        (Alive(0, 1024, "temporary"), True),
        (Alive(1, 3584, "gathered"), True),
        (Alive(2, 2048, "temporary"), False),
    ]
    left = {array.value: array.bytes for array in on_chip.left(arrays)}
    assert left == {0: 512, 2: 2048}


def test_arguments_and_carries_never_lie_there_but_gathered_copies_do() -> None:
    case = case_of(lambda x, w: x @ w, S, S, mesh=round_mesh(data=4), profile=with_memory(8))
    buffers, program = case.evaluator._buffers, case.program
    argument = program.arguments[1].value
    assert not buffers.is_brief(OWN, argument, (0, 1))
    assert buffers.is_brief(CopyFor((0,), False), argument, (0, 1))


def test_chips_have_what_their_compiler_hands_out() -> None:
    v4, v3, gpu = (find_profile(find_preset(chip).chip) for chip in ("v4", "v3", "H100"))
    assert v4.on_chip.bytes == 128 * 2**20
    assert v3.on_chip == gpu.on_chip == OnChip()


@settings(max_examples=25)
@given(st.data())
def test_the_evaluator_agrees_with_a_plain_one(data: st.DataObject) -> None:
    case = data.draw(cases())
    kib, refills = data.draw(st.sampled_from([0.25, 1.0, 4.0])), data.draw(st.sampled_from([1e-3, 1.0, 1e9]))
    profile = with_memory(kib, 0.75, refills)
    evaluator = Evaluator(case.problem, profile=profile)
    for plan in data.draw(st.lists(plans(case.problem), min_size=1, max_size=4)):
        cost = evaluator.exact_cost(plan)
        found = (cost.compute_seconds, cost.communication_seconds, cost.peak_bytes, cost.argument_bytes)
        assert found == pytest.approx(reference(case.problem, plan, profile), rel=1e-9, abs=1e-6)
        _, alive = evaluator.alive_at_peak(plan)
        assert sum(a.bytes for a in alive) == pytest.approx(cost.peak_bytes)
