"""Which work is one kernel, and what a kernel costs by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from programs import PLAIN, ROUND_CHIP, arg, argument, case_of, evaluator_of, problem_of, round_mesh, source_of

from toast_cli.hardware import find_preset
from toast_cli.price.compilation import compile_program
from toast_cli.price.cost import Attained, Grid, kernel_seconds, padding
from toast_cli.price.fusion import materialised
from toast_cli.price.kernel import arithmetic, elements_walked
from toast_cli.price.on_chip import has_small_windows, loop_residency
from toast_cli.price.profile import OnChip
from toast_cli.price.profiles import find_profile
from toast_cli.program.ops import ARGUMENT, DYNAMIC_UPDATE_SLICE, FFT, RESULT

S = arg(16, 16)
KIB = 1024
US = 1e-6


def work(run: Any, *shapes: Any) -> list[tuple[str, list[int], int, float]]:
    """(op, KiB read by operand, KiB written, elementwise flops per element of f32[16,16]) of each kernel."""
    problem = problem_of(source_of(run, *shapes), round_mesh(data=4))
    program = problem.program
    found = compile_program(program, problem.free, problem.mesh.chip, PLAIN).kernels
    return [
        (op.name.partition(".")[2], [s.bytes // KIB for s in k.operands], sum(s.bytes for s in k.results) // KIB,
         sum(s.flops for s in (*k.operands, *k.results)) / 256)
        for op, k in zip(program.ops, found, strict=True) if k is not None
    ]  # fmt: skip


# name, function, arguments (f32[16,16] is 1 KiB), kernels
KERNELS: list[tuple[str, Any, tuple[Any, ...], list[tuple[str, list[int], int, float]]]] = [
    ("a chain is one; only its last op's own arithmetic is not on a side",
     lambda x: jnp.sin(x) * 2.0 + 1.0, (S,), [("add", [1, 0], 1, 4 + 1)]),
    ("an array read twice is read once", lambda x: x * x + x, (S,), [("add", [1, 0], 1, 1)]),
    ("elementwise work that finishes a product is the product's", lambda x, w: jnp.maximum(x @ w, 0.0), (S, S),
     [("dot_general", [1, 1], 1, 1)]),
    ("and so is what it reads", lambda x, w, b: x @ w + b, (S, S, S), [("dot_general", [1, 1], 1, 1)]),
    ("of two products one is finished, the other written and read", lambda x, w: x @ w + w @ x, (S, S),
     [("dot_general", [1, 1], 1, 0), ("dot_general", [1, 1], 1, 1)]),
    ("a sum rides on what makes the array", lambda x: (lambda y: (y, y.sum(0)))(x * 2.0), (S,),
     [("multiply", [1, 0], 1, 0), ("reduce", [0, 0], 0, 0)]),
    ("with another array that is there", lambda x, w: (lambda y: (y, (y * w).sum(0)))(x * 2.0), (S, S),
     [("multiply", [1, 0], 1, 0), ("reduce", [0, 0], 0, 1)]),
    ("but not where it needs what another sum finds in the array",
     lambda x: (lambda y: (y, (y - y.sum(0)).sum(0)))(x * 2.0), (S,),
     [("multiply", [1, 0], 1, 0), ("reduce", [0, 0], 0, 0), ("reduce", [1, 0], 0, 1)]),
    ("but reads an argument itself", lambda x: x.sum(0), (S,), [("reduce", [1, 0], 0, 0)]),
    ("a softmax finds its largest elements in passing", lambda x: jnp.exp(x - x.max(1)[:, None]), (S,),
     [("exponential", [1], 1, 1), ("reduce", [0, 0], 0, 0)]),
    ("what elementwise work makes of another kernel's result is done there and reads only what that has not: "
     "m' = m + g, w' = w * m'",
     lambda w, m, g: (lambda n: (n, w * n))(m + g), (S, S, S), [("add", [1, 1], 1, 0), ("multiply", [1, 0], 1, 0)]),
    ("and in the product that makes the gradient", lambda w, m, x: (lambda n: (n, w * n))(m + x @ x), (S, S, S),
     [("dot_general", [1, 0], 2, 2)]),
    ("but not where it waits for something else: x * 2 before the product, its sum with that after",
     lambda x, w: (lambda a: (a, jnp.sin(a) + lax.cumsum(a)))(x * 2.0), (S, S),
     [("multiply", [1, 0], 1, 0), ("reduce_window", [1, 0], 1, 0), ("add", [1, 1], 1, 4)]),
    ("a sum over dimensions of one element is a reshape", lambda x: x[None].sum(0) * 2.0, (S,),
     [("multiply", [1, 0], 1, 1)]),
    ("steps of a sequence are written by the product that makes them, and by a kernel of their own where the step "
     "before made them",
     lambda h, w: lax.scan(lambda h, _: (n := jnp.sin(h @ w), (n, h)), h, None, length=8), (S, S),
     [("broadcast_in_dim", [0], 8, 0), ("broadcast_in_dim", [0], 8, 0), ("dot_general", [1, 1], 2, 4),
      ("dynamic_update_slice", [0, 1, 0, 0, 0], 1, 0), ("add", [0, 0], 0, 0)]),
    ("steps that are parts of one array are written together",
     lambda h, w: lax.scan(lambda h, _: (n := h @ w, (n[:8], n[8:])), h, None, length=8), (S, S),
     [("broadcast_in_dim", [0], 4, 0), ("broadcast_in_dim", [0], 4, 0), ("dot_general", [1, 1], 1, 0),
      ("dynamic_update_slice", [0, 0, 0, 0, 0], 0, 0), ("dynamic_update_slice", [0, 0, 0, 0, 0], 0, 0),
      ("add", [0, 0], 0, 0)]),
    ("a slice reads its part", lambda x: lax.slice_in_dim(x, 0, 16) * 2.0, (arg(512, 16),),
     [("multiply", [1, 0], 1, 0)]),
]  # fmt: skip


@pytest.mark.parametrize(("run", "shapes", "expected"), [k[1:] for k in KERNELS], ids=[k[0] for k in KERNELS])
def test_kernels(run: Any, shapes: tuple[Any, ...], expected: list[tuple[str, list[int], int, float]]) -> None:
    found = work(run, *shapes)
    assert sorted(found) == sorted(expected)


# tile, rows x columns x depth, growth
PADDED = [
    ((128, 128), (8192, 8192, 8192), 1.0),
    ((128, 128), (8192, 8192, 64), 2.0),  # depth 64 of 128
    ((128, 128), (8192, 64, 8192), 1.0),  # 64 columns are streamed instead, 8 at a time
    ((256, 256), (8192, 192, 192), 256 / 192),  # the depth is padded; 192 streamed columns fit
    ((128, 128), (1, 4096, 4096), 8.0),  # one row of the 8 that are streamed together
    ((128, 128), (64, 64, 64), 2.0 * 2.0),
    ((1, 1), (3, 5, 7), 1.0),
]


@pytest.mark.parametrize(("tile", "shape", "growth"), PADDED)
def test_padding_to_the_matrix_unit(tile: tuple[int, int], shape: tuple[int, int, int], growth: float) -> None:
    assert padding(tile, *shape) == pytest.approx(growth)


def test_what_a_kernel_attains_of_the_peaks() -> None:
    """8 GFLOP at half of 2 TFLOP/s: 8 ms, behind which 3 MB at three quarters of 1 GB/s, 4 ms, hide; 5 us to start."""
    attained = Attained(matrix=0.5, memory=0.75, kernel_seconds=5 * US)
    assert kernel_seconds(ROUND_CHIP, attained, "bf16", 8e9, 0.0, 3e6) == pytest.approx(8e-3 + 5 * US)
    # 1e8 elementwise operations at 1e10 take 10 ms, behind which the 4 ms of memory traffic hide.
    assert kernel_seconds(ROUND_CHIP, attained, "f32", 0.0, 1e8, 3e6) == pytest.approx(10e-3 + 5 * US)


def test_every_kernel_takes_time_however_small() -> None:
    """Two products that are not one kernel, on the smallest of arrays: two floors."""
    profile = replace(PLAIN, attained=Attained(kernel_seconds=5 * US))
    case = case_of(lambda x, w: (x @ w) @ w, arg(1, 1), arg(1, 1), mesh=round_mesh(data=4), profile=profile)
    assert case.evaluator.cost(()).compute_seconds == pytest.approx(10 * US, rel=0.01)


def test_a_partial_product_is_written_before_it_is_finished() -> None:
    """x [100, 50 of 200] @ w [50 of 200, 300], then the maximum with 0. Read 20,000 + 60,000 bytes; written 120,000
    partial, and after the all-reduce 120,000 read and 120,000 written: 440 us at 1 GB/s, where splitting rows needs no
    more than 290 us.
    """
    case = case_of(lambda x, w: jnp.maximum(x @ w, 0.0), arg(100, 200), arg(200, 300))
    whole = case.evaluator.cost((case.shard("x.1", "data"),)).compute_seconds
    rows = case.evaluator.cost((case.shard("x.0", "data"),)).compute_seconds
    assert whole == pytest.approx(440 * US, rel=1e-3)
    assert rows == pytest.approx(290 * US, rel=1e-3)


def test_a_product_that_is_half_a_tile_wide_wastes_half() -> None:
    chip = replace(ROUND_CHIP, matrix_tile=(128, 128), memory_bytes_per_second=1e15, vector_flops=1e9)
    mesh = replace(round_mesh(data=4), chip=chip)
    case = case_of(lambda x, w: x @ w, arg(512, 256), arg(256, 512), mesh=mesh)
    flops = 2 * 512 * 512 * 256 / 1e12
    assert case.evaluator.cost(()).compute_seconds == pytest.approx(flops)
    # The depth over 4: 64 of 128, so a quarter of the work takes half of the time. Rows over 4: 128, a quarter.
    assert case.evaluator.cost((case.shard("x.1", "data"),)).compute_seconds == pytest.approx(flops / 2)
    assert case.evaluator.cost((case.shard("x.0", "data"),)).compute_seconds == pytest.approx(flops / 4)


@given(
    st.sampled_from(["v4", "v5e", "v5p", "v6e", "tpu7x", "h100", "P100"]),
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 64),
    st.sampled_from([1, 2, 4, 8]),
)
def test_cutting_a_product_never_makes_it_slower(name: str, m: int, n: int, k: int, ways: int) -> None:
    chip = find_preset(name).chip
    rows, columns, depth = 16 * m, 16 * n, 16 * k

    def seconds(r: float, c: float, d: float) -> float:
        flops = 2 * r * c * d * padding(chip.matrix_tile, r, c, d)
        return kernel_seconds(chip, Attained(), "bf16", flops, 0.0, 2 * (r * d + d * c + r * c))

    whole = seconds(rows, columns, depth)
    for cut in ((rows / ways, columns, depth), (rows, columns / ways, depth), (rows, columns, depth / ways)):
        assert seconds(*cut) <= whole * (1 + 1e-12)


@pytest.mark.parametrize(("kept_bytes", "moved_kib"), [(0, 6), (KIB - 1, 6), (KIB, 4)])
def test_what_passes_between_kernels_stays_on_the_chip_while_it_is_small(kept_bytes: int, moved_kib: int) -> None:
    """Two products: three arrays of 1 KiB each, of which one passes from the first to the second."""
    attained = replace(PLAIN.attained, kept_bytes=kept_bytes)
    profile = replace(PLAIN, attained=attained, passes=PLAIN.passes | {"on-chip-reuse"})
    evaluator = evaluator_of(source_of(lambda x, v, w: (x @ v) @ w, S, S, S), round_mesh(data=2), profile=profile)
    assert evaluator.cost(()).compute_seconds == pytest.approx(moved_kib * KIB / 1e9)


@pytest.mark.parametrize(("passed_bytes", "moved_kib"), [(0, 6), (2 * KIB - 1, 6), (2 * KIB, 4)])
def test_what_passes_from_one_kernel_to_the_next_stays_on_the_chip_while_little_is_written(
    passed_bytes: int, moved_kib: int
) -> None:
    """Two products as above; until the first has been read it is written, and the second."""
    attained = replace(PLAIN.attained, kept_bytes=KIB / 2, passed_bytes=passed_bytes)
    profile = replace(PLAIN, attained=attained, passes=PLAIN.passes | {"on-chip-reuse"})
    evaluator = evaluator_of(source_of(lambda x, v, w: (x @ v) @ w, S, S, S), round_mesh(data=2), profile=profile)
    assert evaluator.cost(()).compute_seconds == pytest.approx(moved_kib * KIB / 1e9)


def test_each_array_that_passes_is_small_or_not_whatever_passes_beside_it() -> None:
    """A sum that reads two sorted arrays of 1 KiB each: both stay on the chip, and only what is sorted is read."""
    attained = replace(PLAIN.attained, kept_bytes=KIB)
    profile = replace(PLAIN, attained=attained, passes=PLAIN.passes | {"on-chip-reuse"})
    source = source_of(lambda x, y: (jnp.sort(x, 0) + jnp.sort(y, 1)).sum(), S, S)
    evaluator = evaluator_of(source, round_mesh(data=2), profile=profile)
    assert evaluator.cost(()).compute_seconds == pytest.approx(2 * KIB / 1e9, rel=0.03)


@pytest.mark.parametrize(
    ("run", "arrays", "kib"),
    [
        (lambda a: a * 2.0, 1, 2),  # reads and writes
        (lambda a, b, c, d: a * b + c * d, 4, 5),
        (lambda a: a.sum(), 1, 2),  # adds up at half the speed
        (lambda a, b: (a * b).sum(), 2, 2),  # walks through two arrays at once
    ],
)
def test_elementwise_work_takes_what_it_reads_and_writes_and_reductions_twice(run: Any, arrays: int, kib: int) -> None:
    profile = replace(PLAIN, attained=Attained(pass_bytes=4.0))
    evaluator = evaluator_of(source_of(run, *(S,) * arrays), round_mesh(data=2), profile=profile)
    assert evaluator.cost(()).compute_seconds == pytest.approx(kib * KIB / 1e9, rel=0.01)


@pytest.mark.parametrize(("run", "kib"), [(lambda a, b: a + b, 2 * 3), (lambda a, b: a @ b, 3)])
def test_elementwise_work_has_a_rate_of_its_own(run: Any, kib: int) -> None:
    """Two arrays of 1 KiB read, one written: at half the rate of device memory without a product."""
    profile = replace(PLAIN, attained=Attained(elementwise=0.5))
    evaluator = evaluator_of(source_of(run, S, S), round_mesh(data=2), profile=profile)
    assert evaluator.cost(()).compute_seconds == pytest.approx(kib * KIB / 1e9, rel=0.05)


@pytest.mark.parametrize(("speed", "kib"), [(0.0, 3), (1.0, 5), (2.0, 4)])
def test_elementwise_work_takes_its_bytes_on_the_chip_at_that_memorys_rate(speed: float, kib: int) -> None:
    """A sort, and an array added to it: of its five KiB the two of the sorted array, written and read, are there."""
    attained = Attained(kept_bytes=KIB)
    passes = PLAIN.passes | {"on-chip-reuse"}
    profile = replace(PLAIN, attained=attained, on_chip=OnChip(vector_speed=speed), passes=passes)
    source = source_of(lambda x, y: jnp.sort(x, 0) + y, S, S)
    evaluator = evaluator_of(source, round_mesh(data=2), profile=profile)
    assert evaluator.cost(()).compute_seconds == pytest.approx(kib * KIB / 1e9, rel=0.01)


def updated(x: Any, v: Any, w: Any) -> Any:
    new = lax.dynamic_update_slice(w, jnp.ones((1, 1)), (0, 0))
    return x @ v @ new, new


@pytest.mark.parametrize(
    ("what", "run", "room_kib", "kib"),
    [
        ("w is fetched while x and v are multiplied", lambda x, v, w: x @ v @ w, 8, 2 * (3 + 2)),
        ("but it does not fit", lambda x, v, w: x @ v @ w, 0.5, 2 * (3 + 3)),
        ("nothing runs before", lambda x, v, w: x @ w, 8, 2 * 3),
        ("a loop fetches nothing", lambda x, v, w: lax.fori_loop(0, 4, lambda _, h: h @ w, x @ v), 8, 2 * (3 + 4 * 3)),
        ("a sum fetches nothing", lambda x, v, w: jnp.sort(x @ v, 0) + w, 8, 2 * (3 + 2 + 3)),
        ("w is updated in place before", updated, 8, 2 * (3 + 2)),
    ],
)
def test_products_read_arguments_ahead(what: str, run: Any, room_kib: float, kib: int) -> None:
    """Arrays of 1 KiB, at half the rate of device memory. What is fetched ahead takes less time than the rest."""
    passes = PLAIN.passes | {"memory-space-assignment"}
    profile = replace(PLAIN, attained=Attained(memory=0.5), on_chip=OnChip(room_kib * KIB), passes=passes)
    source = source_of(run, S, S, S, donate=(2,) if run is updated else ())
    evaluator = evaluator_of(source, round_mesh(data=2), profile=profile)
    assert evaluator.cost(()).compute_seconds == pytest.approx(kib * KIB / 1e9, rel=0.05), what


@pytest.mark.parametrize(("passes", "growth"), [(set(), 1.0), ({"fourier-transforms"}, 7.0)])
def test_fourier_transforms_take_several_times_what_they_count(passes: set[str], growth: float) -> None:
    program = source_of(jnp.fft.fft, arg(4, 1024)).program
    profile = replace(PLAIN, passes=PLAIN.passes | passes)
    counted = [arithmetic(program, op, profile) for op in program.ops if op.name == FFT]
    assert counted == [growth * 5 * 4 * 1024 * 10]


@pytest.mark.parametrize(("function", "each"), [(lax.erf, 15), (lax.erfc, 50), (jnp.exp, 4), (jnp.negative, 1)])
def test_error_functions_are_polynomials_on_the_vector_unit(function: Any, each: int) -> None:
    program = source_of(function, S).program
    assert sum(arithmetic(program, op, PLAIN) for op in program.ops) == each * 256


@pytest.mark.parametrize(("room_kib", "spared_kib"), [(1, 0), (4, 3)])
def test_what_a_loop_reads_in_every_iteration_stays_on_the_chip_where_all_of_it_fits(
    room_kib: int, spared_kib: int
) -> None:
    """A state and weights of 1 KiB each, read in each of 8 iterations, and the new state: at four times the rate."""

    def recurrent(x: Any, w: Any) -> Any:
        return lax.fori_loop(0, 8, lambda _, h: h @ w, x)

    on_chip = OnChip(bytes=room_kib * KIB, speed=4.0)
    profile = replace(PLAIN, on_chip=on_chip, passes=PLAIN.passes | {"loop-residency"})
    source = source_of(recurrent, S, S)
    seconds = [
        evaluator_of(source, round_mesh(data=2), profile=each).cost(()).compute_seconds
        for each in (profile.without("loop-residency"), profile)
    ]
    assert seconds[0] - seconds[1] == pytest.approx(8 * spared_kib * 0.75 * KIB / 1e9, rel=0.02)


def test_a_table_that_is_looked_up_and_multiplied_stays_on_the_chip() -> None:
    """The table of a decoder with tied embeddings: each trip looks rows up and multiplies all of it."""

    def decoding(table: Any, ids: Any) -> Any:
        return lax.fori_loop(0, 8, lambda _, ids: jnp.argmax(table[ids] @ table.T, 1).astype(jnp.int32), ids)

    program = problem_of(source_of(decoding, arg(64, 16), arg(4, dtype=jnp.int32)), round_mesh(data=2)).program
    profile = replace(PLAIN, on_chip=OnChip(64 * KIB, speed=4.0), passes=PLAIN.passes | {"loop-residency"})
    stored = [True] * len(program.values)
    found = loop_residency(program, stored, [1.0] * len(stored), (False,) * len(stored), profile)
    assert (argument(program, "table"), 0) in found.parts


@pytest.mark.parametrize(("own", "window", "speed"), [(0, 0, 8.0), (1100, 300, 8.0), (800, 300, 8.0), (700, 300, 2.0)])
def test_what_a_loop_adds_up_has_small_windows_where_three_pieces_of_it_do_not_fit(
    own: float, window: float, speed: float
) -> None:
    """x.T @ x of 1 KiB is added to 1 KiB that stays on the chip, which is read and written in each of 8 trips, as a
    whole or in 4 pieces; 1 KiB of x is read from device memory."""
    on_chip = OnChip(4 * KIB, speed=8.0, vector_speed=2.0, own_bytes=own, window_bytes=window)
    passes = PLAIN.passes | {"loop-residency", "accumulator-windows"}
    profile = replace(PLAIN, on_chip=on_chip, passes=passes)
    case = case_of(accumulated, S, arg(8, 16, 16), mesh=round_mesh(data=2), profile=profile)
    assert case.evaluator.cost(()).compute_seconds == pytest.approx(8 * (1 + 2 / speed) * KIB / 1e9, rel=0.05)


# Rows and columns in f32, and whether libtpu 0.0.42.1 compiled the kernel again, with small windows.
COMPILED_AGAIN = [
    (1024, 4096, False), (1024, 6144, True), (1280, 4096, False), (1280, 5120, True), (1536, 2560, False),
    (1536, 3072, True), (1536, 4096, True), (1792, 2560, False), (2048, 8192, False), (2048, 6144, True),
    (2560, 3584, True), (4096, 2048, False), (4096, 3072, True), (768, 5120, False), (768, 6144, True),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "columns", "again"), COMPILED_AGAIN)
def test_products_that_add_to_some_shapes_have_small_windows_on_v5e(rows: int, columns: int, again: bool) -> None:
    profile = find_profile(find_preset("v5e").chip)
    assert has_small_windows(profile, rows, columns, 32) == again
    assert not has_small_windows(profile.without("accumulator-windows"), rows, columns, 32)
    assert not has_small_windows(find_profile(find_preset("v4").chip), rows, columns, 32)


@pytest.mark.parametrize(("passes", "each"), [(set(), 5), ({"scalar-unit"}, 0)])
def test_a_scalar_is_no_kernel(passes: set[str], each: int) -> None:
    profile = replace(PLAIN, passes=PLAIN.passes | passes, attained=Attained(kernel_seconds=5 * US))
    case = case_of(lambda x: jnp.sin(x) * 2.0, arg(), mesh=round_mesh(data=2), profile=profile)
    assert case.evaluator.cost(()).compute_seconds == pytest.approx(each * US, abs=0.1 * US)


def test_elementwise_work_on_the_chip_takes_all_bytes_that_it_reads_and_writes() -> None:
    """A loop adds one array to another, 1 KiB each: 3 KiB in each of 8 steps, at twice the rate of 1 GB/s."""

    def added(x: Any, y: Any) -> Any:
        return lax.fori_loop(0, 8, lambda _, h: h + y, x)

    on_chip = OnChip(64 * KIB, speed=4.0, vector_speed=2.0)
    profile = replace(PLAIN, on_chip=on_chip, passes=PLAIN.passes | {"loop-residency"})
    case = case_of(added, S, S, mesh=round_mesh(data=2), profile=profile)
    assert case.evaluator.cost(()).compute_seconds == pytest.approx(8 * 1.5 * KIB / 1e9, rel=0.02)


def accumulated(w: Any, x: Any) -> Any:
    return lax.scan(lambda total, x: (total + x.T @ x, None), w, x)[0]


def accumulated_in_pieces(w: Any, x: Any) -> Any:
    def step(total: Any, x: Any) -> Any:
        both = (x.T @ x).T
        return (total[0] + both[:, :8], total[1] + both[:, 8:]), None

    return lax.scan(step, (w[:, :8], w[:, 8:]), x)[0]


@pytest.mark.parametrize("adding", [accumulated, accumulated_in_pieces])
def test_what_a_loop_carries_partial_is_not_written_apart(adding: Any) -> None:
    """x.T @ y is added to what a loop carries; split over what it adds up, less of x and y is read, nothing more is
    written than in one piece, and there are no more kernels."""
    attained = Attained(kernel_seconds=5 * US)
    profile = replace(PLAIN, passes=PLAIN.passes | {"reduction-motion"}, attained=attained)
    case = case_of(adding, arg(16, 16), arg(4, 64, 16), mesh=round_mesh(data=4), profile=profile)
    whole, split = (case.evaluator.cost(plan).compute_seconds for plan in ((), (case.shard("x.1", "data"),)))
    assert split < whole


@pytest.mark.parametrize(
    ("passes", "written"),
    [(set(), ["cosine", "convolution"]), ({"library-convolutions"}, ["tanh", "convolution", "cosine", "convolution"])],
)
def test_what_a_librarys_convolution_reads_and_makes_is_written(passes: set[str], written: list[str]) -> None:
    """tanh is computed as the first convolution reads it, cos finishes it; a library's read arrays and write arrays."""

    def fn(x: Any, v: Any, w: Any) -> Any:
        made = lax.conv(jnp.tanh(x), v, (1, 1), "SAME")
        return lax.conv(jnp.cos(made), w, (1, 1), "SAME")

    problem = problem_of(source_of(fn, arg(8, 16, 16, 16), *(arg(16, 16, 3, 3),) * 2), round_mesh(data=4))
    program = problem.program
    stored = materialised(program, problem.free, replace(PLAIN, passes=PLAIN.passes | passes))[0]
    made = [
        op.name.partition(".")[2] for op in program.ops if op.name not in (ARGUMENT, RESULT) and stored[op.results[0]]
    ]
    assert made == written


