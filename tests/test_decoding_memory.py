"""Caches of decoding programs: how often their bytes are there. The figures are what XLA:TPU needs for the same
programs on v5e.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import arg, case_of, source_of

from toast_cli.hardware import load_spec
from toast_cli.pipeline import Request, partition

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
