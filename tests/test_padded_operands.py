"""What is written because it is padded or joined, and buffers that are not shared."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax
from programs import arg, evaluator_of, mesh_of, source_of

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


def halves(x: Any, y: Any) -> Any:
    """Rotary embedding: the halves of each row are turned and joined again."""
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([-second, first], -1) * y


@pytest.mark.parametrize(
    ("moved", "written"),
    [
        (lambda x, y: jnp.pad(jnp.sin(x), ((0, 8), (0, 0)))[8:] * y, {"sine"}),
        (lambda x, y: jnp.concatenate([jnp.sin(x), jnp.cos(x)], 0)[64:] * y, {"sine", "cosine"}),
        (halves, {"negate", "slice"}),
        (lambda x, y: jnp.sin(x)[:32] * y[:32], set()),
        (lambda x, y: (lambda z: z[:32] * z[32:])(jnp.sin(x) * y), {"multiply"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mesh", ["v4-32", "v5e-16", "v5p-64", "v6e-64", "h100-8"])
def test_what_pads_and_concatenations_move_is_written(mesh: str, moved: Any, written: set[str]) -> None:
    source = source_of(lambda x, y: jnp.exp(moved(x, y)), arg(64, 256), arg(64, 256))
    stored = evaluator_of(source, mesh_of(mesh)).items.stored
    ops = [op for op in source.program.ops if any(stored[value] for value in op.results) and op.operands]
    names = [op.name.removeprefix("stablehlo.") for op in ops if not op.name.startswith("toast.")]
    assert set(names) - {"exponential"} == (written if mesh != "h100-8" else set())


@pytest.mark.parametrize(
    "config", [(0, 0, 1), (1, 0, 1), (1, 1, 0)]
)  # between rows as in the gradient of x[::2]; at edges
@pytest.mark.parametrize("mesh", ["v5e-16", "v5p-64", "h100-8"])
def test_pads_between_elements_and_at_edges_are_fused(mesh: str, config: tuple[int, int, int]) -> None:
    def spread(x: Any, y: Any) -> Any:
        return jnp.sin(lax.pad(jnp.exp(x), 0.0, (config, (0, 0, 0)))) * y

    rows = 64 + sum(config[:2]) + 63 * config[2]
    source = source_of(spread, arg(64, 256), arg(rows, 256))
    stored = evaluator_of(source, mesh_of(mesh)).items.stored
    made = {op.name: op.results[0] for op in source.program.ops if op.results}
    names = ("stablehlo.pad", "stablehlo.sine")
    assert not any(stored[made[name]] for name in names)
