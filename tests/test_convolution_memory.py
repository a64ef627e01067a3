"""Memory of convolutional programs under plans. The figures are what XLA:TPU needs for the same programs, asked as
`calibrate_memory.py` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import Case, arg, case_of, evaluator_of, mesh_of, source_of

from benchmarks.corpus import spec_of
from toast_cli.plan.decisions import Plan, Shard
from toast_cli.price.profiles import find_profile

BF16 = jnp.bfloat16


def convolved(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w.astype(BF16), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def trained(layer: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A step of gradient descent on a chain of layers."""

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = layer(x, w)
        return (x.astype(jnp.float32) ** 2).mean()

    return lambda weights, x: jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))


def chain(activation: Callable[[Any], Any], batch: int, spec: str) -> tuple[Case, Plan]:
    """Six convolutions of 128 features, each of an activation; nothing is split."""
    step = trained(lambda x, w: x + convolved(activation(x), w))
    shapes = [arg(3, 3, 128, 128)] * 6, arg(batch, 128, 128, 128, dtype=BF16)
    return case_of(step, *shapes, donate=(0,), mesh=spec_of(spec).mesh()), ()


def group_norm(x: Any) -> Any:
    wide = x.astype(jnp.float32).reshape(*x.shape[:3], 32, -1)
    mean = wide.mean((1, 2, 4), keepdims=True)
    variance = ((wide - mean) ** 2).mean((1, 2, 4), keepdims=True)
    return ((wide - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape).astype(x.dtype)


def batch_norm(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    mean = wide.mean((0, 1, 2))
    return ((wide - mean) * lax.rsqrt(((wide - mean) ** 2).mean((0, 1, 2)) + 1e-5)).astype(x.dtype)


def few(norm: Callable[[Any], Any], batch: int, size: int, features: int, spec: str) -> tuple[Case, Plan]:
    """Six convolutions, each of a normed activation, of few images; nothing is split."""
    step = trained(lambda x, w: convolved(jax.nn.silu(norm(x)), w))
    shapes = [arg(3, 3, features, features)] * 6, arg(batch, size, size, features, dtype=BF16)
    return case_of(step, *shapes, donate=(0,), mesh=spec_of(spec).mesh()), ()


def normed(batch: int, spec: str) -> tuple[Case, Plan]:
    """Four blocks of two convolutions, each after a group norm in f32; nothing is split."""
    step = trained(
        lambda x, w: x + convolved(jax.nn.silu(group_norm(convolved(jax.nn.silu(group_norm(x)), w[0]))), w[1])
    )
    shapes = [[arg(3, 3, 256, 256)] * 2] * 4, arg(batch, 64, 64, 256, dtype=BF16)
    return case_of(step, *shapes, donate=(0,), mesh=spec_of(spec).mesh()), ()


def split(batch: int, spec: str) -> tuple[Case, Plan]:
    """Four blocks of two convolutions, 128 -> 256 -> 128; both kinds of features are split over all devices."""
    step = trained(lambda x, w: x + convolved(jax.nn.relu(convolved(x, w["up"])), w["down"]))
    weights = [{"up": arg(3, 3, 128, 256), "down": arg(3, 3, 256, 128)}] * 4
    case = case_of(step, weights, arg(batch, 64, 64, 128, dtype=BF16), donate=(0,), mesh=spec_of(spec).mesh())
    hidden = dict.fromkeys(case.group(f"weights[{block}]['up'].3") for block in range(4))
    (features,) = {case.group(f"weights[{block}]['up'].2") for block in range(4)}
    return case, tuple(Shard(group, axis) for group in (*hidden, features) for axis in (0, 1))


# A program and a plan, and what one device needs, MiB
NEEDED = [
    (partial(chain, jax.nn.silu, 16, "v5e-16"), 452),  # activations are computed again where their gradients need them
    (partial(chain, jax.nn.gelu, 16, "v5e-16"), 452),
    (partial(chain, jax.nn.silu, 8, "v4-8"), 164),
    (partial(normed, 32, "v5p-8"), 724),  # what a norm widens and splits into groups is kept as it was before
    (partial(normed, 32, "v6e-8"), 660),
    (partial(split, 16, "v5e-16"), 692),  # what is gathered keeps the batch in the lanes, 16 of 128
    (partial(split, 32, "v5e-16"), 698),
    (partial(few, group_norm, 4, 256, 128, "v5p-8"), 2857),  # pieces of space in the batch, and back for each norm
    (partial(few, group_norm, 6, 128, 256, "v5e-16"), 2232),
    (partial(few, group_norm, 1, 512, 128, "v5p-8"), 1188),  # one image is the same either way
    (partial(few, batch_norm, 2, 256, 256, "v5e-16"), 1157),  # a norm over all goes on in pieces
    (partial(few, batch_norm, 6, 128, 256, "v5p-8"), 958),
]


@pytest.mark.parametrize(("make", "mib"), NEEDED)
def test_what_convolutions_need(make: Callable[[], tuple[Case, Plan]], mib: float) -> None:
    case, plan = make()
    assert case.evaluator.exact_cost(plan).peak_bytes / 2**20 == pytest.approx(mib, rel=0.12)


@pytest.mark.parametrize(
    ("what", "shape", "kernel", "mib"),
    [
        ("8 images in 128 lanes, 3 features in 4 rows, of 2 bytes", (8, 224, 224, 3), (16, 16, 3, 64), 49),
        ("the program transposes them", (8, 3, 224, 224), (16, 16, 3, 64), 49),
        ("windows overlap", (8, 224, 224, 3), (7, 7, 3, 64), 49),
        ("128 features in the lanes, 8 images in the rows", (8, 32, 32, 128), (3, 3, 128, 64), 2),
        ("2 images are cut into 16 pieces of 29 columns", (2, 224, 224, 3), (7, 7, 3, 64), 6.34),
    ],
)
def test_an_argument_is_copied_for_convolutions(
    what: str, shape: tuple[int, ...], kernel: tuple[int, ...], mib: float
) -> None:
    def run(x: Any, w: Any) -> Any:
        x = x.transpose(0, 2, 3, 1) if x.shape[1] == 3 else x
        return lax.conv_general_dilated(x, w, (16, 16), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")).sum()

    source, mesh = source_of(run, arg(*shape), arg(*kernel)), mesh_of("v4-32")
    profile = find_profile(mesh.chip).without("memory-space-assignment")
    peaks = [
        evaluator_of(source, mesh, profile=one).exact_cost(()).peak_bytes / 2**20
        for one in (profile, profile.without("convolved-arguments"))
    ]
    assert peaks[0] - peaks[1] == pytest.approx(mib, rel=0.01), what


@pytest.mark.parametrize("convolved", [0, 1])
def test_an_argument_with_another_of_its_shape_is_copied_for_convolutions(convolved: int) -> None:
    def run(x: Any, y: Any, w: Any) -> Any:
        images = [one.transpose(0, 2, 3, 1) for one in (x, y)]
        of = ("NHWC", "HWIO", "NHWC")
        found = lax.conv_general_dilated(images[convolved], w, (16, 16), "VALID", dimension_numbers=of)
        return found.sum() + (images[0] + images[1]).sum()

    source, mesh = source_of(run, *[arg(8, 3, 2048, 2048)] * 2, arg(16, 16, 3, 64)), mesh_of("v4-32")
    profile = find_profile(mesh.chip)
    peaks = [
        evaluator_of(source, mesh, profile=one).exact_cost(()).peak_bytes
        for one in (profile, profile.without("convolved-arguments"))
    ]
    assert peaks[0] - peaks[1] == 4 * 128 * 2048 * 2048 * 2  # 3 features in 4 rows, 8 images in 128 lanes, 2 bytes
