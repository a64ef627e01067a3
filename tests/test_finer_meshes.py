"""Meshes of three and more axes: products are scattered in two steps at most, and what one mesh can do its refinement
can."""

from __future__ import annotations

from functools import cache

import pytest
from programs import SAMPLES

from toast_cli.dimensions import analyse
from toast_cli.frontend import load
from toast_cli.hardware import load_spec
from toast_cli.plan.decisions import Shard
from toast_cli.plan.lower import lower
from toast_cli.plan.problem import Problem, make_problem
from toast_cli.plan.sharding import scattered_in
from toast_cli.price.evaluator import Evaluator
from toast_cli.program.model import Program
from toast_cli.tactics import strategy


@cache
def program() -> Program:
    return load(str(SAMPLES / "mlp_tiny.mlir")).program


def problem_on(**shape: int) -> Problem:
    return make_problem(program(), analyse(program()), load_spec("v5e-16").mesh(shape))


@pytest.mark.parametrize(
    ("over", "sizes", "steps"),
    [
        ([()], (2, 2), []),
        ([(3,)], (2, 2, 2, 2), [(3,)]),
        ([(1, 0)], (2, 2), [(1,), (0,)]),
        ([(0, 1, 2)], (2, 2, 2), [(0, 1), (2,)]),
        ([(0, 1, 2)], (4, 2, 2), [(0,), (1, 2)]),
        ([(0, 1, 2, 3)], (2, 2, 2, 2), [(0, 1), (2, 3)]),
        ([(0,), (1, 2)], (2, 2, 4), [(0,), (1, 2)]),
        ([(0, 1), (2,)], (2, 2, 4), [(0, 1), (2,)]),
        ([(0,), (1,), (2, 3)], (2, 2, 2, 2), [(0,), (1, 2, 3)]),
        ([(1, 0, 2)], (2, 2, 2), [(1,), (0, 2)]),
    ],
)
def test_products_are_scattered_in_two_steps(
    over: list[tuple[int, ...]], sizes: tuple[int, ...], steps: list[tuple[int, ...]]
) -> None:
    assert scattered_in(over, sizes) == steps


def test_what_is_written_is_what_is_priced() -> None:
    """Each reduce-scatter of a gradient is one step of the path along which its constraints lie."""
    problem = problem_on(a=2, b=2, c=2, d=2)
    plan = strategy(problem, "fsdp")
    lowered = lower(problem, plan)
    ops, made_by = problem.program.ops, problem.program.producer
    products = {value for value in lowered.computed if ops[made_by[value]].kind.matrix_unit}
    scatters = [one for one in lowered.collectives if one.kind == "reduce-scatter" and one.value in products]
    assert {one.axes for one in scatters} == {(0, 1), (2, 3)}
    for one in scatters:
        path = lowered.path(one.value)
        assert one.after in path
        assert len(path) == 2
    uses = Evaluator(problem).collectives(plan)
    used = {use.axes for use in uses if use.written[0] == "reduce-scatter" and use.value in products}
    assert used == {(0, 1), (2, 3)}


@pytest.mark.parametrize("name", ["fsdp", "zero2", "data-parallel"])
def test_a_strategy_over_all_of_a_finer_mesh_takes_no_longer(name: str) -> None:
    """v5e-16 as 4 x 4, and each of its lines in two pieces."""
    coarse, fine = (
        Evaluator(problem).exact_cost(strategy(problem, name)).step_seconds
        for problem in (problem_on(a=4, b=4), problem_on(a=2, b=2, c=2, d=2))
    )
    assert fine <= 1.01 * coarse


def test_pieces_of_one_axis_are_one_to_a_product() -> None:
    """v5e-16 as 4 x 4: a plan scatters each gradient over one axis. The same plan where each axis is in two pieces
    takes exactly as long: both pieces are scattered over together, as XLA:TPU does."""
    coarse, fine = problem_on(a=4, b=4), problem_on(a=2, b=2, c=2, d=2)
    groups = sorted(coarse.weight_bytes, key=lambda group: -coarse.weight_bytes[group])[:2]
    batch = next(k for k, group in enumerate(coarse.dimensions.groups) if group.role == "batch")
    plan = coarse.canonical((Shard(batch, 0), Shard(groups[0], 1), Shard(groups[1], 0)))
    along = [axis.links[0].dimension for axis in fine.mesh.axes]
    of = [tuple(k for k, name in enumerate(along) if name == axis.links[0].dimension) for axis in coarse.mesh.axes]
    mapped = fine.canonical(tuple(d._replace(axis=axis) for d in plan for axis in of[d.axis]))
    uses = {use.axes for use in Evaluator(fine).collectives(mapped) if use.written[0] == "reduce-scatter"}
    assert of[0] in uses
    seconds = [Evaluator(p).exact_cost(q).step_seconds for p, q in ((coarse, plan), (fine, mapped))]
    assert seconds[1] == pytest.approx(seconds[0], rel=1e-9)
