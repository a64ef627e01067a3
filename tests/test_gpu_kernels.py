"""What kernels take on a GPU, by hand: which work XLA:GPU does in one, and how tiles, functions and look-ups count."""

from __future__ import annotations

from dataclasses import replace
from math import hypot
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import arg, evaluator_of, source_of, source_of_text
from ragged_programs import program as ragged

from toast_cli.hardware import find_preset
from toast_cli.price.cost import shared_out
from toast_cli.price.gpu_libraries import copied_operands, f32_part, terms_of_whole_images
from toast_cli.price.kernel import arithmetic
from toast_cli.price.profiles import find_profile
from toast_cli.program.ops import CONVOLUTION

H100 = find_preset("H100").chip
MIB, START = 2**20, 1.2e-6
MEMORY, VECTOR, MATRIX = 3.35e12 * 0.88, 67e12 * 0.6, 494.5e12 * 0.75 * 0.82  # attained bytes and FLOP/s
SQUARE = arg(1024, 1024)
# 64 tiles of 128 x 128, two multiprocessors of 132 for each.
PRODUCT = hypot(2 * 1024**3 * (128 * 128 / 2) * 132 / 1024**2 / MATRIX, 12 * MIB / MEMORY) + START
BF16 = jnp.bfloat16


def activated(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def gated(x: Any, w: Any, g: Any) -> Any:
    return g * x @ w


# name, function, arguments, seconds on one H100
SECONDS: list[tuple[str, Any, tuple[Any, ...], float]] = [
    ("a product and its function are two kernels", activated, (SQUARE,) * 2,
     PRODUCT + max(8 * MIB / MEMORY, 50 * MIB / VECTOR) + START),
    ("what scales a product is part of it", lambda x, w: x @ w * 2.0, (SQUARE,) * 2,
     PRODUCT),
    ("what is gated is written before the product", gated, (SQUARE,) * 3, PRODUCT + 12 * MIB / MEMORY + START),
    ("a softmax is one kernel", jax.nn.softmax, (SQUARE,), 8 * MIB / MEMORY + START),
    ("unless its rows are long: three that read them", jax.nn.softmax, (arg(64, 20_000),),
     4 * (4 * 64 * 20_000) / MEMORY + 3 * START),
    ("a mask makes it slow", lambda x: jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((1024, 1024), bool)), x, -1e9)),
     (SQUARE,), (130 + 18 + 4) * MIB / VECTOR + START),
    ("also one that is added to all heads",
     lambda x: jax.nn.softmax(x + jnp.where(jnp.tril(jnp.ones((256, 256), bool)), 0, -1e9)), (arg(16, 256, 256),),
     (130 + 18 + 4) * MIB / VECTOR + START),
    ("rows are looked up element by element", lambda x, i: jnp.take(x, i, 0, mode="clip"),
     (arg(64, 256, dtype=BF16), arg(4096, dtype=jnp.int32)), 50 * MIB / VECTOR + START),
    ("bf16 is added by comparing and swapping", lambda x, i, y: x.at[i].add(y),
     (arg(64, 256, dtype=BF16), arg(4096, dtype=jnp.int32), arg(4096, 256, dtype=BF16)), 650 * MIB / VECTOR + START),
]  # fmt: skip


@pytest.mark.parametrize(("run", "shapes", "seconds"), [row[1:] for row in SECONDS], ids=[row[0] for row in SECONDS])
def test_seconds_by_hand(run: Any, shapes: tuple[Any, ...], seconds: float) -> None:
    found = evaluator_of(source_of(run, *shapes), "h100-8").cost(()).compute_seconds
    assert found == pytest.approx(seconds, rel=0.02)


# rows, columns, depth; how much longer than large tiles on all of 132 multiprocessors until the end
TILES = [
    ((8192.0, 8192.0, 4096.0), 16 * 132 / 2048),  # 2,048 tiles of 256 x 128 in 16 rounds
    ((128.0, 128.0, 128.0), 132 * 32 * 32 / 0.2 / 128**2),  # 16 small tiles, of 16 multiprocessors alone
    ((256.0, 128.0, 132 * 512.0), 1.0),  # all share the depth of one tile
]


