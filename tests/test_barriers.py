"""Totals that are scattered and read in parts: written with a barrier, since XLA joins slices (XLA:TPU fails then)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from emitted import emit_shardy
from jax import lax
from programs import Case, arg, case_of, round_mesh

from toast_cli.emit import write
from toast_cli.emit.annotations import barred_values
from toast_cli.emit.minimal import choose_annotations
from toast_cli.plan.decisions import Plan

Read = Callable[[Any], Any]
# How x @ w is read, which is scattered along its columns -> whether it is in parts.
READERS: dict[str, tuple[Read, bool]] = {
    "whole": (jnp.tanh, False),
    "all rows but the last": (lambda y: jnp.tanh(y[:, :-1]), True),
    "all rows but the first": (lambda y: jnp.tanh(y[:, 1:]), True),
    "one row": (lambda y: jnp.tanh(y[:, 0]), True),
    "some rows": (lambda y: jnp.tanh(lax.dynamic_slice_in_dim(y, 3, 4, 1)), True),
    "in part and whole": (lambda y: (y[:, :-1] * 2, jnp.tanh(y)), True),
    "in part after arithmetic": (lambda y: (-y.astype(jnp.bfloat16))[:, :-1], True),
    "in another form": (lambda y: y.reshape(64, 8, 4, 8)[:, :-1], False),
    "with less than no padding": (lambda y: lax.pad(y, 0.0, ((0, 0, 0), (0, -1, 0), (0, 0, 0))), True),
    "padded": (lambda y: jnp.pad(y, ((0, 0), (0, 1), (0, 0))), False),
}


def case_and_plan(read: Read, mesh: dict[str, int], *, scatter: str = "w.1") -> tuple[Case, Plan]:
    case = case_of(lambda x, w: read(x @ w), arg(64, 8, 16), arg(16, 32), mesh=round_mesh(**mesh))
    plan = [case.shard("x.0", "data"), case.shard("x.2", "model")]
    return case, (*plan, *([case.shard(scatter, "model")] if scatter else []))


@pytest.mark.parametrize("name", READERS)
def test_a_total_that_is_read_in_parts_has_a_barrier(name: str) -> None:
    read, expected = READERS[name]
    case, plan = case_and_plan(read, {"data": 4, "model": 2})
    lowered = case.lowered(plan)
    assert len(barred_values(case.program, lowered)) == expected
    text = emit_shardy(case.source, lowered)
    assert text.count(b"stablehlo.optimization_barrier") == expected
    assert b"optimization_barrier" not in emit_shardy(case.source, lowered, annotate="arguments")
    assert choose_annotations(case.source, lowered).astray == []
    assert emit_shardy(case.source, lowered) == text  # the module is as it was


def test_what_is_reduced_whole_has_none() -> None:
    case, plan = case_and_plan(lambda y: y[:, :-1], {"data": 4, "model": 2}, scatter="")
    assert barred_values(case.program, case.lowered(plan)) == []


def test_a_piece_that_is_cut_further_has_a_barrier() -> None:
    """By an axis that the sum does not go over: XLA joins both cuts, and they lie along two dimensions."""
    case = case_of(
        lambda x, g: x.T @ g, arg(64, 32), arg(64, 16), mesh=round_mesh(data=4, model=2), pins=("result=model,data",)
    )
    plan = (case.shard("x.0", "data"), case.shard("g.1", "data"))
    assert len(barred_values(case.program, case.lowered(plan))) == 1


def test_a_barrier_of_the_program_stays_beside_one_that_is_added() -> None:
    def read(y: Any) -> Any:
        return lax.optimization_barrier(jnp.tanh(y[:, :-1]))

    case, plan = case_and_plan(read, {"data": 4, "model": 2})
    lowered = case.lowered(plan)
    text = emit_shardy(case.source, lowered)
    assert text.count(b"stablehlo.optimization_barrier") == 2
    assert choose_annotations(case.source, lowered).astray == []


@pytest.mark.parametrize(("sums", "expected"), [(jnp.float32, 1), (jnp.bfloat16, 0)])
def test_what_a_loop_adds_up_in_another_type_has_a_barrier(sums: Any, expected: int) -> None:
    """XLA:TPU moves such a reduce-scatter behind the loop, and fails at the conversion."""

    def accumulated(xs: Any, gs: Any) -> Any:
        def step(held: Any, pair: tuple[Any, Any]) -> tuple[Any, None]:
            return held + (pair[0].T @ pair[1]).astype(sums), None

        return lax.scan(step, jnp.zeros((32, 16), sums), (xs, gs))[0]

    arrays = (arg(4, 64, 32, dtype=jnp.bfloat16), arg(4, 64, 16, dtype=jnp.bfloat16))
    case = case_of(accumulated, *arrays, mesh=round_mesh(data=4))
    plan = (case.shard("xs.1", "data"), case.shard("xs.2", "data"))
    lowered = case.lowered(plan)
    assert len(barred_values(case.program, lowered)) == expected
    text = write(case.source, lowered, "stablehlo", "minimal").content
    assert (b"optimization_barrier" in text) == bool(expected)
