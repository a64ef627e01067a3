"""In which type what products read is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from programs import PLAIN, arg, program_of

from toast_cli.price.compiled_collectives import Narrowing
from toast_cli.price.fusion import written_parts
from toast_cli.program.ops import CARRY, DOT_GENERAL, TRANSPOSE


def stacked_by(run: Any) -> list[float]:
    """The parts of their bits in which a scan over 8 layers stacks [16, 64] for a scan back over them."""

    def both(x: Any, w: Any) -> Any:
        def forward(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w), x

        last, kept = lax.scan(forward, x, w)
        return last, lax.scan(run, (last, last), (w, kept), reverse=True)

    program = program_of(both, arg(16, 64), arg(8, 64, 64))
    profile = replace(PLAIN, passes=PLAIN.passes | {"product-operands"})
    parts = written_parts(program, [True] * len(program.values), profile)
    carried = [op.results[0] for op in program.ops if op.name == CARRY]
    return [parts[value] for value in carried if program.values[value].shape == (8, 16, 64)]


def test_stacks_of_operands_are_written_in_the_type_that_is_multiplied() -> None:
    def multiplied(carried: Any, layer: Any) -> Any:
        g, h = carried
        w, x = layer
        return (g @ w.T, h), x.T @ g

    def added(carried: Any, layer: Any) -> Any:
        (g, h), gradient = multiplied(carried, layer)
        return (g, h + layer[1]), gradient

    assert stacked_by(multiplied) == [0.5]
    assert stacked_by(added) == [1.0]


def test_a_product_with_a_vector_adds_up_in_f32() -> None:
    """XLA:TPU multiplies element by element: what only a matrix-vector product reads lies in memory, and moves, in its
    own type."""
    profile = replace(PLAIN, passes=PLAIN.passes | {"product-operands", "narrowing"})
    for shape, part in (((64, 32), 0.5), ((64, 1), 1.0), ((64,), 1.0)):
        program = program_of(lambda x, w, v: jnp.tanh(x @ w) @ v, arg(16, 64), arg(64, 64), arg(*shape))
        product = next(n for n in reversed(range(len(program.ops))) if program.ops[n].name == DOT_GENERAL)
        left = program.ops[product].operands[0]
        assert written_parts(program, [True] * len(program.values), profile)[left] == part
        assert Narrowing(program, profile).of_use(left, product) == part


def prepared(prepare: Any, use: Any, *, sliced: bool = True) -> float:
    """The part of its bits with which what a scan reads, made before it, is written."""

    def run(x: Any, w: Any) -> Any:
        made = prepare(w)
        step = (lambda x, layer: (use(x, layer), None)) if sliced else (lambda x, _: (use(x, made[0]), None))
        return lax.scan(step, x, made if sliced else None, length=8)

    program = program_of(run, arg(16, 64), arg(64, 8, 64))
    profile = replace(PLAIN, passes=PLAIN.passes | {"product-operands"})
    outside = [op.results[0] for op in program.ops if op.loop < 0 and op.name in (TRANSPOSE, "stablehlo.sine")]
    return written_parts(program, [True] * len(program.values), profile)[outside[-1]]


def test_what_a_loop_converts_or_multiplies_is_written_so_before_it() -> None:
    def turned(w: Any) -> Any:
        return jnp.swapaxes(w, 0, 1)

    def computed(w: Any) -> Any:
        return jnp.sin(turned(w))

    def multiplied(x: Any, w: Any) -> Any:
        return x @ w

    def converted(x: Any, w: Any) -> Any:
        return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(x.dtype)

    for prepare in (turned, computed):
        assert prepared(prepare, multiplied) == prepared(prepare, converted) == 0.5
        assert prepared(prepare, lambda x, w: x @ w + jnp.sin(w)[0]) == 1.0  # the loop reads it in f32, too
    assert prepared(computed, multiplied, sliced=False) == 0.5