def test_a_product_of_which_a_slice_is_read_multiplies_that_alone() -> None:
    program = problem_of(source_of(lambda x, w: (x @ w)[-4:], S, S), round_mesh(data=4)).program
    (product,) = [op for op in program.ops if op.kind.contraction]
    sliced = replace(PLAIN, passes=PLAIN.passes | {"sliced-products"})
    assert arithmetic(program, product, sliced) == 4 * 16 * 16 * 2
    assert arithmetic(program, product, PLAIN) == 16 * 16 * 16 * 2


def scanned(rows: Any, *, reverse: bool = False) -> Any:
    return lax.scan(lambda c, row: (c, jnp.sort(row)), 0.0, rows, reverse=reverse)[1]


@pytest.mark.parametrize(
    ("run", "donate", "fills"),
    [
        (scanned, (), 0),
        (lambda rows: scanned(rows, reverse=True), (), 1),  # XLA:TPU (libtpu 0.0.42.1) knows loops that count up
        (scanned, (0,), 0),  # it is copied to the argument's buffer, which counts as a copy
        (lambda rows: lax.fori_loop(0, 4, lambda i, c: c.at[i].set(rows[i]), jnp.zeros((8, 1024, 256))), (), 1),  # half
    ],
)
def test_what_a_loop_stacks_whole_is_not_filled_before(run: Any, donate: tuple[int, ...], fills: int) -> None:
    evaluator = evaluator_of(source_of(run, arg(8, 1024, 256), donate=donate), "v5p-8")
    assert sum(use.name == "stablehlo.broadcast_in_dim" for use in evaluator.kernels(())) == fills


