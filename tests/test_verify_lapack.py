"""What JAX leaves to LAPACK is partitioned in the child as in the user's process: a batch of matrices may be split."""

from __future__ import annotations

import jax.numpy as jnp
from programs import arg, case_of

from toast_cli.emit import emit_shardy
from toast_cli.verify.partitioned import collectives_after_partitioning


def test_a_batch_of_cholesky_factors_stays_split() -> None:
    case = case_of(jnp.linalg.cholesky, arg(8, 16, 16))
    plan = (case.shard("a.0", "data"),)
    content = emit_shardy(case.source, case.lowered(plan))
    assert case.collectives(plan) == []
    assert collectives_after_partitioning(content, "stablehlo", {"data": 4, "model": 2}) == []
