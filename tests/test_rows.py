"""Time of arrays of narrow rows, which XLA:TPU pads to 128 lanes on each device."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from programs import Case, arg, case_of

EDGES, NODES, FEATURES = 2**18, 2**13, 256
NUMBERS = arg(EDGES, dtype=jnp.int32)


def edges(run: Any, *more: Any) -> Case:
    return case_of(run, arg(NODES, FEATURES), NUMBERS, NUMBERS, *more, mesh="v4-32")


def seconds(case: Case, op: str, *axes: str) -> dict[int, float]:
    """Number of an op of that name -> seconds of its kernels where these axes split the features of `x`."""
    plan, found = tuple(case.shard("x.1", axis) for axis in axes), dict[int, float]()
    for use in case.evaluator.kernels(plan):
        if use.name.removeprefix("stablehlo.") == op:
            found[use.ops[0]] = found.get(use.ops[0], 0.0) + use.seconds
    return found


def messages(x: Any, senders: Any, receivers: Any) -> Any:
    return jnp.zeros_like(x).at[receivers].add(jnp.maximum(x[senders], 0.0))


def test_a_device_that_has_a_part_of_each_row_reads_and_writes_whole_tiles() -> None:
    """128, 32 and 16 of 256 features take 128 lanes each: 128 MiB read and 128 written at 0.735 of 1,228 GB/s. XLA:TPU
    estimates 372 us for 160 MiB each."""
    case = edges(messages)
    for axes in (("model",), ("data",), ("data", "model")):
        (spent,) = seconds(case, "maximum", *axes).values()
        assert spent == pytest.approx(2 * 128 * 2**20 / (0.735 * 1228e9), rel=0.04)
    (whole,) = seconds(case, "maximum").values()
    assert whole == pytest.approx(2 * 256 * 2**20 / (0.735 * 1228e9), rel=0.04)


def logits(x: Any, senders: Any, receivers: Any, w: Any) -> Any:
    """As in graph attention; the concatenation needs whole rows."""
    return jnp.concatenate([x[senders], x[receivers]], -1) @ w


def test_rows_that_are_gathered_are_transposed_before_and_after() -> None:
    """32 of 256 features: 128 MiB of tiles become 32 for the gather; 256 then become 256. XLA:TPU estimates 654 us for
    the second copy."""
    case = edges(logits, arg(2 * FEATURES, 1))
    spent = sum(seconds(case, "copy", "data").values())
    assert spent == pytest.approx(2 * (128 + 32 + 2 * 256) * 2**20 / (0.735 * 1228e9), rel=0.03)


def test_rows_of_whole_tiles_are_gathered_without_a_copy() -> None:
    assert not seconds(edges(logits, arg(2 * FEATURES, 1)), "copy", "model")


def test_rows_that_are_reshaped_on_the_way_into_a_kernel_are_counted_as_whole_tiles() -> None:
    """The kernel's operand has another number of dimensions than the array of rows."""
    case = edges(lambda x, m, n: jnp.sum(jnp.tanh(x[m]).reshape(EDGES, 8, 32) * 2.0, -1))
    for axes in ((), ("data",)):
        assert sum(sum(seconds(case, op, *axes).values()) for op in ("reduce", "multiply", "reshape")) > 0.0
