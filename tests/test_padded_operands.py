"""What is written for products: operands that are padded, and buffers that are not shared."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax
from programs import arg, evaluator_of, mesh_of, source_of

from toast_cli.price.fusion import padded_operands
from toast_cli.price.liveness import shrinking


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
    assert padded_operands(program) == {made["stablehlo.sine"]}


@pytest.mark.parametrize(
    ("mesh", "config", "written"),
    [
        ("v5e-16", (0, 0, 1), True),  # between rows: the gradient of x[::2]
        ("v5p-64", (1, 0, 1), True),
        ("v5e-16", (1, 1, 0), False),  # at edges
        ("h100-8", (0, 0, 1), False),
    ],
)
def test_a_pad_between_elements_is_a_kernel_of_its_own(mesh: str, config: tuple[int, int, int], written: bool) -> None:
    def spread(x: Any, y: Any) -> Any:
        return jnp.sin(lax.pad(jnp.exp(x), 0.0, (config, (0, 0, 0)))) * y

    rows = 64 + sum(config[:2]) + 63 * config[2]
    source = source_of(spread, arg(64, 256), arg(rows, 256))
    stored = evaluator_of(source, mesh_of(mesh)).items.stored
    made = {op.name: op.results[0] for op in source.program.ops if op.results}
    names = ("stablehlo.exponential", "stablehlo.pad", "stablehlo.sine")
    assert [stored[made[name]] for name in names] == [written, written, False]
