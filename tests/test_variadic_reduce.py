"""A reduction of several arrays at once (argmax) over a split dimension: no collective adds that up, so XLA gathers
what each device found.
"""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from programs import arg, case_of

from toast_cli.emit import emit_shardy
from toast_cli.verify.child import Failure
from toast_cli.verify.partitioned import collectives_after_partitioning

CASE = case_of(lambda x: jnp.argmax(x * 2, axis=1), arg(8, 64))


@pytest.mark.parametrize("plan", [("x.1=data",), ("x.1=data", "x.0=data")], ids=["kept whole", "wanted split"])
def test_partial_results_are_gathered(plan: tuple[str, ...]) -> None:
    decisions = tuple(CASE.shard(*decision.split("=")) for decision in plan)
    assert CASE.collectives(decisions) == [("all-gather", ("data",), 8 * 4 * 4, 2.0)]


def test_xla_does_so() -> None:
    lowered = CASE.lowered((CASE.shard("x.1", "data"),))
    found = collectives_after_partitioning(emit_shardy(CASE.source, lowered), "stablehlo", {"data": 4, "model": 2})
    assert not isinstance(found, Failure)
    assert [(c.kind, c.axes, c.bytes) for c in found] == [("all-gather", ("data",), 128)] * 2
