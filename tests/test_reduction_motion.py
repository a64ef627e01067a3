"""All-reduces that XLA:TPU moves behind a loop: what a loop only adds up, in one piece or in several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax
from programs import PLAIN, arg, case_of, program_of, round_mesh

from toast_cli.price.compiled_collectives import reductions_each
from toast_cli.program.ops import DOT_GENERAL

MOVING = replace(PLAIN, passes=PLAIN.passes | {"reduction-motion"})
TRIPS = 5


def loop(step: Any) -> Any:
    """A loop over gradients of `x.T @ (g * trip)` with two carries; the body is `step(a, b, gradient)`."""

    def run(x: Any, g: Any) -> Any:
        def body(trip: Any, carried: Any) -> Any:
            return step(*carried, x.T @ jnp.sin(g * trip))

        return lax.fori_loop(0, TRIPS, body, (jnp.zeros((16, 8)), jnp.zeros((16, 8))))

    return run


@pytest.mark.parametrize(
    ("what", "step", "each"),
    [
        ("two pieces, each added to a carry", lambda a, b, y: (a + y[:, :8], b + y[:, 8:]), 1 / TRIPS),
        ("pieces of a transposed array", lambda a, b, y: (a + y.T[:8].T, b + y[:, 8:]), 1 / TRIPS),
        ("a piece that is changed first", lambda a, b, y: (a + jnp.sin(y[:, :8]), b + y[:, 8:]), 1),
        ("a carry that is read besides", lambda a, b, y: (a + y[:, :8], jnp.sin(a) + b + y[:, 8:]), 1),
        ("pieces that change places", lambda a, b, y: (b + y[:, :8], a + y[:, 8:]), 1),
    ],
)
def test_what_is_only_added_up_is_reduced_once(what: str, step: Any, each: float) -> None:
    program = program_of(loop(step), arg(64, 16), arg(64, 16))
    (product,) = (op for op in program.ops if op.name == DOT_GENERAL)
    assert reductions_each(program, product.results[0], MOVING) == each, what
    assert reductions_each(program, product.results[0], PLAIN) == 1


def test_it_takes_the_time_of_one_and_is_promised_as_written() -> None:
    def pieces(a: Any, b: Any, y: Any) -> Any:
        return a + y[:, :8], b + y[:, 8:]

    cases = [
        case_of(loop(pieces), arg(64, 16), arg(64, 16), mesh=round_mesh(data=4), profile=profile)
        for profile in (PLAIN, MOVING)
    ]
    plain, moved = (case.evaluator.collectives((case.shard("x.0", "data"),)) for case in cases)
    assert [use.count for use in plain] == [use.count for use in moved] == [TRIPS]
    assert sum(use.seconds for use in moved) == pytest.approx(sum(use.seconds for use in plain) / TRIPS)
