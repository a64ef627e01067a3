"""Padding of arrays to a TPU's memory tiles, by hand, and which dimensions products leave innermost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from programs import PLAIN, Case, arg, case_of, evaluator_of, program_of, round_mesh, source_of, source_of_text

from toast_cli.hardware import find_preset
from toast_cli.price.buffers import PutTogether
from toast_cli.price.fusion import materialised
from toast_cli.price.layouts import (
    Tiling,
    default_layouts,
    dims_of_rows,
    pieces_are_copied,
    slowdown,
    tile_growth,
    tilings,
)
from toast_cli.price.liveness import op_ticks
from toast_cli.price.profiles import find_profile

TILE = (8, 128)

# shape, dimensions that may be innermost, expected growth
GROWTHS: list[tuple[tuple[float, ...], tuple[int, ...], float]] = [
    ((256, 512), (0, 1), 1.0),
    ((256, 64), (0, 1), 1.0),  # the 256 are the lanes
    ((121, 121), (0, 1), 128 * 128 / 121**2),  # 121 lanes are 128, 121 rows are 128 = 16 x 8
    ((197, 197), (0, 1), 256 * 200 / 197**2),
    ((32, 32, 32, 64), (0, 3), 2.0),  # 64 lanes are 128
    ((128, 112, 112, 32), (0, 3), 1.0),
    ((16, 2, 128), (0, 1, 2), 1.0),
    ((16, 3, 100), (2, 1), 4 / 3 * 128 / 100),  # a tile of 4 rows
    ((1000,), (0,), 1024 / 1000),
    ((), (), 1.0),
]


@pytest.mark.parametrize(("shape", "dims", "expected"), GROWTHS)
def test_growth(shape: tuple[float, ...], dims: tuple[int, ...], expected: float) -> None:
    assert tile_growth(shape, dims, TILE) == pytest.approx(expected)


# local shape, bits of an element, time over that in tiles of 8 rows
SLOWDOWNS: list[tuple[tuple[int, ...], int, float]] = [
    ((64, 2048, 8, 128), 16, 1.0),
    ((64, 2048, 4, 128), 16, 1.55),
    ((64, 2048, 3, 128), 16, 1.0),  # 3 rows would be padded to 4, so that the 2,048 are the rows
    ((64, 2048, 2, 128), 16, 2.7),
    ((64, 2048, 1, 128), 16, 1.0),  # one row does not fill a word, so that the 2,048 are the rows
    ((64, 2048, 1, 128), 32, 5.3),
    ((64, 2048, 4, 128), 32, 2.0),
    ((64, 2048, 2, 128), 8, 1.0),
    ((64, 2048, 4, 128), 8, 1.7),
    ((2, 64, 100, 128), 32, 1.0),
]


@pytest.mark.parametrize(("shape", "bits", "expected"), SLOWDOWNS)
def test_tiles_of_few_rows_are_slow(shape: tuple[int, ...], bits: int, expected: float) -> None:
    assert slowdown(shape, TILE, bits) == expected


def cached(cache: Any, new: Any, table: Any) -> Any:
    """Each layer writes a position of its cache, as a scan over layers does; the product's result lies in any tiles."""

    def layer(carry: Any, layer: tuple[Any, Any]) -> Any:
        mine = lax.dynamic_update_slice(layer[0], layer[1], (0, 5, 0, 0))
        return carry + jnp.sum(jnp.einsum("bthd,dk->bthk", mine, table)), mine

    return lax.scan(layer, 0.0, (cache, new))


def test_a_cache_lies_in_the_tiles_of_its_argument() -> None:
    program = program_of(cached, arg(3, 16, 64, 8, 128), arg(3, 16, 1, 8, 128), arg(128, 256), donate=(0,))
    shapes = {program.values[value].shape for value in default_layouts(program, TILE)}
    assert {(3, 16, 64, 8, 128), (16, 64, 8, 128)} <= shapes  # as stacked and in a layer
    assert (16, 64, 8, 256) not in shapes