@pytest.mark.parametrize(
    ("run", "rest"),
    [
        (lambda x, y: x.at[3:5].set(y), arg(2, 4096)),
        (lambda x, y: x.at[y].add(1.0), arg(2, dtype=jnp.int32)),
        (lambda x, y: x.reshape(512, 8, 4096).at[y].add(1.0), arg(2, dtype=jnp.int32)),
    ],
)
def test_an_update_of_an_argument_that_is_kept_copies_it_first(run: Any, rest: Any) -> None:
    """f32[4096, 4096] is read and written, 128 MiB."""
    kept, donated = (
        sum(
            use.seconds
            for use in evaluator_of(source_of(run, arg(4096, 4096), rest, donate=donate), "v5e-8").kernels(())
        )
        for donate in ((), (0,))
    )
    assert kept - donated == pytest.approx(2 * 2**26 / (819e9 * 0.76), rel=0.1)


@pytest.mark.parametrize(
    ("run", "width", "cycles"),
    [
        (lambda table, ids, rows: table[ids], 2048, 10),
        (lambda table, ids, rows: table[ids], 1, 10),
        (lambda table, ids, rows: table.at[ids].add(rows), 2048, 16 * 7),
        (lambda table, ids, rows: table.at[ids].add(rows), 1, 7),
    ],
)
def test_xla_tpu_takes_indices_one_after_another(run: Any, width: int, cycles: int) -> None:
    source = source_of(run, arg(4096, width), arg(1000, dtype=jnp.int32), arg(1000, width))
    profile = find_profile(find_preset("v5p").chip)
    steps, none = (
        sum(use.seconds for use in evaluator_of(source, "v5p-8", profile=one).kernels(()) if use.runs)
        for one in (profile, profile.without("lookup-steps"))
    )
    assert steps - none == pytest.approx(1000 * cycles / 1.75e9)