@pytest.mark.parametrize(("shape", "growth"), TILES)
def test_tiles_are_shared_out_among_multiprocessors(shape: tuple[float, float, float], growth: float) -> None:
    assert shared_out(132, 1.0, *shape) == pytest.approx(growth)


def test_products_of_ragged_groups_are_dense() -> None:
    program = evaluator_of(source_of_text(ragged("rows")), "h100-8").problem.program
    (op,) = [op for op in program.ops if op.name == "chlo.ragged_dot"]
    profile = find_profile(H100)
    dense = 8 * arithmetic(program, op, replace(profile, passes=profile.passes - {"masked-groups"}))
    assert arithmetic(program, op, profile) == dense == 8 * 2 * 64 * 16 * 32


# equation, shapes, positions of operands that are copied
COPIED = [
    ("bshd,bthd->bhst", ((2, 64, 4, 32), (2, 64, 4, 32)), (0, 1)),
    ("bhsd,bhtd->bhst", ((2, 4, 64, 32), (2, 4, 64, 32)), ()),
    ("bhd,bthd->bht", ((2, 4, 32), (2, 64, 4, 32)), ()),  # a decoding step
    ("sbd,tbd->bst", ((64, 4, 32), (64, 4, 32)), ()),  # one stride is enough
    ("bsd,de->bse", ((4, 64, 32), (32, 64)), ()),
]


@pytest.mark.parametrize(("equation", "shapes", "copied"), COPIED)
def test_batches_that_lie_apart_are_copied(equation: str, shapes: Any, copied: tuple[int, ...]) -> None:
    program = source_of(lambda x, y: jnp.einsum(equation, x, y), *(arg(*shape) for shape in shapes)).program
    (op,) = [op for op in program.ops if op.kind.contraction]
    assert copied_operands(program, op) == copied


def convolved(strides: int, groups: int = 1) -> Any:
    order = ("NHWC", "HWIO", "NHWC")
    return lambda x, w: lax.conv_general_dilated(
        x, w, (strides,) * 2, "SAME", dimension_numbers=order, feature_group_count=groups
    )


def gradient(run: Any) -> Any:
    return jax.grad(lambda w, x: (run(x, w) ** 2).sum())


def widened(x: Any, w: Any) -> Any:
    return lax.conv_transpose(x, w, (2, 2), "SAME")


IMAGES, KERNEL = arg(4, 16, 16, 32), arg(3, 3, 32, 64)
# function, arguments, terms in space of the last convolution, part of the vector unit's rate
CONVOLUTIONS: list[tuple[str, Any, tuple[Any, ...], int, float]] = [
    ("any", convolved(1), (IMAGES, KERNEL), 0, 0.0),
    ("of pixels", convolved(1), (IMAGES, arg(1, 1, 32, 64)), 0, 0.0),
    ("of patches", convolved(8), (IMAGES, arg(8, 8, 32, 64)), 0, 0.0),
    ("of three features", convolved(1), (arg(4, 16, 16, 3), arg(3, 3, 3, 64)), 0, 0.6),
    ("of groups", convolved(1, 32), (IMAGES, arg(3, 3, 1, 32)), 0, 0.075),
    ("a gradient that cuDNN knows", gradient(convolved(2)), (KERNEL, IMAGES), 0, 0.0),
    ("one that it does not, over an image of 31 x 31 with gaps", gradient(widened), (KERNEL, IMAGES), 31 * 31, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("run", "shapes", "terms", "part"), [r[1:] for r in CONVOLUTIONS], ids=[r[0] for r in CONVOLUTIONS]
)
def test_convolutions_that_the_matrix_units_do_not_do(run: Any, shapes: Any, terms: int, part: float) -> None:
    program = source_of(run, *shapes).program
    op = [op for op in program.ops if op.name == CONVOLUTION][-1]
    assert (terms_of_whole_images(op), f32_part(program, op)) == (terms, part)
