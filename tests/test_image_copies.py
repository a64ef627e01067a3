"""Copies of images that convolutions read: of which arguments, in which tiles and type, and from when to when."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import arg, case_of, evaluator_of, source_of

from toast_cli.compiler.convolutions import ImageCopy

LAST, FIRST = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")


def patches(x: Any, w: Any, order: tuple[str, str, str] = LAST) -> Any:
    return lax.conv_general_dilated(x, w, (16, 16), "VALID", dimension_numbers=order)


def trained(x: Any, w: Any) -> Any:
    return jax.grad(lambda w: jnp.tanh(jnp.tanh(patches(x, w)).sum((1, 2)) @ w[0, 0].T).sum())(w)


def copies(fn: Any, *shapes: Any) -> dict[int, ImageCopy]:
    return evaluator_of(source_of(fn, *shapes), "v5e-16").items.compilation.copied_images


NORMAL: Any = lambda x, w: patches((x - 1.0) * 2.0, w)  # noqa: E731
TYPED: Any = lambda x, w: patches(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))  # noqa: E731
TURNED: Any = lambda x, w: patches(x.transpose(0, 2, 3, 1), w)  # noqa: E731
SINGLY: Any = lambda x, w: jax.vmap(lambda one: patches(one[None], w, FIRST))(x)  # noqa: E731
IMAGES, KERNEL = arg(128, 64, 64, 3), arg(16, 16, 3, 768)
PLANES, TURNED_KERNEL = arg(128, 3, 64, 64), arg(768, 3, 16, 16)


@pytest.mark.parametrize(
    ("what", "fn", "shapes", "part", "dims"),
    [
        ("f32 is multiplied in bf16", patches, (IMAGES, KERNEL), 0.5, (0, 3)),
        ("elementwise work before", NORMAL, (IMAGES, KERNEL), 0.5, (0, 3)),
        ("a conversion before", TYPED, (IMAGES, KERNEL), 0.5, (0, 3)),
        ("features first, turned", TURNED, (PLANES, KERNEL), 0.5, (0, 1)),
        ("one image after the other, by vmap", SINGLY, (PLANES, TURNED_KERNEL), 0.5, (0, 1)),
        ("bytes are widened", TYPED, (arg(128, 64, 64, 3, dtype=jnp.uint8), KERNEL), 2.0, (0, 3)),
    ],
)
def test_what_convolutions_read_of_an_argument(
    what: str, fn: Any, shapes: tuple[Any, ...], part: float, dims: tuple[int, ...]
) -> None:
    ((copy),) = copies(fn, *shapes).values()
    assert (copy.part, copy.dims) == (part, dims), what


def test_what_is_computed_first_is_no_argument() -> None:
    assert not copies(lambda x, w: patches(jnp.sort(x), w), IMAGES, KERNEL)


def test_it_is_kept_for_the_kernels_gradient() -> None:
    case = case_of(trained, IMAGES, KERNEL, mesh="v5e-16")
    convolutions = [n for n, op in enumerate(case.program.ops) if op.kind.convolution]
    ((first, last),) = [copy.interval for copy in case.evaluator.items.compilation.copied_images.values()]
    assert len(convolutions) == 2
    times = case.evaluator.items.lives.times
    assert (first, last) == (times[convolutions[0]], times[convolutions[1]])


def test_three_colours_are_four_rows_and_eight_images_fill_the_lanes() -> None:
    """64 x 64 x 4 x 128 elements of two bytes, where a device has 64 x 64 x 3 of each of its images. On v3 nothing of
    it fits into on-chip memory."""
    case = case_of(trained, IMAGES, KERNEL, mesh="v3-32")
    plan = (case.shard("x.0", "data"), case.shard("x.0", "model"))
    image = case.program.ops[0].results[0]
    found = [alive for alive in case.evaluator.alive_at_peak(plan)[1] if alive.value == image]
    assert {alive.role: alive.bytes for alive in found}["temporary"] == 64 * 64 * 4 * 128 * 2


def test_what_lies_as_convolutions_want_is_not_copied() -> None:
    case = case_of(lambda x, w: lax.conv(x, w, (1, 1), "SAME"), arg(128, 128, 64, 64), arg(8, 128, 3, 3), mesh="v5e-16")
    plan = (case.shard("x.0", "data"), case.shard("x.0", "model"))
    roles = case.evaluator.memory_by(plan, lambda value, role: f"{value} {role}")
    assert f"{case.program.ops[0].results[0]} temporary" not in roles
