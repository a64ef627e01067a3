"""Memory of decoding and convolutional programs. The figures are what XLA:TPU needs for the same programs."""

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
from toast_cli.hardware import load_spec
from toast_cli.pipeline import Request, partition
from toast_cli.plan.decisions import Plan, Shard
from toast_cli.price.profiles import find_profile

LAYERS, BATCH, LENGTH, HEADS, WIDTH = 4, 16, 64, 8, 128
FEATURES = HEADS * WIDTH
ORDERS = {"btkh": (BATCH, LENGTH, HEADS, WIDTH), "bkth": (BATCH, HEADS, LENGTH, WIDTH)}


def step(order: str, queries: int, x: Any, w: Any, cache: Any, at: Any, layer: Any = None) -> tuple[Any, Any]:
    """One layer: writes a position of its cache and attends to all of them. layer: which of a stacked cache."""
    new, where = (
        ((BATCH, 1, HEADS, WIDTH), (0, at, 0, 0)) if order == "btkh" else ((BATCH, HEADS, 1, WIDTH), (0, 0, at, 0))
    )
    key = (x @ w).reshape(new)
    if layer is None:
        own = cache = lax.dynamic_update_slice(cache, key, where)
    else:
        cache = lax.dynamic_update_slice(cache, key[None], (layer, *where))
        own = lax.dynamic_index_in_dim(cache, layer, 0, keepdims=False)
    query = jnp.stack([x.reshape(BATCH, HEADS, WIDTH)] * queries, 2) if queries > 1 else x.reshape(BATCH, HEADS, WIDTH)
    name = "bkgh" if queries > 1 else "bkh"
    scores = jnp.einsum(f"{name},{order}->{name[:-1]}t", query, own)
    read = jnp.einsum(f"{name[:-1]}t,{order}->{name}", jax.nn.softmax(scores), own)
    return x + (read.sum(2) if queries > 1 else read).reshape(BATCH, FEATURES), cache


def scanned_over(attend: Any, cache: Any, weights: Any, x: Any, at: Any) -> tuple[Any, Any]:
    return lax.scan(lambda x, layer: attend(x, *layer, at), x, (weights, cache))


def carried(attend: Any, cache: Any, weights: Any, x: Any, at: Any) -> tuple[Any, Any]:
    def layer(state: Any, of: Any) -> Any:
        (x, cache), (w, number) = state, of
        return attend(x, w, cache, at, number), None

    return lax.scan(layer, (x, cache), (weights, jnp.arange(LAYERS)))[0]


def for_all_positions(layers: Any, attend: Any, cache: Any, weights: Any, x: Any) -> Any:
    def token(at: Any, state: Any) -> Any:
        x, cache = state
        return layers(attend, cache, weights, x, at)

    return lax.fori_loop(0, LENGTH, token, (x, cache))


# cache carried through the layers or scanned over, for one token or in a loop over tokens, order of its dimensions,
# queries per head, how often its bytes are needed beside the (donated) argument
CASES = [
    (scanned_over, False, "btkh", 1, 1),  # the scan stacks a new one
    (scanned_over, False, "bkth", 4, 1),
    (scanned_over, True, "btkh", 1, 1),  # where it was, but copied before and after
    (scanned_over, True, "bkth", 1, 1),
    (scanned_over, True, "btkh", 4, 1),
    (scanned_over, True, "bkth", 4, 0),  # as arguments lie, and where it was
    (carried, True, "btkh", 1, 1),
    (carried, True, "bkth", 1, 1),
    (carried, True, "bkth", 4, 1),
]


