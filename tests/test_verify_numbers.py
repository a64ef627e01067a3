"""The numbers check: what it lets pass as rounding, and that wrong gradients of training steps do not pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toast_cli import xla
from toast_cli.ask_xla import numbers
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.numbers import (
    ResultError,
    Runs,
    compare_here,
    input_sets,
    narrowest_float,
    new_versions,
    refuse_large,
    relative_error,
    result_errors,
    shake,
    tolerance_of,
)

Tree = Any
Gradient = Callable[..., tuple[jax.Array, Tree]]
SHARDS = 8
ROWS, WIDTH = 32, 24


# ---------------------------------------------------------------- training steps, right and wrong


def loss(params: Tree, batch: jax.Array, dtype: Any) -> jax.Array:
    hidden = jnp.tanh(batch.astype(dtype) @ params["up"].astype(dtype))
    return jnp.mean((hidden @ params["down"].astype(dtype)).astype(jnp.float32) ** 2)


def right(params: Tree, batch: jax.Array, dtype: Any) -> tuple[jax.Array, Tree]:
    return jax.value_and_grad(loss)(params, batch, dtype)


def unreduced(params: Tree, batch: jax.Array, dtype: Any) -> tuple[jax.Array, Tree]:
    """Every device goes on with the gradient of its own shard: the all-reduce is missing."""
    value, gradient = right(params, batch[: ROWS // SHARDS], dtype)
    return right(params, batch, dtype)[0] + 0 * value, jax.tree.map(lambda g: g / SHARDS, gradient)


def halved(params: Tree, batch: jax.Array, dtype: Any) -> tuple[jax.Array, Tree]:
    value, gradient = right(params, batch, dtype)
    return value, jax.tree.map(lambda g: g / 2, gradient)


def one_shard_short(params: Tree, batch: jax.Array, dtype: Any) -> tuple[jax.Array, Tree]:
    kept = ROWS - ROWS // SHARDS
    _, gradient = right(params, batch[:kept], dtype)
    return right(params, batch, dtype)[0], jax.tree.map(lambda g: g * kept / ROWS, gradient)


def sgd(gradient: Gradient, dtype: Any, params: Tree, batch: jax.Array) -> tuple[Tree, jax.Array]:
    value, grads = gradient(params, batch, dtype)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value


def adam(gradient: Gradient, dtype: Any, params: Tree, mu: Tree, nu: Tree, batch: jax.Array) -> tuple[Tree, ...]:
    value, grads = gradient(params, batch, dtype)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, grads)
    nu = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, nu, grads)
    params = jax.tree.map(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), params, mu, nu)
    return params, mu, nu, value


def lowered(optimizer: Callable[..., Any], gradient: Gradient, dtype: Any, *, donate: bool = True) -> Any:
    params = {
        "up": jax.ShapeDtypeStruct((WIDTH, 2 * WIDTH), "float32"),
        "down": jax.ShapeDtypeStruct((2 * WIDTH, WIDTH), "float32"),
    }
    state = [params] * (1 if optimizer is sgd else 3)
    step = jax.jit(partial(optimizer, gradient, dtype), donate_argnums=range(len(state)) if donate else ())
    return step.lower(*state, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"))


def judged(original: Any, other: Any) -> list[ResultError]:
    return compare_here(original.as_text().encode(), other.as_text().encode(), 1, 0, "stablehlo", 60.0)


@pytest.mark.parametrize("wrong", [unreduced, halved, one_shard_short])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_a_wrong_gradient_is_caught(optimizer: Any, dtype: str, wrong: Any) -> None:
    errors = judged(lowered(optimizer, right, dtype), lowered(optimizer, wrong, dtype))
    assert [e.index for e in errors if e.wrong][:2] == [0, 1]
    assert not errors[-1].wrong  # the loss is right


def test_without_donation_too() -> None:
    programs = (lowered(sgd, gradient, "float32", donate=False) for gradient in (right, halved))
    assert [e.index for e in judged(*programs) if e.wrong] == [0, 1]


def reordered(params: Tree, batch: jax.Array, dtype: Any) -> tuple[jax.Array, Tree]:
    """The right gradient, summed shard by shard, as a partitioned program does."""
    pieces = [right(params, piece, dtype) for piece in jnp.split(batch, SHARDS)]
    return jax.tree.map(lambda *leaves: sum(leaf.astype(dtype) for leaf in leaves).astype("float32") / SHARDS, *pieces)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_another_order_of_summing_is_no_error(optimizer: Any, dtype: str) -> None:
    errors = judged(lowered(optimizer, right, dtype), lowered(optimizer, reordered, dtype))
    assert not [e for e in errors if e.wrong]
    assert max(e.error for e in errors) > 0
    assert all("response" in e.looks for e in errors[:2])


# ---------------------------------------------------------------- the pieces


def module_of(step: Any) -> Any:
    return xla.parse_module(xla.make_context(), step.as_text())


@pytest.mark.parametrize("donate", [True, False])
def test_new_versions(donate: bool) -> None:
    """Arguments: params (down, up), mu, nu, batch; results: the same and the loss. `p` comes from p, m and v; `m` from
    m.
    """
    versions = new_versions(module_of(lowered(adam, right, "float32", donate=donate)))
    assert versions == {0: (0, 2, 4), 1: (1, 3, 5), 2: (2,), 3: (3,), 4: (4,), 5: (5,)}


def test_inputs_differ_in_what_is_not_state() -> None:
    first, second = input_sets(module_of(lowered(adam, right, "float32")), 0, 2)
    same = [np.array_equal(a, b) for a, b in zip(first, second, strict=True)]
    assert same == [True] * 6 + [False]
    assert (first[0] < 0).any() and (first[2] < 0).any()
    assert all((moment > 0).all() and moment.max() < 1e-3 for moment in first[4:6])


@pytest.mark.parametrize(
    ("element", "narrowest", "tolerance"),
    [
        ("f32", "f32", 1e-4),
        ("f32", "bf16", 4e-2),
        ("f64", "f64", 1e-9),
        ("f32", "f64", 1e-4),
        ("f32", "f8E4M3FN", 0.3),
        ("i32", "bf16", 0.0),
    ],
)
def test_tolerances(element: str, narrowest: str, tolerance: float) -> None:
    assert tolerance_of(element, narrowest) == tolerance


@pytest.mark.parametrize(
    ("elements", "narrowest"),
    [
        ({"f32", "i32"}, "f32"),
        ({"f32", "bf16", "f16"}, "bf16"),
        ({"f8E5M2", "bf16"}, "f8E5M2"),
        ({"complex<f32>"}, "f32"),
        ({"i1"}, "f64"),
    ],
)
def test_narrowest(elements: set[str], narrowest: str) -> None:
    assert narrowest_float(elements) == narrowest


def test_whole_numbers_are_equal_or_wrong() -> None:
    runs = Runs([[np.array([1, 2])]], {})
    (error,) = result_errors(["i32[2]"], "f32", runs, runs, Runs([[np.array([1, 3])]], {}))
    assert error.wrong and error.allowed == 0.0


# Element type, what a result is, what it is found to be, whether that is right.
WHOLE = [
    ("i1", np.array([True, False]), np.array([True, False]), True),
    ("i1", np.array([True, False]), np.array([False, False]), False),
    ("ui8", np.array([1, 255], np.uint8), np.array([1, 255], np.uint8), True),
    ("ui8", np.array([1, 255], np.uint8), np.array([2, 255], np.uint8), False),
    ("ui8", np.array([0], np.uint8), np.array([128], np.uint8), False),
    ("i8", np.array([-128], np.int8), np.array([127], np.int8), False),
    ("i8", np.array([-128], np.int8), np.array([-128], np.int8), True),
    ("i64", np.array([2**62]), np.array([2**62 + 1]), False),
    ("ui64", np.array([2**64 - 1], np.uint64), np.array([0], np.uint64), False),
    ("i32", np.zeros(0, np.int32), np.zeros(0, np.int32), True),
]


@pytest.mark.parametrize(("element", "expected", "found", "right"), WHOLE)
def test_truth_values_and_whole_numbers_of_every_width(
    element: str, expected: np.ndarray, found: np.ndarray, right: bool
) -> None:
    runs = Runs([[expected]], {})
    (error,) = result_errors([f"{element}[2]"], "f32", runs, runs, Runs([[found]], {}))
    assert error.wrong is not right


PLAIN = "func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> { return %a : tensor<4xf32> }"
CALLBACK = """
func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {{
  %0 = stablehlo.custom_call @{target}(%a) {{backend_config = "94034567"}} : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}}
