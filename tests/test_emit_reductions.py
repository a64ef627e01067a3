"""Reductions whose result goes on in a finer layout say so, lest that layout spreads over what they read."""

from __future__ import annotations

import jax
from programs import Case, arg, case_of

from toast_cli.emit.minimal import choose_marks
from toast_cli.emit.settle import settled


def loss_case() -> Case:
    """The gradient of a loss over `[batch, vocab]` logits."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return -jax.nn.log_softmax(x @ w)[:, 0].mean()

    return case_of(jax.grad(loss), arg(8, 64), arg(16, 8))


def test_a_scattered_reduction_has_both_its_layouts() -> None:
    case = loss_case()
    plan = (case.shard("x.0", "data"), case.shard("w.1", "model"), case.shard("x.0", "model"))
    lowered = settled(case.program, case.lowered(plan))
    scattered = {
        op.results[0] for op in case.program.ops if op.name == "stablehlo.reduce" and op.results[0] in lowered.computed
    }
    pins = {pin.handle: pin.layouts for pin in choose_marks(case.source, lowered).marks.pins}
    assert scattered
    for value in scattered:
        assert pins[case.source.definitions[value]] == (lowered.computed[value], lowered.layouts[value])
