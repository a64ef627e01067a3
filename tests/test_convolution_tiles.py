"""How convolutions fill the matrix unit, which of them swap their operands, and what that takes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import arg, case_of, program_of

from toast_cli.hardware import find_preset
from toast_cli.price.convolutions import PixelProducts, is_reversed, pixel_products
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.profiles import find_profile

TPU, GPU = (find_profile(find_preset(chip).chip) for chip in ("v5e", "h100"))
ORDER = ("NHWC", "HWIO", "NHWC")
WHOLE = ((1, 1, 1, 1), (1, 1, 1, 1))


def convolved(x: Any, w: Any, stride: int = 1, groups: int = 1) -> Any:
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=ORDER, feature_group_count=groups
    )  # fmt: skip


def widened(x: Any, w: Any) -> Any:
    return lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=ORDER)


def gradient(fn: Any, of: int) -> Any:
    """The gradient by the image or the kernel."""
    return jax.grad(lambda x, w: jnp.sum(jnp.tanh(fn(x, w))), argnums=of)


def products_of(images: int, given: int, made: int, kernel: int = 3) -> PixelProducts:
    """Of a convolution that makes features of those that are given."""
    return PixelProducts((images, 0), (made, 3), (given, 3), kernel * kernel, summed=False)


@pytest.mark.parametrize(
    ("what", "products", "growth"),
    [
        ("full tiles", products_of(16, 128, 256), 1.0),
        ("half of the lanes on either side", products_of(16, 64, 64), 4.0),
        ("192 features are 256", products_of(16, 192, 128), 4 / 3),
        ("three features at nine positions share a tile", products_of(16, 3, 128), 128 / 27),
        ("12 images are 16 rows", products_of(12, 128, 128), 4 / 3),
        ("of few images pieces of space fill the rows", products_of(2, 128, 128), 1.0),
        ("images may be in the lanes, and features in the rows", products_of(128, 128, 64), 1.0),
        ("a gradient: images fill tiles with space", PixelProducts((64, 3), (64, 3), (16, 0), 9, True), 4.0),
        ("of three features", PixelProducts((3, 3), (64, 3), (16, 0), 9, True), 8 / 3 * 2),
    ],
)  # fmt: skip
def test_growth(what: str, products: PixelProducts, growth: float) -> None:
    assert products.growth(*WHOLE) == pytest.approx(growth), what


def test_pieces_are_padded() -> None:
    assert products_of(128, 128, 128).growth((8, 1, 1, 1), (1, 1, 1, 2)) == 2.0  # 16 images, 64 features


@pytest.mark.parametrize(
    ("what", "products", "turned"),
    [
        ("three features have 16 images in the lanes, 64 features are there themselves", products_of(16, 3, 64), 1),
        ("back to three", products_of(16, 64, 3), 1),
        ("features on both sides", products_of(16, 64, 64), 0),
        ("128 images on both sides", products_of(128, 3, 64), 0),
    ],
)
def test_turned_pixels(what: str, products: PixelProducts, turned: int) -> None:
    assert products.turned(*WHOLE) == turned, what


@pytest.mark.parametrize(
    ("what", "fn", "shapes", "expected"),
    [
        ("a strided one", lambda x, w: convolved(x, w, 2), (arg(16, 32, 32, 8), arg(3, 3, 8, 24)),
         ((16, 0), (24, 3), (8, 3), 9, False)),
        ("its gradient by the kernel", gradient(lambda x, w: convolved(x, w, 2), 1),
         (arg(16, 32, 32, 8), arg(3, 3, 8, 24)), ((8, 3), (24, 3), (16, 0), 256, True)),
        ("in groups", lambda x, w: convolved(x, w, 1, 4), (arg(16, 32, 32, 8), arg(3, 3, 2, 24)), None),
        ("of one dimension", lambda x, w: lax.conv(x, w, (1,), "SAME"), (arg(16, 8, 32), arg(24, 8, 3)), None),
    ],
)  # fmt: skip
def test_products_of_convolutions(what: str, fn: Any, shapes: tuple[Any, ...], expected: Any) -> None:
    program = program_of(fn, *shapes)
    op = [op for op in program.ops if op.kind.convolution][-1]
    found = pixel_products(program, op, TPU)
    told = found and (found.rows, found.columns, found.depth, found.positions, found.summed)
    assert told == expected, what


def test_other_compilers_have_other_tiles() -> None:
    program = program_of(convolved, arg(16, 32, 32, 8), arg(3, 3, 8, 24))
    (op,) = [op for op in program.ops if op.kind.convolution]
    assert pixel_products(program, op, GPU) is None
    assert pixel_products(program, op, TPU.without("convolution-tiles")) is None


@pytest.mark.parametrize(
    ("what", "fn", "swapped"),
    [
        ("a convolution", convolved, [False]),
        ("its gradient by the image", gradient(convolved, 0), [False, False]),
        ("its gradient by the kernel, which slides an array as long as the image", gradient(convolved, 1), [False] * 2),
        ("a strided one's", gradient(lambda x, w: convolved(x, w, 2), 1), [False] * 2),
        ("a transposed one", widened, [False]),
        ("its gradient by the image", gradient(widened, 0), [False, False]),
        ("its gradient by the kernel, which slides what is four times the image", gradient(widened, 1), [False, True]),
    ],
)
def test_what_is_longer_than_the_image_is_reversed(what: str, fn: Any, swapped: list[bool]) -> None:
    program = program_of(fn, arg(16, 32, 32, 64), arg(3, 3, 64, 32))
    convolutions = [op for op in program.ops if op.kind.convolution]
    assert [is_reversed(op, TPU) for op in convolutions] == swapped, what
    assert not any(is_reversed(op, GPU) for op in convolutions)


def test_reversing_reads_and_writes_what_a_device_has_of_it() -> None:
    """Of 128 images a device has 8, which fill tiles of features."""
    case = case_of(gradient(widened, 1), arg(128, 32, 32, 64), arg(3, 3, 64, 128), mesh="v5e-16")
    plan = (case.shard("x.0", "data"), case.shard("x.0", "model"))
    without = Evaluator(case.problem, profile=TPU.without("swapped-convolutions"))
    rate = find_preset("v5e").chip.memory_bytes_per_second * TPU.attained.memory
    moved = 8 * 64 * 64 * 128 * 2 * (1 + TPU.attained.narrow_write)
    took = case.evaluator.cost(plan).compute_seconds - without.cost(plan).compute_seconds
    assert took == pytest.approx(moved / rate, rel=1e-4)
