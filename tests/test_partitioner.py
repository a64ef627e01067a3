"""Work-arounds for the partitioner's bugs, by version of jaxlib."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from jax import lax
from programs import Case, arg, round_mesh, source_of

from toast_cli.dimensions import analyse
from toast_cli.plan.axis_assignment import ALL, MENDED, Workarounds, installed_workarounds, workarounds_for
from toast_cli.plan.problem import make_problem
from toast_cli.price.evaluator import Evaluator

FROM_11 = {"split_space": (0, 11)}


@pytest.mark.parametrize(
    ("version", "mended", "needed"),
    [
        ("0.10.2", MENDED, True),
        ("99.0", MENDED, True),  # nobody knows of a version without the bug
        ("0.10.2", FROM_11, True),
        ("0.11.0", FROM_11, False),
        ("0.11.1.dev20261122", FROM_11, False),
        ("1.0", FROM_11, False),
    ],
)
def test_a_workaround_ends_with_the_version_that_mends_the_bug(
    version: str, mended: dict[str, tuple[int, ...] | None], needed: bool
) -> None:
    assert workarounds_for(version, mended).split_space is needed


def test_what_is_installed_needs_all_that_are_known() -> None:
    assert installed_workarounds() == ALL


def test_space_and_kernel_are_split_together_where_the_partitioner_can() -> None:
    """An image split along space and a kernel split along its features: space is left whole only as a work-around."""

    def convolved(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    source = source_of(convolved, arg(2, 32, 32, 16), arg(3, 3, 16, 64))
    mesh, dimensions = round_mesh(data=4, model=2), analyse(source.program)
    rests = []
    for workarounds in (ALL, replace(ALL, split_space=False)):
        problem = make_problem(source.program, dimensions, mesh, workarounds=workarounds)
        assert problem.workarounds == workarounds
        case = Case(source, Evaluator(problem))
        plan = (case.shard("w.3", "model"), case.shard("x.1", "data"))
        (number,) = case.ops("convolution")
        rests.append(problem.op_sharding(problem.op_pattern[number], plan).operands[0])
    assert rests == [((), (), (), ()), ((), (0,), (), ())]
    assert Workarounds() == ALL