def test_an_update_of_a_slice_of_a_scanned_array_copies_the_slice_first() -> None:
    """A decoding step over a stacked cache: a layer's slice is read and written before it has its new row."""

    def run(cache: Any, rows: Any) -> Any:
        def layer(total: Any, of: Any) -> Any:
            own = lax.dynamic_update_slice(of[0], of[1], (3, 0))
            return total + own.T @ own, None

        return lax.scan(layer, jnp.zeros((512, 512)), (cache, rows))[0]

    uses = evaluator_of(source_of(run, arg(8, 16384, 512), arg(8, 1, 512)), "v5e-8").kernels(())
    (update,) = (use for use in uses if use.name == DYNAMIC_UPDATE_SLICE)
    assert update.bytes == pytest.approx(2 * 8 * 16384 * 512 * 4, rel=0.01)


def test_the_copy_counts_in_the_kernel_of_a_product_that_makes_the_new_row() -> None:
    """The row alone would stay on the chip."""

    def run(cache: Any, weights: Any, x: Any) -> Any:
        def layer(x: Any, of: Any) -> Any:
            own = lax.dynamic_update_slice(of[0], x @ of[1], (3, 0))
            return jnp.tanh(x @ own.T @ own), None

        return lax.scan(layer, x, (cache, weights))[0]

    shapes = arg(8, 65536, 512), arg(8, 512, 512), arg(8, 512)
    seconds = evaluator_of(source_of(run, *shapes), "v5e-8").cost(()).compute_seconds
    assert seconds > 3 * 8 * 65536 * 512 * 4 / 819e9  # the slice is read and written, and read by products


