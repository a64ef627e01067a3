"""What JAX leaves to LAPACK and cuSOLVER is partitioned in the child as in the user's process: a batch of matrices may
be split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from emitted import emit_shardy
from programs import Case, arg, evaluator_of, round_mesh, source_of_text

from toast_cli.ask_xla.compile import collectives_after_partitioning


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_batch_of_cholesky_factors_stays_split(platform: str) -> None:
    traced = jax.jit(jnp.linalg.cholesky).trace(arg(8, 16, 16))
    source = source_of_text(traced.lower(lowering_platforms=(platform,)).as_text(debug_info=True))
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    plan = (case.shard("a.0", "data"),)
    content = emit_shardy(case.source, case.lowered(plan))
    assert case.collectives(plan) == []
    assert collectives_after_partitioning(content, "stablehlo", {"data": 4, "model": 2}) == []
