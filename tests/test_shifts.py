"""Pieces of arrays that are padded or put together again: paddings of the whole array, with the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from normalised_programs import F32, array, names, normalised
from run_here import run_program

from toast_cli import xla

MOVED = ("concatenate", "pad", "select", "slice")
N = 10


def gradient(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.grad(lambda x: jnp.sum(jnp.sin(run(x)) * jnp.arange(float(N))[:, None]))


def causal(x: Any) -> Any:
    """A convolution by hand."""
    padded = jnp.pad(x, ((3, 0), (0, 0)))
    return sum(padded[k : k + N] * (k + 1.0) for k in range(4))


def moved(**counts: int) -> Counter[str]:
    return Counter(counts)


# name -> (function of [10, 4], which of `MOVED` are left of it)
PROGRAMS: dict[str, tuple[Callable[[Any], Any], Counter[str]]] = {
    "rolled": (lambda x: jnp.roll(x, 3, 0), moved(pad=2, select=1)),
    "rolled back": (lambda x: jnp.roll(x, -3, 0), moved(pad=2, select=1)),
    "rolled along both": (lambda x: jnp.roll(x, (3, -1), (0, 1)), moved(pad=4, select=2)),
    "gradient of a roll": (gradient(lambda x: jnp.roll(x, 3, 0)), moved(pad=4, select=1)),
    "by half": (lambda x: jnp.roll(x, N // 2, 0), moved(slice=2, concatenate=1)),
    "zeros in front": (lambda x: jnp.concatenate([jnp.zeros_like(x[:2]), x[:-2]]), moved(pad=1)),
    "ones behind": (lambda x: jnp.concatenate([x[2:], jnp.ones_like(x[:2])]), moved(pad=1)),
    "gradient of zeros in front": (
        gradient(lambda x: jnp.concatenate([jnp.zeros_like(x[:2]), x[:-2]])),
        moved(pad=2),
    ),
    "the first again": (lambda x: jnp.concatenate([x[:1], x[:-1]]), moved(pad=1, select=1)),
    "padded, then cut": (lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1], moved(pad=1)),
    "cut, then padded": (lambda x: jnp.pad(x[3:], ((0, 3), (0, 0)), constant_values=2.0), moved(pad=1)),
    "a convolution by hand": (causal, moved(pad=3)),
    "two arrays": (lambda x: jnp.concatenate([x[7:], jnp.sin(x)[:7]]), moved(pad=2, select=1)),
    # What is not only moved stays.
    "longer than the array": (lambda x: jnp.concatenate([x, jnp.zeros((3, 4))])[1:12], moved(concatenate=1, slice=1)),
    "what was cut would show": (lambda x: jnp.pad(x[3:], ((3, 0), (0, 0))), moved(slice=1, pad=1)),
    "between zeros": (lambda x: jnp.concatenate([jnp.zeros((2, 4)), x[1:9]]), moved(slice=1, concatenate=1)),
    "cut elsewhere": (lambda x: jnp.pad(x, ((1, 1), (0, 0)))[:, :3], moved(pad=1, slice=1)),
    "every other": (lambda x: jnp.pad(x, ((1, 1), (0, 0)))[::2], moved(pad=1, slice=1)),
    "two in a row": (lambda x: jnp.concatenate([x, jnp.sin(x)]), moved(concatenate=1)),
}


@pytest.mark.parametrize(("run", "left"), PROGRAMS.values(), ids=PROGRAMS)
def test_what_is_left(run: Callable[[Any], Any], left: Counter[str]) -> None:
    text = jax.jit(run).lower(array(N, 4)).as_text()
    assert Counter(name for name in names(normalised(text).module) if name in MOVED) == left


@pytest.mark.parametrize("dtype", [F32, jnp.int8, jnp.bool_, jnp.complex64, jnp.bfloat16], ids=str)
def test_numbers_are_the_same(dtype: Any) -> None:
    def run(x: Any) -> Any:
        return [
            jnp.roll(x, 3, 0),
            jnp.roll(x, (-1, 3), (1, 0)),
            jnp.concatenate([jnp.zeros_like(x[:2]), x[:-2]]),
            jnp.concatenate([x[2:], jnp.ones_like(x[:2])]),
            jnp.pad(x, ((1, 2), (0, 3)))[2:-1, 1:],
            jnp.pad(x[3:], ((0, 1), (0, 0))),
            lax.pad(x, jnp.ones((), x.dtype), ((-1, 2, 1), (0, 0, 0)))[3:-1],
            jnp.concatenate([x[:1], x[:-1]]),
            jnp.concatenate([x, jnp.ones_like(x[:2])])[1:-1],
            jnp.concatenate([jnp.ones_like(x[:2]), x[1:9]])[1:-1],
        ]

    drawn = jnp.array(np.random.default_rng(0).normal(size=(N, 4)) * 50)
    x = (drawn > 0) if dtype == jnp.bool_ else drawn.astype(dtype)
    expected = [np.asarray(each) for each in jax.jit(run)(x)]
    module = normalised(jax.jit(run).lower(x).as_text()).module
    found = run_program(xla.write_bytecode(module), [np.asarray(x)], [e.shape for e in expected], 1, shardy=True)
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(got), wanted)


def test_a_sharding_that_is_stated_keeps_its_array() -> None:
    text = """func.func public @main(%a: tensor<10xf32>) -> tensor<10xf32> {
      %0 = stablehlo.slice %a [7:10] : (tensor<10xf32>) -> tensor<3xf32>
      %1 = stablehlo.slice %a [0:7] : (tensor<10xf32>) -> tensor<7xf32>
      %2 = stablehlo.concatenate %0, %1, dim = 0 {mhlo.sharding = "{replicated}"}
        : (tensor<3xf32>, tensor<7xf32>) -> tensor<10xf32>
      return %2 : tensor<10xf32> }"""
    assert names(normalised(text, keep=True).module) == ["slice", "slice", "concatenate"]
