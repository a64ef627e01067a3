"""Inner products of flattened arrays are over all dimensions of the arrays, and nothing is gathered for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from normalised_programs import array, main_of, names, normalised
from programs import arg, case_of

from toast_cli import xla

Y = array(4, 6, 8)
# name -> (function of two arrays [4, 6, 8], operations that are left of it)
PROGRAMS: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "of an array with itself": (lambda x, y: jnp.vdot(x, x), ["dot_general"]),
    "of two arrays": (jnp.vdot, ["dot_general"]),
    "a vector that something else reads": (
        lambda x, y: (jnp.vdot(x, y), jnp.sin(x.ravel())), ["dot_general", "reshape", "sine"],
    ),
    "of another shape": (
        lambda x, y: jnp.vdot(x, y.reshape(24, 8)), ["reshape", "reshape", "reshape", "dot_general"],
    ),
    "each element with each": (
        lambda x, y: jnp.tensordot(x.ravel(), y.ravel(), 0), ["reshape", "reshape", "dot_general"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_flattened_arrays(name: str) -> None:
    run, left = PROGRAMS[name]
    text = jax.jit(run).lower(Y, Y).as_text()
    module = normalised(text).module
    assert sorted(names(module)) == sorted(left)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((4, 6, 8), dtype=np.float32) for _ in range(2)]
    kept = arrays[: len(main_of(module).type.inputs)]
    wanted = [np.asarray(each) for each in jax.tree.leaves(run(*arrays))]
    found = xla.run_program(xla.write_bytecode(module), kept, [each.shape for each in wanted], 1, shardy=True)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4)


def test_a_norm_gathers_nothing() -> None:
    """Of an array that is split along its last dimension: one number is reduced."""
    case = case_of(lambda x: jnp.vdot(x, x), arg(64, 64, 64))
    uses = case.evaluator.collectives((case.shard("x.2", "data"),))
    assert [(use.kind, use.bytes) for use in uses] == [("all-reduce", 4)]
