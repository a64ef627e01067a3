"""Look-ups whose results are split over several axes at once say where these lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from programs import arg, case_of

from toast_cli.emit.minimal import choose_marks


def test_what_is_looked_up_and_scattered_is_constrained() -> None:
    """XLA:TPU, which simplifies a program before it propagates, gathered the rows of a graph convolution whole."""

    def layer(x: jax.Array, w: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        return jnp.zeros_like(x).at[receivers].add((x @ w)[senders])

    edges = arg(96, dtype=jnp.int32)
    case = case_of(layer, arg(32, 64), arg(64, 64), edges, edges)
    lowered = case.lowered((case.shard("w.1", "data"), case.shard("w.1", "model")))
    lookups = [op.results[0] for op in case.program.ops if op.kind.lookup]
    assert len(lookups) == 2 and all(any(lowered.shardings[value]) for value in lookups)
    pinned = {pin.handle for pin in choose_marks(case.source, lowered).marks.pins}
    assert pinned.issuperset(case.source.definitions[value] for value in lookups)