def test_a_cache_with_few_heads_on_each_device_is_copied_slowly() -> None:
    """Of 8 heads, a device of 4 holds 2: tiles of 2 rows take 2.7 times as long as all heads of a quarter of the
    batch."""
    cache = arg(64, 4096, 8, 128, dtype=jnp.bfloat16)
    case = case_of(lambda cache: cache + 1, cache, donate=(0,), mesh="v5e-16")
    few, many = (case.evaluator.cost((case.shard(place, "data"),)).compute_seconds for place in ("cache.2", "cache.0"))
    assert few / many == pytest.approx(2.7, rel=0.01)


def test_a_transposed_cache_is_not_slow_where_a_device_has_all_heads() -> None:
    """The sharding of what is computed is not that of the argument's dimensions in this order."""
    cache = arg(64, 4096, 8, 128, dtype=jnp.bfloat16)
    case = case_of(lambda cache: jnp.transpose(cache, (0, 2, 1, 3)) + 1, cache, mesh="v5e-16")
    batch, length = (case.evaluator.cost((case.shard(at, "data"),)).compute_seconds for at in ("cache.0", "cache.1"))
    assert length == batch


def test_what_is_gathered_keeps_its_tiles() -> None:
    part, whole = (32, 64, 64, 16), (32, 64, 64, 128)
    assert (
        tile_growth(part, (0, 3), TILE) == tile_growth(whole, (0, 3), TILE, like=part) == 128 / 32
    )  # the batch is in the lanes
    assert (
        tile_growth(whole, (0, 3), TILE) == tile_growth(whole, (0, 3), TILE, like=(32, 64, 64, 32)) == 1.0
    )  # either way


@given(st.lists(st.integers(1, 600), min_size=1, max_size=4))
def test_nothing_shrinks_and_more_choice_wastes_less(shape: list[int]) -> None:
    dims = tuple(range(len(shape)))
    free = tile_growth(tuple(shape), dims, TILE)
    assert 1.0 <= free <= 128
    if len(dims) > 2:
        assert free <= tile_growth(tuple(shape), dims[1:], TILE)


def tiled(run: Any, *shapes: Any) -> dict[tuple[int, ...], list[Tiling]]:
    program = program_of(run, *shapes)
    found: dict[tuple[int, ...], list[Tiling]] = {}
    for value, tiling in zip(program.values, tilings(program, TILE), strict=True):
        found.setdefault(value.shape, []).append(tiling)
    return found


def test_dimensions_that_number_matrices_stay_outside() -> None:
    q, k = arg(4, 8, 48, 40), arg(4, 8, 56, 40)
    found = tiled(lambda q, k: jnp.sin(jnp.einsum("bhsd,bhtd->bhst", q, k)) * 2.0, q, k)
    scores = found[4, 8, 48, 56]
    assert {t.dims for t in scores if t.dims != (0, 1, 2, 3)} == {
        (2, 3)
    }  # the product's and what is elementwise after it
    assert sum(t.dims == (2, 3) for t in scores) >= 3


def test_products_with_vectors_leave_every_dimension_free() -> None:
    """XLA:TPU multiplies element by element: of 4,096 products of 32 pairs of vectors of 3, or of each with a number,
    no dimension has to be outside of the tiles. Products with matrices see to the tiles of what they read."""
    x, y, w, m = arg(4096, 32, 3), arg(4096, 32, 3), arg(4096, 32), arg(4096, 3, 5)
    assert {t.dims for t in tiled(lambda x, y: jnp.einsum("eui,eui->eu", jnp.sin(x), y), x, y)[4096, 32]} == {(0, 1)}
    found = tiled(lambda x, w, m: jnp.einsum("eui,eij->euj", jnp.einsum("eui,eu->eui", jnp.sin(x), w), m), x, w, m)
    assert {t.dims for t in found[4096, 32, 3]} == {(1, 2)}


