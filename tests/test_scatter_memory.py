"""What look-ups and scatters hold in memory, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest
from programs import arg, case_of, problem_of, round_mesh, source_of

from toast_cli.plan.problem import Problem
from toast_cli.price.buffers import REDUCED, Buffers, HandedOn
from toast_cli.price.compilation import Compilation, compile_program
from toast_cli.price.pricing import Pricer
from toast_cli.price.profiles import PLAIN
from toast_cli.program.ops import SCATTER

NODES, EDGES = arg(64, 16), arg(4096, dtype=jnp.int32)


def compiled(fn: Any, *shapes: Any, passes: tuple[str, ...]) -> tuple[Problem, Compilation]:
    problem = problem_of(source_of(fn, *shapes), round_mesh(data=4))
    profile = replace(PLAIN, passes=PLAIN.passes | set(passes))
    return problem, compile_program(problem.program, problem.free, problem.mesh.chip, profile)


def stored_kinds(problem: Problem, made: Compilation) -> list[str]:
    ops = (op for op in problem.program.ops if not op.name.startswith("toast."))
    return [op.name.partition(".")[2] for op in ops if made.stored[op.results[0]]]


def messages(x: Any, ends: Any) -> Any:
    return jnp.zeros((64, 16)).at[ends].add(jnp.tanh(x[ends]))


@pytest.mark.parametrize(
    ("passes", "written"), [((), ["gather", "tanh", "scatter"]), (("fused-lookups",), ["scatter"])]
)
def test_messages_along_edges_are_written_where_the_compiler_has_kernels_of_their_own(
    passes: tuple[str, ...], written: list[str]
) -> None:
    problem, made = compiled(messages, NODES, EDGES, passes=passes)
    assert [kind for kind in stored_kinds(problem, made) if kind in ("gather", "tanh", "scatter")] == written


def test_rows_that_a_product_multiplies_are_written() -> None:
    problem, made = compiled(lambda x, i, w: x[i] @ w, NODES, EDGES, arg(16, 16), passes=("fused-lookups",))
    assert "gather" in stored_kinds(problem, made)


def summed_twice(x: Any, ends: Any) -> Any:
    first = jnp.zeros((64, 16)).at[ends].add(x)
    second = jnp.zeros((64, 16)).at[ends].add(jnp.sin(x @ first.T @ first))
    return jnp.zeros((32, 16)).at[ends].add(x @ second.T @ second)


def test_zeros_of_one_shape_are_there_from_the_first_scatter_on() -> None:
    problem, made = compiled(summed_twice, arg(4096, 16), EDGES, passes=("scatter-starts",))
    first, second, _ = (n for n, op in enumerate(problem.program.ops) if op.name == SCATTER)
    waits = {problem.program.producer[value]: start.interval for value, start in made.started.items()}
    assert waits == {second: (made.lives.times[first], made.lives.times[second] - 1)}


def test_a_scatter_that_adds_to_a_sum_needs_no_zeros_unless_it_is_partial() -> None:
    def run(x: Any, ends: Any, other: Any) -> Any:
        known = jnp.zeros((64, 16)).at[ends].add(x)
        return known, jnp.sort(other, 0) + jnp.zeros((64, 16)).at[ends].add(x @ known.T @ known)

    _, made = compiled(run, arg(4096, 16), EDGES, NODES, passes=("scatter-starts",))
    assert [start.added for start in made.started.values()] == [True]


def test_what_a_scatter_adds_is_there_while_it_does_and_what_it_adds_to_becomes_the_sum() -> None:
    def run(x: Any, ends: Any, y: Any) -> Any:
        return jnp.sort(x, 0).at[ends].add(jnp.sort(y, 0))

    problem, made = compiled(run, NODES, EDGES, arg(4096, 16), passes=())
    (scatter,) = (n for n, op in enumerate(problem.program.ops) if op.name == SCATTER)
    target, _, updates = problem.program.ops[scatter].operands
    ends = [max(last for _, last in made.lives.intervals[value]) for value in (target, updates)]
    assert ends == [2 * scatter - 1, 2 * scatter]


def test_what_is_reduced_and_then_copied_is_there_until_it_is_copied() -> None:
    """Each device adds up a part of the rows; sorts need the sum's rows whole, and then the copy does for both."""

    def run(x: Any, w: Any) -> Any:
        total = x @ w
        first = jnp.sort(total, 0)
        return jnp.sort(first @ first.T, 0) @ first + jnp.sort(total, 0, descending=True)

    case = case_of(run, arg(64, 256), arg(256, 64), mesh=round_mesh(data=4, model=2), profile=PLAIN)
    items = case.evaluator.items
    pricer = Pricer(case.problem, items, {})
    buffers = Buffers(case.problem, items, pricer)
    plan = (case.shard("x.1", "data"), case.shard("x.0", "data"))
    lowered = {number: case.problem.op_sharding(number, plan) for number in range(len(case.problem.patterns))}
    handed = [
        (buffers.intervals(item, kind), buffers.intervals(item, REDUCED))
        for item in (replace(item, stored=False) for item in items.arrays)
        for kind, _ in buffers.held(item, lowered[item.pattern], pricer.copies(item, lowered))
        if isinstance(kind, HandedOn)
    ]
    ((brief, long),) = handed
    assert brief[0][0] == long[0][0]
    assert brief[0][1] < long[0][1]
