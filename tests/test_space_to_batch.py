"""What is kept for convolutions of few images, on programs small enough to count by hand."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax
from programs import arg, case_of, program_of

from toast_cli.hardware import find_preset
from toast_cli.price.convolutions import PASSES, Images, space_to_batch
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.fusion import materialised
from toast_cli.price.profiles import find_profile

TPU, GPU = (find_profile(find_preset(chip).chip) for chip in ("v4", "H100"))
TILE = TPU.memory_tile
SHAPE = (4, 32, 64, 128)


def convolved(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def found(layer: Any, *more: Any) -> list[Images]:
    """What is known of the stored values between two convolutions with `layer` in between."""

    def run(x: Any, v: Any, w: Any, *more: Any) -> Any:
        return convolved(layer(convolved(x, v), *more), w)

    weights = arg(3, 3, 128, 128, dtype=jnp.bfloat16)
    program = program_of(run, arg(*SHAPE, dtype=jnp.bfloat16), weights, weights, *more)
    stored = materialised(program, (False,) * len(program.values), TPU)[0]
    returned = {result.value for result in program.results}
    few = space_to_batch(program, stored, TPU)
    return [each for value, each in enumerate(few) if each and stored[value] and value not in returned]


def grouped(y: Any) -> Any:
    wide = y.astype(jnp.float32).reshape(4, 32, 64, 32, 4)
    return (wide - wide.mean((1, 2, 4), keepdims=True)).reshape(SHAPE).astype(y.dtype)


# What is between two convolutions, and the forms in which the first one's result is kept with few images, and with one
FORMS = [
    (lambda y: y, 2, 2),  # and with what windows reach
    (jnp.tanh, 2, 2),  # the activation is what the first one writes
    (grouped, 2 * 3 + 2, 3),  # f32 at three steps; the activation twice
    (lambda y: jnp.tanh(y - y.mean()), 3, 3),
]


@pytest.mark.parametrize(("layer", "forms", "single"), FORMS)
def test_forms_that_are_kept(layer: Any, forms: float, single: float) -> None:
    assert [(few.place, few.pieces, few.forms, few.single) for few in found(layer)] == [((0, 2), True, forms, single)]


def test_a_sum_with_what_is_in_one_piece_is_so_too() -> None:
    def layer(y: Any, z: Any) -> Any:
        total = y + z
        return jnp.tanh(total - total.mean())

    (total,) = found(layer, arg(*SHAPE, dtype=jnp.bfloat16))
    assert not total.pieces and total.forms == 2  # its activation is written to be cut


def test_a_norm_that_is_added_to_what_is_in_one_piece_is_written_at_its_steps() -> None:
    def layer(y: Any, z: Any) -> Any:
        wide = y.astype(jnp.float32)
        total = z + (wide - wide.mean((0, 1, 2))).astype(y.dtype)
        return jnp.tanh(total - total.mean())

    first, total = found(layer, arg(*SHAPE, dtype=jnp.bfloat16))
    assert first.pieces and first.forms == 2 * 2
    assert not total.pieces and total.forms == 2


def test_sums_over_features_keep_their_place() -> None:
    (first, *sums) = found(lambda y: y / y.sum(3, keepdims=True))
    assert first.forms == 3 and [each.place for each in sums] == [(0, 2)]


def test_parts_of_what_is_joined_share_what_is_read() -> None:
    def run(x: Any, v: Any, w: Any) -> Any:
        return convolved(jnp.tanh(jnp.concatenate([convolved(x, v), convolved(jnp.sin(x), v)], axis=3)), w)

    program = program_of(run, arg(4, 32, 64, 24), arg(3, 3, 24, 40), arg(3, 3, 80, 16))
    stored = materialised(program, (False,) * len(program.values), TPU)[0]
    few = space_to_batch(program, stored, TPU)
    parts = [few[v] for v, value in enumerate(program.values) if stored[v] and value.shape == (4, 32, 64, 40)]
    assert [part.forms for part in parts if part] == [3, 3]


def test_images_that_were_something_else_before() -> None:
    """A convolution of what was of another rank is priced as it is."""

    def run(x: Any, v: Any, w: Any) -> Any:
        y = x @ v
        return convolved(jnp.tanh(y - y.mean()).reshape(4, 32, 64, 128), w)

    program = program_of(run, arg(4, 2048, 24), arg(24, 128), arg(3, 3, 128, 16))
    stored = materialised(program, (False,) * len(program.values), TPU)[0]
    few = space_to_batch(program, stored, TPU)
    kept = [few[v] for v, value in enumerate(program.values) if stored[v] and value.shape == (4, 2048, 128)]
    assert kept == [None]


def test_when_images_are_few() -> None:
    few = Images((0, 2), pieces=True, forms=3.0, single=2.0)
    assert [few.applies((batch, 32, 64, 128)) for batch in (1, 7, 8)] == [True, True, False]
    assert [few.applies((4, 32, width, 128)) for width in (8, 12, 16)] == [False, False, True]
    assert few.kept((4, 32, 64, 128), (0, 3), TILE) == 3 * 32 * 32 * 9 * 128  # 64 wide: 8 pieces of 9
    assert few.kept((1, 32, 64, 64), (0, 3), TILE) == 2 * 8 * 32 * 9 * 128  # 64 features are padded
    whole = Images((0, 2), pieces=False, forms=2.0, single=2.0)
    assert whole.kept((6, 32, 64, 128), (0, 3), TILE) == 2 * 6 * 32 * 64 * 128  # space is in the rows: no 6 of 8


def test_chips_without_tiles_and_programs_without_convolutions_keep_one() -> None:
    program = program_of(lambda x, w: jnp.tanh(x @ w), arg(4, 64), arg(64, 64))
    assert space_to_batch(program, [True] * len(program.values), TPU) == [None] * len(program.values)
    assert space_to_batch(program, [True] * len(program.values), GPU) == [None] * len(program.values)


@pytest.mark.parametrize(("images", "passes"), [(128, 0.0), (32, PASSES)])
def test_cutting_few_images_takes_time(images: int, passes: float) -> None:
    """Of 32 images a device of 16 has 2: what the convolution reads and what it makes is read and written so many
    times, in bf16."""
    case = case_of(convolved, arg(images, 32, 32, 128), arg(3, 3, 128, 256), mesh="v4-32")
    plan = tuple(case.shard("x.0", axis) for axis in case.problem.mesh.names)
    without = Evaluator(case.problem, profile=TPU.without("space-to-batch"))
    devices, chip = case.problem.mesh.devices, case.problem.mesh.chip
    rate = chip.memory_bytes_per_second * TPU.attained.memory
    arrays = images * 32 * 32 * (128 + 256) * 2 / devices
    took = case.evaluator.cost(plan).compute_seconds - without.cost(plan).compute_seconds
    assert took == pytest.approx(2 * passes * arrays / rate, rel=1e-4)