def test_spatial_dimensions_of_a_convolution_stay_outside() -> None:
    def run(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + 1.0

    found = tiled(run, arg(16, 32, 32, 24), arg(3, 3, 24, 40))
    assert Tiling((0, 3)) in found[16, 32, 32, 40]


def test_what_sums_over_features_leave_has_the_batch_in_the_lanes() -> None:
    def run(x: Any, w: Any) -> Any:
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.sqrt((y * y).sum(3))

    assert {t.dims for t in tiled(run, arg(16, 32, 32, 24), arg(3, 3, 24, 40))[16, 32, 32]} == {(0,)}


def test_channels_split_into_groups_are_not_innermost() -> None:
    def run(x: Any, w: Any) -> Any:
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (y.reshape(16, 32, 32, 8, 16) * 2.0).sum((1, 2, 4))

    (grouped, *_) = [t for t in tiled(run, arg(16, 32, 32, 24), arg(3, 3, 24, 128))[16, 32, 32, 8, 16] if not t.dims]
    assert grouped.fixed == pytest.approx(128 / 16)  # lanes are the 16 of the batch


# Shape of an f32 argument and of the result, and what XLA:TPU needs for both on v5e, MiB
ARGUMENTS = [
    ((4096, 4096, 3), 384.0),
    ((64, 176, 176, 3), 66.0),
    ((64, 3, 224, 224), 84.0),
    ((512, 17, 17, 100), 117.4),
    ((100, 60, 5000), 243.8),
    ((1000, 1000, 50), 390.6),
]


@pytest.mark.parametrize(("shape", "mib"), ARGUMENTS)
def test_arguments_are_in_the_tiles_that_waste_least(shape: tuple[int, ...], mib: float) -> None:
    cost = evaluator_of(source_of(lambda x: jnp.sin(x) * 2.0, arg(*shape)), "v5e-16").exact_cost(())
    assert cost.peak_bytes / 2**20 == pytest.approx(mib, rel=0.001)


def test_what_is_alive_is_padded_on_chips_with_tiles() -> None:
    def run(q: Any, k: Any) -> Any:
        return jnp.sort(jnp.einsum("bhsd,bhtd->bhst", q, k), axis=1).sum(1)

    mesh = round_mesh(data=2)
    tiled = replace(PLAIN, memory_tile=TILE, passes=PLAIN.passes | {"tiling", "tile-dimensions"})
    shapes = arg(4, 8, 200, 64), arg(4, 8, 200, 64)
    plain = evaluator_of(source_of(run, *shapes), mesh).exact_cost(())
    padded = evaluator_of(source_of(run, *shapes), mesh, profile=tiled).exact_cost(())
    scores, arguments = 4 * 8 * 200 * 200 * 4, 2 * 4 * 8 * 200 * 64 * 4
    assert padded.argument_bytes == plain.argument_bytes == arguments
    assert padded.peak_bytes - plain.peak_bytes == pytest.approx((2 * scores + arguments) * (256 / 200 - 1), rel=0.01)


def test_a_product_does_not_evaluate_polynomials_as_it_reads() -> None:
    def gelu(x: Any, v: Any, w: Any) -> Any:
        h = x @ v
        return (h * lax.erf(h)) @ w

    def silu(x: Any, v: Any, w: Any) -> Any:
        h = x @ v
        return (h * jnp.tanh(h)) @ w

    def written(run: Any) -> int:
        program = program_of(run, arg(64, 32), arg(32, 128), arg(128, 32))
        stored = materialised(program, (False,) * len(program.values), PLAIN)[0]
        return sum(kept and value.shape == (64, 128) for kept, value in zip(stored, program.values, strict=True))

    assert (written(gelu), written(silu)) == (2, 1)


def test_what_is_widened_and_split_is_written_before() -> None:
    def run(x: Any, w: Any) -> Any:
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        wide = y.astype(jnp.float32).reshape(4, 8, 8, 4, 16)
        return wide - wide.mean((1, 2, 4), keepdims=True)

    program = program_of(run, arg(4, 8, 8, 32, dtype=jnp.bfloat16), arg(3, 3, 32, 64, dtype=jnp.bfloat16))
    stored = materialised(program, (False,) * len(program.values), PLAIN)[0]
    made = [str(v) for n, v in enumerate(program.values) if stored[n] and v.elements == 4 * 8 * 8 * 64]
    assert made == ["bf16[4,8,8,64]", "f32[4,8,8,4,16]"]  # the convolution's, and the result


def test_convolutions_take_exponentials_as_they_read() -> None:
    def run(x: Any, v: Any, w: Any) -> Any:
        y = jnp.exp(x)
        return tuple(lax.conv_general_dilated(y, k, (1, 1), "SAME") for k in (v, w))

    program = program_of(run, arg(4, 8, 32, 32), arg(16, 8, 3, 3), arg(24, 8, 3, 3))
    stored = materialised(program, (False,) * len(program.values), PLAIN)[0]
    arguments = {argument.value for argument in program.arguments}
    written = [v.shape for n, v in enumerate(program.values) if stored[n] and n not in arguments]
    assert (4, 8, 32, 32) not in written


@pytest.mark.parametrize(("function", "expected"), [(jnp.exp, True), (jnp.tanh, True), (jnp.negative, False)])
def test_two_products_do_not_both_take_exponentials(function: Any, expected: bool) -> None:
    def run(x: Any, v: Any, w: Any) -> Any:
        y = function(x)
        return y @ v, y @ w

    program = program_of(run, arg(64, 128), arg(128, 32), arg(128, 16))
    stored = materialised(program, (False,) * len(program.values), PLAIN)[0]
    arguments = {argument.value for argument in program.arguments}
    written = [v.shape for n, v in enumerate(program.values) if stored[n] and n not in arguments]
    assert ((64, 128) in written) == expected


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_a_product_waits_for_a_loop_that_sets_more_memory_free(saved: bool, turned: bool) -> None:
    """Also where it is transposed before, and that is written since several read it (a gradient and its norm)."""

    def run(x: Any, w: Any) -> Any:
        first, second = (jnp.sort(x @ w), jnp.sort(jnp.tanh(x @ w))) if saved else (w, w)
        gradient = x.T @ jnp.sort(jnp.cos(x))
        gradient = gradient.T if turned else gradient
        total = lax.fori_loop(0, 5, lambda _, c: jnp.sin(c @ first @ second), x)
        return gradient + total.T @ total, total

    program = program_of(run, arg(64, 64), arg(64, 64))
    stored = materialised(program, (False,) * len(program.values), PLAIN)[0]
    for op in program.ops:
        if op.name == "stablehlo.transpose":
            stored[op.results[0]] = turned
    times = op_ticks(program, stored, (False,) * len(program.values), PLAIN)
    (loop,) = program.loops
    products = [n for n, op in enumerate(program.ops) if op.name == "stablehlo.dot_general" and op.loop < 0]
    gradient = products[-2]  # the last one is behind the loop
    assert gradient < loop.first
    assert (times[gradient] >= 2 * loop.last) is saved


def test_updates_of_two_donated_arrays_wait_for_each_other_and_for_nothing_else() -> None:
    """Both read the array that the first of them, by its number, is written over (optax's MultiSteps)."""

    def run(weight: Any, total: Any, step: Any, x: Any) -> Any:
        total = total + x.T @ jnp.sin(x)
        kept = jnp.where(step == 3, 0.0, 1.0) * total
        return weight - 0.1 * total, kept, jnp.cos(x @ x.T)

    program = program_of(run, arg(64, 64), arg(64, 64), arg(dtype=jnp.int32), arg(32, 64), donate=(0, 1))
    stored = materialised(program, (False,) * len(program.values), PLAIN)[0]
    times = op_ticks(program, stored, (False,) * len(program.values), PLAIN)
    weight, kept, last = (program.producer[result.value] for result in program.results)
    product = next(n for n, op in enumerate(program.ops) if op.name == "stablehlo.dot_general")
    assert kept < weight and 2 * product <= times[weight] < times[kept] < 2 * kept < times[last]


def segment_sums(x: Any, senders: Any, receivers: Any) -> Any:
    """What is gathered and scattered, in rows of `x`'s width."""
    return jnp.zeros_like(x).at[receivers].add(x[senders] * 2.0)


def rows(run: Any, *shapes: Any) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """What makes the arrays whose rows are in the lanes -> their shape, and which dimensions."""
    program = program_of(run, *shapes)
    found = dims_of_rows(program, replace(PLAIN, memory_tile=TILE, passes=PLAIN.passes | {"lookup-rows"}))
    return {program.ops[program.producer[v]].name: (program.values[v].shape, d) for v, d in found.items()}


def test_rows_that_are_scattered_are_in_the_lanes() -> None:
    numbers = arg(2**18, dtype=jnp.int32)
    assert rows(segment_sums, arg(2**15, 16), numbers, numbers) == {
        "stablehlo.gather": ((2**18, 16), (1,)), "stablehlo.multiply": ((2**18, 16), (1,))
    }  # fmt: skip
    assert (
        tile_growth((2**18, 16), (0, 1), TILE) == 1.0 < tile_growth((2**18, 16), (0, 1), TILE, lanes=(1,)) == 128 / 16
    )


def test_rows_that_are_multiplied_by_a_vector_stay_in_the_lanes() -> None:
    """Logits of graph attention, of sender and receiver side by side; a matrix would have them laid out anew."""

    def logits(x: Any, senders: Any, receivers: Any, w: Any) -> Any:
        return jnp.concatenate([x[senders], x[receivers]], -1) @ w

    numbers = arg(2**18, dtype=jnp.int32)
    gathered = {"stablehlo.gather": ((2**18, 16), (1,))}
    assert rows(logits, arg(2**15, 16), numbers, numbers, arg(32, 1)) == gathered
    assert rows(logits, arg(2**15, 16), numbers, numbers, arg(32, 8)) == {}


def test_rows_of_several_dimensions_are_innermost_where_they_are_scattered() -> None:
    """E edges of 8 heads of 4 features: 8 in the lanes, 16 times the elements (libtpu 0.0.42.1)."""
    numbers = arg(2**18, dtype=jnp.int32)
    assert rows(segment_sums, arg(2**15, 8, 4), numbers, numbers) == {"stablehlo.multiply": ((2**18, 8, 4), (1, 2))}
    assert tile_growth((2**18, 8, 4), (1, 2), TILE) == 128 / 8


def test_what_is_elementwise_of_rows_lies_as_they_do_and_what_products_read_of_them_does_not() -> None:
    numbers, positions = arg(2**18, dtype=jnp.int32), arg(2**15, 3)
    assert rows(lambda x, m, n: jnp.sin(x[m] - x[n]), positions, numbers, numbers) == {
        f"stablehlo.{name}": ((2**18, 3), (1,)) for name in ("gather", "subtract", "sine")
    }
    assert rows(lambda x, n, w: x[n] @ w, arg(2**15, 16), numbers, arg(16, 16)) == {}
    picks = arg(2**18, 1, dtype=jnp.int32)
    assert rows(lambda x, n: jnp.take_along_axis(x, n, 1), arg(2**18, 16), picks) == {}  # single elements


# Nodes, edges, features; what XLA:TPU (libtpu 0.0.42.1) needs for arguments, result and temporaries on v5e, MiB
SEGMENT_SUMS = [
    (2**15, 2**19, 16, 266.1),
    (2**15, 2**19, 64, 278.1),
    (2**16, 2**18, 16, 139.0),
    (2**16, 2**20, 64, 556.1),
]


@pytest.mark.parametrize(("nodes", "edges", "features", "mib"), SEGMENT_SUMS)
def test_segment_sums_take_what_xla_says(nodes: int, edges: int, features: int, mib: float) -> None:
    numbers = arg(edges, dtype=jnp.int32)
    cost = evaluator_of(source_of(segment_sums, arg(nodes, features), numbers, numbers), "v5e-16").exact_cost(())
    assert cost.peak_bytes / 2**20 == pytest.approx(mib, rel=0.1)


def written(cache: Any, slots: Any, new: Any) -> Any:
    return cache.at[slots].set(new)


def attended(cache: Any, slots: Any, new: Any, queries: Any, table: Any) -> Any:
    """Attention over pages that a table lists, after some positions of the cache were written."""
    cache = cache.reshape(-1, *cache.shape[2:]).at[slots].set(new).reshape(cache.shape)
    read = cache[table].reshape(len(table), -1, *cache.shape[2:])
    return jnp.einsum("bkgd,btkd->bkgt", queries, read), cache


BF, F32, SLOTS = jnp.bfloat16, jnp.float32, arg(1024, dtype=jnp.int32)
# A table, what is looked up in it, and what XLA:TPU (libtpu 0.0.42.1) needs on v5e: MiB, and ms of kernels that it
# estimates (without the look-ups; 0: nothing is copied). A table of narrow rows lies in other tiles than a look-up
# reads, and is copied, unless the rows are so narrow that a gather does without; a scatter of rows of several
# dimensions copies it to and fro.
TABLES: list[tuple[Any, Any, list[Any], float, float]] = [
    (written, arg(2**20, 4, 16, dtype=BF), [SLOTS, arg(1024, 4, 16, dtype=BF)], 1153.1, 20.5),
    (written, arg(2**19, 4, 32), [SLOTS, arg(1024, 4, 32)], 1282.5, 10.6),
    (written, arg(2**18, 4, 64, dtype=BF), [SLOTS, arg(1024, 4, 64, dtype=BF)], 384.5, 6.17),
    (written, arg(2**17, 4, 128, dtype=BF), [SLOTS, arg(1024, 4, 128, dtype=BF)], 129.0, 0.0),
    (
        attended, arg(2**16, 16, 4, 16, dtype=BF),
        [SLOTS, arg(1024, 4, 16, dtype=BF), arg(128, 4, 8, 16, dtype=BF), arg(128, 128, dtype=jnp.int32)], 1168.3, 21.7,
    ),
    (
        attended, arg(2**14, 16, 4, 64, dtype=BF),
        [SLOTS, arg(1024, 4, 64, dtype=BF), arg(128, 4, 8, 64, dtype=BF), arg(128, 32, dtype=jnp.int32)], 645.0, 9.64,
    ),
    (lambda x, n: x[n], arg(2**19, 16), [arg(2**18, dtype=jnp.int32)], 49.0, 0.0),
    (lambda x, n: x[n], arg(2**19, 64), [arg(2**18, dtype=jnp.int32)], 577.0, 1.3),
    (lambda x, n: x[n], arg(2**15, 16, 4, 16), [arg(2**14, dtype=jnp.int32)], 192.1, 0.0),
    (lambda x, n: x[n], arg(2**13, 16, 4, 64), [arg(2**13, dtype=jnp.int32)], 768.0, 1.72),
    (
        lambda x, n, w: x[n] @ w, arg(2**20, 64, dtype=BF),
        [arg(2**19, dtype=jnp.int32), arg(64, 256, dtype=BF)], 514.0, 3.23,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("run", "table", "rest", "mib", "milliseconds"), TABLES)
def test_tables_of_narrow_rows_are_copied(
    run: Any, table: Any, rest: list[Any], mib: float, milliseconds: float
) -> None:
    donated = (0,) if run in (written, attended) else ()
    profile = find_profile(find_preset("v5e").chip).without("lookup-steps")
    evaluator = evaluator_of(source_of(run, table, *rest, donate=donated), "v5e-8", profile=profile)
    cost = evaluator.exact_cost(())
    assert cost.peak_bytes / 2**20 == pytest.approx(mib, rel=0.21)
    copied = any(use.name == "copy" for use in evaluator.kernels(()))
    assert copied is bool(milliseconds)
    if copied:
        assert cost.compute_seconds * 1e3 == pytest.approx(milliseconds, rel=0.25)


def test_a_scatter_of_two_tables_is_priced() -> None:
    table, rows = "tensor<64x4x16xf32>", "tensor<8x4x16xf32>"
    text = f"""func.func public @main(%x: {table}, %y: {table}, %i: tensor<8x1xi32>, %u: {rows})
      -> ({table}, {table}) {{
      %0:2 = "stablehlo.scatter"(%x, %y, %i, %u, %u) <{{scatter_dimension_numbers = #stablehlo.scatter<
        update_window_dims = [1, 2], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],
        index_vector_dim = 1>}}> ({{
      ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<f32>, %d: tensor<f32>):
        stablehlo.return %c, %d : tensor<f32>, tensor<f32>
      }}) : ({table}, {table}, tensor<8x1xi32>, {rows}, {rows}) -> ({table}, {table})
      return %0#0, %0#1 : {table}, {table}
    }}"""
    assert evaluator_of(source_of_text(text), "v5e-8").exact_cost(()).peak_bytes >= 4 * 64 * 4 * 16 * 4


def test_pages_split_below_the_lanes_need_more_than_pages_of_whole_heads() -> None:
    """A device of 8 with 16 of 128 features of each head has 8 times the elements in tiles, in a copy of the cache."""
    shapes = arg(2**20, 8, 128, dtype=BF), SLOTS, arg(1024, 8, 128, dtype=BF)
    case = case_of(written, *shapes, donate=(0,), mesh="v5e-8")
    heads, features = (
        case.evaluator.exact_cost(tuple(case.shard(f"cache.{dim}", axis) for axis in ("data", "model"))).peak_bytes
        for dim in (1, 2)
    )
    assert features / heads == pytest.approx(9.0, rel=0.05)  # the cache, and 8 times as much


def convolved(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@pytest.mark.parametrize(
    ("run", "shapes", "peak"),
    [
        (lambda cache: cache + 1, [(0, 32, 2, 128)], 0),
        (lambda cache: cache + 1, [(4, 32, 0, 128)], 0),
        (lambda cache: cache + 1, [(4, 32, 2, 0)], 0),
        (convolved, [(0, 64, 64, 8), (3, 3, 8, 128)], 3 * 3 * 8 * 128 * 4),
        (convolved, [(16, 0, 64, 8), (3, 3, 8, 128)], 3 * 3 * 8 * 128 * 4),
        (convolved, [(16, 8, 8, 0), (3, 3, 0, 128)], 16 * 8 * 8 * 128 * 4),
    ],
)
@pytest.mark.parametrize("mesh", ["v4-8", "v5e-8"])
def test_arrays_without_elements_take_nothing(
    run: Callable[..., Any], shapes: list[tuple[int, ...]], peak: int, mesh: str
) -> None:
    cost = case_of(run, *[arg(*shape) for shape in shapes], mesh=mesh).evaluator.exact_cost(())
    assert cost.peak_bytes == peak


# -- time of arrays of narrow rows, which XLA:TPU pads to 128 lanes on each device


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


# -- pieces that a gather brings together: as they lie, or copied


TILED = replace(PLAIN, memory_tile=(8, 128), passes=PLAIN.passes | {"gathered-pieces"})


@pytest.mark.parametrize(
    ("piece", "dim", "looked_up", "copied"),
    [
        ((3752, 768), 0, True, False),  # whole rows of tiles
        ((3750, 768), 0, True, True),
        ((3750, 768), 0, False, True),
        ((50257, 96), 1, False, False),  # for a product the features may be the rows of tiles
        ((50257, 96), 1, True, True),
        ((50257, 128), 1, True, False),
        ((50257, 97), 1, False, True),
        ((3, 3750, 768), 1, False, False),  # something else is innermost
    ],
)
def test_pieces_that_are_whole_tiles_stay_as_they_are(
    piece: tuple[int, ...], dim: int, looked_up: bool, copied: bool
) -> None:
    assert pieces_are_copied(TILED, piece, dim, looked_up=looked_up) is copied


@pytest.mark.parametrize(("rows", "moments"), [(4 * 9, 1), (4 * 8, 0)])
def test_both_are_there_when_the_copy_is_made(rows: int, moments: int) -> None:
    """Weights that rest split along what is added up, and are gathered for a product split along the batch."""

    def run(x: Any, w: Any) -> Any:
        return x @ w

    case = case_of(run, arg(64, rows), arg(rows, 16), mesh=round_mesh(data=4), profile=TILED)
    plan = (case.shard("x.0", "data"), case.shard("w.0", "data"))
    lowered = {number: case.problem.op_sharding(number, plan) for number in range(len(case.problem.patterns))}
    buffers, found = case.evaluator._buffers, []
    for item in case.evaluator.items.arrays:
        for kind, size in case.evaluator._sharing.held(item, lowered):
            if isinstance(kind, PutTogether):
                (interval,) = buffers.intervals(item, kind)
                assert interval[0] == interval[1]
                assert size == rows * 16 * 4
                found.append(interval)
    assert len(found) == moments