"""


@pytest.mark.parametrize("target", ["xla_ffi_python_cpu_callback", "xla_python_cpu_callback", "CallbackXla"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_callback_in_either_program_is_not_called(target: str, which: int) -> None:
    texts = [PLAIN.encode(), PLAIN.encode()]
    texts[which] = CALLBACK.format(target=target).encode()
    with pytest.raises(ValueError, match="calls back into Python"):
        compare_here(*texts, 1, 0, "stablehlo", 60.0)


def test_what_rounding_decides_is_not_judged() -> None:
    """The sign of a number that rounding makes positive or negative says nothing about a partition."""
    one, other = Runs([[np.array([1.0], "f4")]], {}), Runs([[np.array([-1.0], "f4")]], {})
    (error,) = result_errors(["f32[1]"], "f32", one, other, other)
    assert not error.wrong and error.looks == ()


def test_shared_state_is_shaken_alike() -> None:
    state, flags = np.full(4, 3.0, "f4"), np.array([True])
    (one, flag), (other, _) = shake([state, flags], "bf16", 0), shake([state, flags], "bf16", 0)
    assert np.array_equal(one, other) and not np.array_equal(one, state)
    assert relative_error(state, one) <= 2.0**-7 and flag is flags


class Loaded:
    """Stands for a compiled program: so many GiB, so many operations."""

    def __init__(self, gibibytes: int, flops: float) -> None:
        self.argument_size_in_bytes, self.output_size_in_bytes, self.temp_size_in_bytes = gibibytes << 30, 0, 0
        self.flops = flops

    def get_compiled_memory_stats(self) -> Loaded:
        return self

    def cost_analysis(self) -> dict[str, float]:
        return {"flops": self.flops}


@pytest.mark.parametrize(
    ("program", "said"),
    [(Loaded(1 << 20, 1.0), "takes 8388608.0 GiB"), (Loaded(0, 1e15), "takes 1.6e\\+16 operations")],
)
def test_too_large_to_run(program: Loaded, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        refuse_large([(program, 8)], 600.0)
    refuse_large([(Loaded(0, 1.0), 8)], 600.0)


def result(index: int, error: float) -> ResultError:
    return ResultError(index, "f32[8]", "value", error, 1e-4)


# name, errors of each result with the first seed and with the second, results that are called wrong
SEEDS: list[tuple[str, list[float], list[float] | Failure, list[int]]] = [
    ("all right", [1e-6, 1e-6], Failure("must not be asked"), []),
    ("an accident of the inputs", [1e-2, 1e-6], [1e-6, 1e-2], []),
    ("wrong on all inputs", [1e-2, 1e-6], [1e-2, 1e-6], [0]),
    ("the second run fails", [1e-2, 1e-6], Failure("out of memory"), [0]),
]


@pytest.mark.parametrize(("first", "second", "wrong"), [s[1:] for s in SEEDS], ids=[s[0] for s in SEEDS])
def test_what_differs_is_looked_at_again_on_other_inputs(
    first: list[float], second: list[float] | Failure, wrong: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def once(original: bytes, partitioned: bytes, devices: int, seed: int, *rest: Any) -> list[ResultError] | Failure:
        asked.append(seed)
        errors = first if len(asked) == 1 else second
        return errors if isinstance(errors, Failure) else [result(k, error) for k, error in enumerate(errors)]

    monkeypatch.setattr(numbers, "compare_once", once)
    errors = numbers.compare_numbers(b"", b"", 8, seed=5)
    assert not isinstance(errors, Failure)
    assert [e.index for e in errors if e.wrong] == wrong
    assert asked == ([5, 6] if max(first) > 1e-4 else [5])
