"""A work-around for a bug of the partitioner."""

from __future__ import annotations

from typing import Any

from jax import lax
from programs import Case, arg, round_mesh, source_of

from toast_cli.dimensions import analyse
from toast_cli.plan.problem import make_problem
from toast_cli.price.evaluator import Evaluator


def test_space_and_kernel_are_not_split_together() -> None:
    """An image split along space and a kernel split along its features: space is left whole."""

    def convolved(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    source = source_of(convolved, arg(2, 32, 32, 16), arg(3, 3, 16, 64))
    mesh, dimensions = round_mesh(data=4, model=2), analyse(source.program)
    case = Case(source, Evaluator(make_problem(source.program, dimensions, mesh)))
    plan = (case.shard("w.3", "model"), case.shard("x.1", "data"))
    (number,) = case.ops("convolution")
    assert case.problem.op_sharding(case.problem.op_pattern[number], plan).operands[0] == ((), (), (), ())