# -- products of matrices with vectors, which the vector unit does


PASSED = replace(PLAIN, passes=PLAIN.passes | {"vector-products"}, attained=Attained(pass_bytes=4.0))
# factors: 0 batch of 8, 1 rows, 2 columns of 64, 3 added up, 32
CASES = [
    (1, (1, 1, 1, 1), 8 * 32 * 64.0),
    (2, (1, 1, 1, 1), 0.0),
    (2, (4, 2, 1, 1), 2 * 32 * 64.0),  # one row a device
    (2, (1, 1, 64, 2), 8 * 16 * 2.0),  # one column a device
]


@pytest.mark.parametrize(("rows", "cuts", "walked"), CASES)
def test_a_product_of_one_row_on_a_device_walks_through_the_other_side(
    rows: int, cuts: tuple[int, ...], walked: float
) -> None:
    grid = Grid(((0, 8),), ((1, rows),), ((2, 64),), ((3, 32),), 1.0, grouped=False)
    assert elements_walked(PASSED, grid, cuts) == walked
    assert elements_walked(PLAIN, grid, cuts) == 0.0


@pytest.mark.parametrize(("dtype", "size"), [(jnp.float32, 4), (jnp.bfloat16, 2)])
@pytest.mark.parametrize("split", [False, True])
def test_a_batch_that_is_split_into_single_rows_pays_for_it(dtype: Any, size: int, split: bool) -> None:
    """x [4, 64] @ w [64, 1024] is read as it is by the matrix unit; of one row each element of w passes through the
    vector unit, which counts as 4 bytes more."""
    x, w = arg(4, 64, dtype=dtype), arg(64, 1024, dtype=dtype)
    case = case_of(lambda x, w: x @ w, x, w, mesh=round_mesh(data=4), profile=PASSED)
    plan = (case.shard("x.0", "data"),) if split else ()
    rows, elements = (1, 4 * 64 * 1024) if split else (4, 0)
    moved = size * (64 * 1024 + rows * 64) + max(elements - size * rows * 64 if split else 0, size * rows * 1024)
    assert case.evaluator.cost(plan).compute_seconds == pytest.approx(moved / 1e9, rel=0.05)
