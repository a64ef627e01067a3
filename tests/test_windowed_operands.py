"""What is written for products: operands that are taken apart or padded, and buffers that are not shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax
from programs import PLAIN, arg, evaluator_of, mesh_of, source_of
from test_passes import case_on, plan_of

from toast_cli.compiler.in_place_updates import shrinking
from toast_cli.compiler.padded_operands import padded

PIECEWISE = replace(
    PLAIN,
    passes=PLAIN.passes
    | {"narrowing", "tiled-reduce-scatter", "small-gathers", "windowed-products", "windowed-operands"},
)
ROWS, WIDTH = 65536, 256
PLAN = "x.0:data x.1:data w.1:model"


def written(fn: Any, plan: str, *shapes: Any) -> float:
    """Bytes on one device that the pass adds to the peak."""
    source = source_of(fn, *shapes)
    peaks = []
    for without in ((), ("windowed-operands",)):
        case = case_on(PIECEWISE, source, without)
        peaks.append(case.evaluator.exact_cost(plan_of(case, plan)).peak_bytes)
    return peaks[0] - peaks[1]


def gradient(x: Any, w: Any) -> Any:
    return jnp.tanh(x).T @ w


def gradients(x: Any, w: Any) -> Any:
    y = jnp.tanh(x)
    return y.T @ w, y.T @ jnp.sin(w)


X, W = arg(ROWS, 16), arg(ROWS, WIDTH)
OPERAND = ROWS // 4 * 16 * 2  # rows are split by 4; products multiply bf16


@pytest.mark.parametrize(
    ("what", "fn", "plan", "size"),
    [
        ("the operand with the scattered dimension is written in 16 bits", gradient, PLAN, OPERAND),
        ("once for all products that read it", gradients, PLAN, OPERAND),
        ("nothing where the product is all-reduced", gradient, "x.0:data w.1:model", 0),
        ("nothing where nothing is added up", gradient, "w.1:model", 0),
        ("nothing where it is there", lambda x, w: x.T @ w, PLAN, 0),
        ("nothing of the other operand", lambda x, w: x.T @ jnp.tanh(w), PLAN, 0),
    ],
)
def test_operands_of_windowed_products(what: str, fn: Any, plan: str, size: float) -> None:
    assert written(fn, plan, X, W) == size, what


def test_what_is_narrower_than_what_it_is_made_of_has_its_own_buffer() -> None:
    def narrowed(x: Any, w: Any) -> Any:
        return jnp.sin(x).astype(jnp.bfloat16), jnp.cos(w)

    source = source_of(narrowed, arg(64, 64), arg(64, 64))
    program = source.program
    makers = {op.name: number for number, op in enumerate(program.ops)}
    stored = [True] * len(program.values)
    convert, cosine = makers["stablehlo.convert"], makers["stablehlo.cosine"]
    found = shrinking(program, stored, [1.0] * len(stored))
    assert found[convert] and not found[cosine]
    stored[program.ops[makers["stablehlo.sine"]].results[0]] = False  # computed where it is converted
    assert shrinking(program, stored, [1.0] * len(stored))[convert]
    parts = [1.0] * len(stored)
    parts[program.ops[cosine].results[0]] = 0.5
    assert shrinking(program, stored, parts)[cosine]


def loss(x: Any, w: Any, *, cut: bool) -> Any:
    """The gradient of a classifier's loss with regard to its features, without the last row's where cut."""
    logits = x @ w
    logits = logits[:-1] if cut else logits
    probabilities = jnp.exp(logits) / jnp.exp(logits).sum(1, keepdims=True)
    probabilities = jnp.pad(probabilities, ((0, 1), (0, 0))) if cut else probabilities
    return probabilities @ w.T


@pytest.mark.parametrize("cut", [True, False])
def test_the_gradient_of_logits_is_written_where_it_is_padded(cut: bool) -> None:
    source = source_of(lambda x, w: loss(x, w, cut=cut), arg(256, 16), arg(16, 2**16))
    stored = evaluator_of(source, mesh_of("v5e-16")).items.stored
    program = source.program
    divided = next(op for op in program.ops if op.name == "stablehlo.divide").results[0]
    assert stored[divided] is cut


def test_padding_counts_where_products_read_it_through_views() -> None:
    def seen(x: Any, w: Any) -> Any:
        padded = jnp.pad(jnp.sin(x), ((0, 1), (0, 0)))
        return padded.T.reshape(4, 4, 17) @ w, lax.sort(jnp.pad(jnp.cos(x), ((0, 1), (0, 0))))

    program = source_of(seen, arg(16, 16), arg(17, 8)).program
    made = {op.name: op.results[0] for op in program.ops if op.results}
    assert padded(program) == {made["stablehlo.sine"]}
