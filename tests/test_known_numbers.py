"""Integers that a program computes from nothing are those that it computes when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from normalised_programs import main_of, normalised

from toast_cli.frontend.known_numbers import MOST_ELEMENTS, known_numbers

# Functions of nothing, as indices are made.
KNOWN: dict[str, Callable[[], Any]] = {
    "beams": lambda: jnp.reshape(jax.lax.iota("int32", 20) // 4, (5, 4)),
    "floor of negative numbers": lambda: (jax.lax.iota("int32", 20) - 10) // 3,
    "remainder of negative numbers": lambda: (jax.lax.iota("int32", 20) - 10) % 3,
    "truncated": lambda: jax.lax.div(jax.lax.iota("int32", 20) - 10, jnp.int32(3)),
    "small integers wrap": lambda: jax.lax.iota("int8", 100) * jnp.int8(3),
    "the least integer by -1": lambda: jax.lax.div(jax.lax.iota("int32", 4) + jnp.int32(-(2**31)), jnp.int32(-1)),
    "unsigned": lambda: jax.lax.iota("uint32", 7) - jnp.uint32(3),
    "widened": lambda: jax.lax.iota("uint8", 7).astype("int32") - 3,
    "rows and columns": lambda: jax.lax.broadcasted_iota("int32", (3, 4), 1).T * 5,
    "pieces": lambda: jnp.concatenate([jax.lax.iota("int32", 9)[2:8:2], jnp.array([7, 5], "int32")]),
    "negative indices": lambda: jnp.where((i := jax.lax.iota("int32", 6) - 2) < 0, i + 6, i),
    "truth": lambda: ~((jax.lax.iota("int32", 6) > 1) & (jax.lax.iota("int32", 6) != 4)),
    "rows that repeat, however many": lambda: jax.lax.broadcasted_iota("int32", (3, MOST_ELEMENTS, 1), 0) * 2 + 1,
    "bounds": lambda: jnp.clip(jax.lax.iota("int32", 9), 2, 5) | 8,
}
UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "an argument": lambda x: jax.lax.iota("int32", 4) + x,
    "floats": lambda x: jax.lax.iota("float32", 4).astype("int32"),
    "large": lambda x: jax.lax.iota("int32", MOST_ELEMENTS + 1) + 1,
    "by zero": lambda x: jax.lax.div(jnp.int32(4), jax.lax.iota("int32", 4)),
}


def result_of(run: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """The normalised module of a function, and what it returns."""
    module = normalised(jax.jit(run).lower(*arguments).as_text()).module
    block = main_of(module).regions[0].blocks[0]
    return module, block.operations[len(block.operations) - 1].operands[0]


@pytest.mark.parametrize("run", KNOWN.values(), ids=KNOWN)
def test_what_is_computed_from_nothing_is_known(run: Callable[[], Any]) -> None:
    _module, value = result_of(run)
    found = known_numbers(value)
    assert found is not None
    expected = np.asarray(run())
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("run", UNKNOWN.values(), ids=UNKNOWN)
def test_what_depends_on_data_is_not(run: Callable[[Any], Any]) -> None:
    _module, value = result_of(run, jax.ShapeDtypeStruct((4,), jnp.int32))
    assert known_numbers(value) is None