@pytest.mark.parametrize(("layers", "loops", "order", "queries", "copies"), CASES)
def test_how_often_a_donated_cache_is_there(layers: Any, loops: bool, order: str, queries: int, copies: int) -> None:
    attend = partial(step, order, queries)
    run = partial(for_all_positions, layers, attend) if loops else lambda *given: layers(attend, *given, LENGTH // 2)
    cache = arg(LAYERS, *ORDERS[order])
    evaluator = case_of(run, cache, arg(LAYERS, FEATURES, FEATURES), arg(BATCH, FEATURES), donate=(0,)).evaluator
    cost = evaluator.exact_cost(())
    size = 4 * LAYERS * BATCH * LENGTH * FEATURES
    assert (cost.peak_bytes - cost.argument_bytes) / size == pytest.approx(copies, abs=0.4)


# form, order of the cache's dimensions, queries per head; how often its bytes are copied, and in other tiles
COPIES = [
    (carried, "btkh", 1, 2, 3),  # before and after the loop; and each layer's slice is laid out anew
    (scanned_over, "btkh", 1, 2, 2),  # each layer's slice, and the new stack into the argument's buffer
    (scanned_over, "bkth", 4, 1, 0),  # as arguments lie
]


@pytest.mark.parametrize(("machine", "cycles"), [("v5e-4", 21.3), ("v6e-4", 13.0)])
@pytest.mark.parametrize(("layers", "order", "queries", "copied", "turned"), COPIES)
def test_copies_of_a_cache_take_time(
    layers: Any, order: str, queries: int, copied: int, turned: int, machine: str, cycles: float
) -> None:
    """XLA:TPU takes so many cycles for every 4 KiB that it rearranges, and reads and writes the copies."""
    shapes = arg(LAYERS, *ORDERS[order]), arg(LAYERS, FEATURES, FEATURES), arg(BATCH, FEATURES)
    mesh = load_spec(machine).mesh()
    attend = partial(step, order, queries)
    case = case_of(lambda *given: layers(attend, *given, LENGTH // 2), *shapes, donate=(0,), mesh=mesh)
    seconds = sum(use.seconds for use in case.evaluator.kernels(()) if use.name == "copy")
    size = 4 * LAYERS * BATCH * LENGTH * FEATURES
    moved = 2 * copied * size / mesh.chip.memory_bytes_per_second
    assert seconds == pytest.approx(turned * size / 4096 * cycles / mesh.chip.clock_hertz + moved, rel=0.01)


def test_a_cache_with_few_heads_on_each_device_is_copied_slowly() -> None:
    """A device of 4 holds 2 of 8 heads: the new stack and each slice, as it is read and as it is written, lie in tiles
    of 2 rows, and in whole ones between; with a quarter of the batch all are whole. With a quarter of the positions
    the stack is copied in each trip, too."""

    def run(cache: Any, w: Any, x: Any) -> Any:
        return scanned_over(partial(step, "btkh", 4), cache, w, x, LENGTH // 2)

    shapes = arg(LAYERS, *ORDERS["btkh"]), arg(LAYERS, FEATURES, FEATURES), arg(BATCH, FEATURES)
    case = case_of(run, *shapes, donate=(0,), mesh="v5e-16")
    few, many, cut = (
        sum(use.seconds for use in case.evaluator.kernels((case.shard(at, "data"),)) if use.name == "copy")
        for at in ("cache.3", "cache.1", "cache.2")
    )
    assert few / many == pytest.approx((3 * 3.1 - 1) / 2, rel=0.01)
    assert cut / many == pytest.approx((2 + LAYERS) / 2, rel=0.01)


def test_a_cache_that_layers_reshape_is_copied_once() -> None:
    """The layers' heads and positions are no dimensions of the stack, which has the batch where they have positions."""

    def attend(x: Any, w: Any, cache: Any, at: Any) -> tuple[Any, Any]:
        x, own = step("btkh", 4, x, w, cache.reshape(ORDERS["btkh"]), at)
        return x, own.reshape(cache.shape)

    def run(cache: Any, w: Any, x: Any) -> Any:
        return scanned_over(attend, cache, w, x, LENGTH // 2)

    shapes = arg(LAYERS, BATCH, LENGTH, FEATURES), arg(LAYERS, FEATURES, FEATURES), arg(BATCH, FEATURES)
    case = case_of(run, *shapes, donate=(0,), mesh="v5e-16")
    (copy,) = [use for use in case.evaluator.kernels((case.shard("cache.1", "data"),)) if use.name == "copy"]
    chip, size = case.evaluator.problem.mesh.chip, 4 * LAYERS * BATCH * LENGTH * FEATURES // 4
    moved = 2 * size / chip.memory_bytes_per_second
    assert copy.seconds == pytest.approx(size / 4096 * 21.3 / chip.clock_hertz + moved, rel=0.01)


def unrolled(attend: Any, caches: Any, weights: Any, x: Any, at: Any) -> tuple[Any, Any]:
    new = []
    for layer, cache in enumerate(caches):
        x, cache = attend(x, weights[layer], cache, at)
        new.append(cache)
    return x, new


@pytest.mark.parametrize(("layers", "noted"), [(carried, True), (scanned_over, True), (unrolled, False)])
def test_a_note_on_caches_that_a_loop_copies(layers: Any, noted: bool) -> None:
    cache = arg(*ORDERS["btkh"])
    caches = [cache] * LAYERS if layers is unrolled else arg(LAYERS, *cache.shape)
    run = partial(layers, partial(step, "btkh", 1), at=LENGTH // 2)
    source = source_of(run, caches, arg(LAYERS, FEATURES, FEATURES), arg(BATCH, FEATURES), donate=(0,))
    content = source.module.operation.get_asm().encode()
    report = partition(Request("decode.mlir", "v6e-4", iterations=1, content=content)).report
    notes = [note for note in report.analysis.notes if note.startswith("XLA copies donated caches")]
    assert bool(notes) == noted, report.analysis.notes


def test_what_a_scan_reads_elsewhere_is_not_written_over() -> None:
    """The new stack takes over what is scanned over in a loop around, unless something else still reads that."""

    def run(reads: bool, stack: Any) -> Any:
        def outer(_: Any, stack: Any) -> Any:
            new = lax.scan(lambda c, x: (c, jnp.sin(x) * 2.0), 0.0, stack)[1]
            return new * stack if reads else new

        return lax.fori_loop(0, 3, outer, stack)

    alone, read = (
        case_of(partial(run, reads), arg(8, 64, 1024), donate=(0,)).evaluator.exact_cost(()).peak_bytes
        for reads in (False, True)
    )
    assert alone < 1.4 * 4 * 8 * 64 * 1024 < 1.9 * 4 * 8 * 64 * 1024 < read


# -- memory of convolutional programs under plans. The figures are what XLA:TPU needs for the same programs, asked as
# `calibrate_memory.py` does


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
