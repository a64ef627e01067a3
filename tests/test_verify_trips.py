"""Trip counts of loops in what XLA makes of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax
from programs import arg, source_of

from toast_cli import xla
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.compile import compile_for, virtual_devices
from toast_cli.ask_xla.hlo_text import computations, graphs, run_counts

Loop = Callable[[Any, Any], Any]


def until(length: int, start: int, step: int = 1) -> Loop:
    """A loop that ends early once an element is large, as decoding does."""

    def run(x: Any, n: Any) -> Any:
        going = lambda s: (s[0] < length) & (s[1][0, 0] < 1e3)  # noqa: E731
        return lax.while_loop(going, lambda s: (s[0] + step, s[1] @ s[1]), (jnp.int32(start), x))[1]

    return run


# What makes a loop, by the rows of its square matrix -> products of such matrices in one run.
LOOPS: list[tuple[int, Loop, int]] = [
    (4, lambda x, n: lax.scan(lambda c, _: (c @ c, None), x, None, length=11)[0], 11),
    (6, lambda x, n: lax.fori_loop(3, 11, lambda i, c: c @ c, x), 8),
    (8, until(50, 3), 47),  # 50 is its most, which a condition of several parts does not say
    (10, until(14, 0, step=3), 5),  # 0 3 6 9 12
    (12, lambda x, n: lax.fori_loop(n, n + 7, lambda i, c: c @ c, x), 7),  # from an unknown number
    (14, lambda x, n: lax.fori_loop(0, 3, lambda i, c: lax.fori_loop(0, 4, lambda j, d: d @ d, c), x), 12),
]


def test_loops_run_as_often_as_the_program_says() -> None:
    def run(n: Any, *arrays: Any) -> Any:
        return [loop(x, n) for (_, loop, _), x in zip(LOOPS, arrays, strict=True)]

    source = source_of(run, arg(dtype=jnp.int32), *(arg(rows, rows) for rows, _, _ in LOOPS))
    text = compile_for(xla.write_bytecode(source.module), "stablehlo", virtual_devices(2))
    assert not isinstance(text, Failure), text
    products = {
        node.sizes[0]: graph.runs
        for graph in graphs(text.hlo_text)
        for node in graph.nodes.values()
        if node.opcode == "dot"
    }
    assert products == {4 * rows * rows: float(count) for rows, _, count in LOOPS}


WHILE = """HloModule loop

%condition (c: (f32[4], s32[])) -> pred[] {
  %c = (f32[4]{0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=1
  %bound = s32[] constant(11)
  CONDITION
}

%body (b: (f32[4], s32[])) -> (f32[4], s32[]) {
  ROOT %b = (f32[4]{0}, s32[]) parameter(0)
}

ENTRY %main (a: (f32[4], s32[])) -> (f32[4], s32[]) {
  %a = (f32[4]{0}, s32[]) parameter(0)
  ROOT %w = (f32[4]{0}, s32[]) while(%a), condition=%condition, body=%bodySAID
}
"""
GOES = "ROOT %go = pred[] compare(%i, %bound), direction=LT"
STATED, KNOWN = ', frontend_attributes={toast.runs="5"}', ', backend_config={"known_trip_count":{"n":"3"}}'


@pytest.mark.parametrize(
    ("condition", "said", "trips"),
    [
        (GOES, "", 11),  # XLA's own loops count from 0
        (GOES, STATED, 5),
        (GOES, KNOWN, 3),
        (GOES, STATED + KNOWN, 3),  # the compiler took some of them out of the loop
        (f"%masked = s32[4]{{0}} broadcast(%bound), dimensions={{}}\n  {GOES}", "", 1),  # a size of uneven shards
        (f"%other = s32[] constant(7)\n  {GOES}", "", 1),
    ],
)
def test_who_says_how_often_a_loop_runs(condition: str, said: str, trips: int) -> None:
    bodies, entry = computations(WHILE.replace("CONDITION", condition).replace("SAID", said))
    assert run_counts(bodies, entry)[0]["body"] == trips
