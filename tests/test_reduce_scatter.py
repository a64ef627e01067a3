"""What XLA:TPU makes of the collectives that the partitioner writes. The tables hold what libtpu 0.0.42.1 did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax
from programs import PLAIN, arg, case_of, problem_of, program_of, round_mesh, sample, source_of

from toast_cli.ask_xla.collectives import CompiledCollective, collectives_in
from toast_cli.hardware import Mesh, find_preset, load_spec, parse_shape
from toast_cli.plan.lower import lower
from toast_cli.plan.sharding import OpSharding
from toast_cli.price.compiled_collectives import (
    ScatterDecisions,
    ScatteredArray,
    ScatterSource,
    reductions_each,
    sides_of,
    stays_scatter,
    stays_slice_gather,
)
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.profiles import find_profile
from toast_cli.program.ops import DOT_GENERAL
from toast_cli.program.values import transposed
from toast_cli.report.build import collective_facts
from toast_cli.tactics.strategies import strategy

TPU = find_profile(find_preset("v4").chip)
# A compiler that takes the round chips for what it takes TPUs for when it rewrites collectives.
TILED = replace(PLAIN, passes=PLAIN.passes | {"narrowing", "tiled-reduce-scatter", "small-gathers"})
LINE, SQUARE = ("v4-32", {"data": 8, "model": 2}, (0,)), ("v4-32", {"data": 4, "model": 4}, (1,))


def mesh_of(spec: str, shape: dict[str, int]) -> Mesh:
    return load_spec(spec).mesh(shape)


# Around a ring of 8: local shape, dimension, bits, whether it is a product -> whether the reduce-scatter stays.
RING = [
    ((8 * 8, 128), 0, 32, False, False),  # one tile a device: no half for each stream
    ((8 * 8, 512), 0, 32, False, True),  # four tiles, two for each
    ((8 * 12, 128), 0, 32, False, True),  # 12 rows padded to 16
    ((8 * 16, 128), 0, 32, False, True),
    ((8 * 20, 128), 0, 32, False, False),  # 20 rows would be 32
    ((8 * 20, 128), 0, 16, False, False),
    ((8 * 56, 128), 0, 32, False, True),
    ((64, 8 * 64), 1, 32, False, False),  # half a tile of columns
    ((64, 8 * 128), 1, 32, False, True),
    ((64, 8 * 128), 1, 16, False, False),  # bf16 is packed in pairs
    ((64, 8 * 256), 1, 16, False, True),
    ((64, 128), 1, 32, True, True),  # a product of 64 x 16 a device is laid out by columns
    ((128, 64), 1, 32, True, False),
    ((8192,), 0, 32, False, False),  # a vector
    ((64, 4, 128), 0, 32, False, False),  # half a tile of rows
    ((8, 64, 128), 0, 32, False, True),
    ((8, 8, 128), 0, 32, False, False),
    ((4, 8 * 8, 256), 1, 32, False, True),  # inside another dimension: whole tiles as they are
    ((4, 8 * 8, 256), 1, 16, False, False),
    ((4, 8 * 16, 256), 1, 16, False, True),
    ((1, 8 * 16, 256), 1, 32, False, False),
    ((2048, 1, 256), 0, 32, True, False),  # one head of keys
    ((2048, 4, 256), 0, 32, True, True),
    ((1, 256, 2048), 2, 32, True, True),
    ((2, 64, 512), 2, 32, True, False),
    ((8 * 64, 239 * 128), 0, 32, False, False),  # a prime number of tiles of columns, of which no stream takes a part
    ((8 * 64, 30522), 0, 16, False, False),
    ((8 * 64, 151 * 128), 0, 32, False, True),  # few enough to be one part
    ((8 * 64, 157 * 128), 0, 32, False, False),
    ((8 * 64, 2 * 3 * 167 * 128), 0, 16, False, False),
    ((8 * 64, 19 * 23 * 128), 0, 32, False, True),
    ((8 * 64, 23 * 23 * 128), 0, 32, False, False),  # divided by 19 at most
    ((8 * 64, 3 * 131 * 128), 0, 32, False, True),
    ((8 * 64, 2 * 251 * 128), 0, 32, False, False),
    ((8 * 64, 2 * 226 * 128), 0, 32, False, True),  # a half for each stream
    ((8 * 64, 31 * 31 * 128), 0, 32, False, False),  # parts too small
    ((16, 8 * 239 * 128), 1, 32, False, True),  # columns that are scattered themselves
]


@pytest.mark.parametrize(("shape", "dim", "bits", "product", "stays"), RING)
def test_reduce_scatters_around_a_ring(shape: tuple[int, ...], dim: int, bits: int, product: bool, stays: bool) -> None:
    spec, axes, over = LINE
    # The products are x [b, d] by y [b, h, k] where they have three dimensions, the longest of which is d.
    longest = shape.index(max(shape))
    sides = ((longest,), tuple(d for d in range(len(shape)) if d != longest)) if product else ((), ())
    assert stays_scatter(TPU, mesh_of(spec, axes), over, ScatteredArray(shape, dim, bits, sides)) is stays


def test_arrays_of_no_elements_have_tiles_too() -> None:
    """`associative_scan` sums gradients of slices that take nothing."""
    stays_scatter(
        TPU,
        mesh_of("v5e-16", {"data": 4, "model": 4}),
        (1,),
        ScatteredArray((0, 256), 1, 64),
    )


@pytest.mark.parametrize(
    ("spec", "devices", "fits", "does_not"),
    [
        ("v4-32", 2, 293, 307),
        ("v5p-64", 4, 227, 229),
        ("v5e-16", 8, 151, 157),
        ("v5p-64", 16, 89, 97),
        ("v6e-64", 4, 467, 479),
        ("v6e-64", 8, 313, 317),
        ("v6e-64", 16, 181, 191),
        ("tpu7x-64", 2, 619, 631),
    ],
)
def test_parts_of_all_devices_fit_in_the_memory_of_a_kernel(spec: str, devices: int, fits: int, does_not: int) -> None:
    mesh = load_spec(spec).mesh({"data": devices, "model": load_spec(spec).devices // devices})
    for tiles, stays in ((fits, True), (2 * fits, True), (does_not, False), (2 * does_not, False)):
        array = ScatteredArray((devices * 256, tiles * 128), 0, 32)
        assert stays_scatter(find_profile(mesh.chip), mesh, (0,), array) is stays


@pytest.mark.parametrize(
    ("shape", "stays"), [((4 * 16, 128), False), ((4 * 32, 128), True), ((4 * 16, 512), True), ((4 * 8, 512), False)]
)
def test_reduce_scatters_in_a_square(shape: tuple[int, ...], stays: bool) -> None:
    """Four chips of 2 x 2 run four streams."""
    spec, axes, over = SQUARE
    assert stays_scatter(TPU, mesh_of(spec, axes), over, ScatteredArray(shape, 0, 32)) is stays


@pytest.mark.parametrize(
    ("spec", "shape", "axes", "stays"),
    [
        ("v4-32", {"data": 8, "model": 2}, (0, 1), False),  # 2 x 2 x 4
        ("v5e-16", {"data": 4, "model": 4}, (0, 1), False),  # 4 x 4
        ("v5e-16", {"data": 8, "model": 2}, (0,), True),  # half of it
        ("v6e-64", {"data": 8, "model": 8}, (0, 1), False),
        ("2xv5e-16", {"slice": 2, "data": 16}, (1,), False),  # each of two slices
        ("v6e-64", {"data": 8, "model": 8}, (1,), True),
        ("h100-8", {"data": 8}, (0,), True),
    ],
)
def test_sums_over_a_whole_slice(spec: str, shape: dict[str, int], axes: tuple[int, ...], stays: bool) -> None:
    assert (
        stays_scatter(
            find_profile(mesh_of(spec, shape).chip),
            mesh_of(spec, shape),
            axes,
            ScatteredArray((4096, 2048), 0, 32, ((0,), (1,))),
        )
        is stays
    )


def test_promises_for_the_chip_and_for_the_partitioner() -> None:
    """x [64, 200] over 4 devices, result [64, 64] scattered by rows to [16, 64]: one tile of columns and 16 rows, a
    tile each way. [32, 64] would be 8 rows: all of it is reduced, and each keeps its part.
    """
    mesh = round_mesh(data=4)
    for rows, kind, size in ((64, "reduce-scatter", 16 * 64 * 4), (32, "all-reduce", 32 * 64 * 4)):
        case = case_of(lambda x, w: x @ w, arg(rows, 200), arg(200, 64), mesh=mesh, profile=TILED)
        plan = (case.shard("x.1", "data"), case.shard("x.0", "data"))
        (promised,) = collective_facts(case.source, case.evaluator, plan)
        assert (promised.kind, promised.bytes) == (kind, size)
        before = promised.as_written()
        assert (before.kind, before.bytes) == ("reduce-scatter", rows // 4 * 64 * 4)
        assert (promised == before) is (kind == "reduce-scatter")


def test_what_is_only_transposed() -> None:
    program = case_of(lambda x, y: (x @ y).transpose(2, 0, 1) + 1, arg(32, 8, 64), arg(64, 160)).program
    (product,) = (op for op in program.ops if op.name == "stablehlo.dot_general")
    found = transposed(program, product.results[0])
    assert found and found.order == (2, 0, 1) and program.values[found.value].shape == (160, 32, 8)
    assert sides_of(product) == ((0, 1), (2,))
    twice = case_of(lambda x, y: [z := x @ y, z.transpose(2, 0, 1)], arg(32, 8, 64), arg(64, 160)).program
    (product,) = (op for op in twice.ops if op.name == "stablehlo.dot_general")
    assert transposed(twice, product.results[0]) is None


@pytest.mark.parametrize(("dtype", "kind"), [("float16", "all-reduce"), ("bfloat16", "reduce-scatter")])
def test_sums_of_f16_are_not_scattered(dtype: str, kind: str) -> None:
    arguments = arg(4096, 1024, dtype=jnp.dtype(dtype)), arg(1024, 4096, dtype=jnp.dtype(dtype))
    case = case_of(lambda x, w: x @ w, *arguments, mesh=round_mesh(data=4), profile=TILED)
    plan = (case.shard("x.1", "data"), case.shard("x.0", "data"))
    assert [promised.kind for promised in collective_facts(case.source, case.evaluator, plan)] == [kind]


def test_dimensions_of_size_one_are_transposed_like_any_other() -> None:
    program = case_of(lambda x: jnp.tanh(jnp.tanh(x).transpose(1, 0, 2)), arg(32, 1, 1)).program
    (first, _) = (op for op in program.ops if op.name == "stablehlo.tanh")
    found = transposed(program, first.results[0])
    assert found and sorted(found.order) == [0, 1, 2] and found.order[1] == 0


def test_a_head_alone_and_the_one_head_of_a_device() -> None:
    """Gradients of keys' weights [128, heads, 64] over 8: 16 rows a device come apart if there is one head, and not if
    a device has one of two, which stays a dimension outside of them.
    """
    mesh = mesh_of("v4-32", {"data": 8, "model": 2})
    for heads, kind in ((1, "reduce-scatter"), (2, "all-reduce")):
        case = case_of(
            lambda x, y: jnp.einsum("bd,bhk->dhk", x, y), arg(64, 128), arg(64, heads, 64), mesh=mesh, profile=TILED
        )
        plan = [case.shard("x.0", "data"), case.shard("x.1", "data")]
        plan += [case.shard("y.1", "model")] if heads > 1 else []
        assert [use.kind for use in case.evaluator.collectives(tuple(plan))] == [kind]


def test_gathers_of_short_vectors_become_all_reduces() -> None:
    """From 4 devices: 512 elements come in rows of 128, 256 do not; a matrix of as few is gathered."""
    mesh = round_mesh(data=4)
    for shape, kind in (((512,), "all-gather"), ((256,), "all-reduce"), ((1, 256), "all-gather")):
        case = case_of(
            lambda v, w: v + w,
            arg(*shape),
            arg(*shape),
            mesh=mesh,
            pins=("v=" + "-," * (len(shape) - 1) + "data",),
            profile=TILED,
        )
        (use,) = case.evaluator.collectives(())
        assert (use.kind, use.bytes, use.written) == (kind, prod(shape) * 4, ("all-gather", prod(shape) * 4))


PADDED = """HloModule jit_f, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %r = f32[] add(%a, %b)
}

%all-reduce-scatter (input: f32[2048,2048]) -> f32[528,2048] {
  %zero = f32[] constant(0)
  %pad = f32[2112,2048]{1,0:T(8,128)} pad(%input, %zero), padding=0_64x0_0
  %ar = f32[2112,2048]{1,0} all-reduce(%pad), channel_id=5, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %ds = f32[528,2048]{1,0} dynamic-slice(%ar, %at, %zero), dynamic_slice_sizes={528,2048}
}

ENTRY %main (a: f32[2048,2048]) -> f32[528,2048] {
  ROOT %rs = f32[528,2048]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter
}
"""


def test_padding_is_not_counted() -> None:
    assert collectives_in(PADDED, ("data",), (4,)) == [
        CompiledCollective("reduce-scatter", ("data",), 512 * 2048 * 4, 1.0)
    ]


def _read(how: str) -> Callable[..., Any]:
    bf16 = jnp.bfloat16
    table: dict[str, Callable[..., Any]] = {
        "as it is": lambda y, c: y * 2,
        "converted": lambda y, c: y.astype(bf16) * 2,
        "converted after a move": lambda y, c: jnp.pad(y.T, ((0, 0), (0, 2))).astype(bf16),
        "converted after arithmetic": lambda y, c: (y * 2).astype(bf16),
        "multiplied": lambda y, c: y @ c,
        "multiplied and more": lambda y, c: (y @ c, y + 1),
        "converted and multiplied": lambda y, c: (y @ c, y.astype(bf16)),
    }
    return table[how]


@pytest.mark.parametrize(
    ("how", "part"),
    [
        ("as it is", 1.0),
        ("converted", 0.5),
        ("converted after a move", 0.5),
        ("converted after arithmetic", 1.0),
        ("multiplied", 0.5),
        ("multiplied and more", 1.0),
        ("converted and multiplied", 0.5),
    ],
)
def test_all_reduces_are_as_narrow_as_what_reads_them(how: str, part: float) -> None:
    """x @ w is partial over 4 devices and read in different ways; where the compiler narrows, and where it does not."""
    for narrows, expected in ((True, part), (False, 1.0)):
        profile = replace(PLAIN, passes=PLAIN.passes | {"narrowing"}) if narrows else PLAIN
        mesh = round_mesh(data=4)
        case = case_of(
            lambda x, w, c: _read(how)(x @ w, c), arg(60, 200), arg(200, 64), arg(64, 20), mesh=mesh, profile=profile
        )
        use = next(u for u in case.evaluator.collectives((case.shard("x.1", "data"),)) if u.kind == "all-reduce")
        assert (use.bytes, use.written) == (expected * 60 * 64 * 4, ("all-reduce", 60 * 64 * 4.0))


def test_sums_are_as_narrow_as_what_reads_them_and_scatters_are_not() -> None:
    mesh = round_mesh(data=4)
    arguments = (arg(64, 200), arg(200, 64), arg(200, 64))
    case = case_of(lambda x, w, v: (x @ w + x @ v).astype(jnp.bfloat16), *arguments, mesh=mesh, profile=TILED)
    inner = case.shard("x.1", "data")
    assert case.collectives((inner,)) == [("all-reduce", ("data",), 64 * 64 * 2.0, 1.0)]
    assert case.collectives((inner, case.shard("x.0", "data"))) == [("reduce-scatter", ("data",), 16 * 64 * 4.0, 1.0)]


# What a sum over these axes is cut along by what reads it -> what XLA:GPU (and XLA:TPU, over its whole mesh) makes.
CUT = [
    ("h100-8", "data model", "data+model", "reduce-scatter"),
    ("h100-8", "data model", "model+data", "all-reduce"),
    ("h100-8", "model data", "data+model", "all-reduce"),
    ("h100-8", "model data", "model+data", "reduce-scatter"),
    ("v4-32", "data model", "data+model", "all-reduce"),
    ("v4-32", "data model", "model+data", "all-reduce"),
]


@pytest.mark.parametrize(("mesh", "over", "cut", "kind"), CUT)
def test_pieces_in_another_order_than_the_sum_are_reduced_whole(mesh: str, over: str, cut: str, kind: str) -> None:
    """The gradient of a look-up, of which the result takes pieces along all axes. Seen with `toast verify`, jaxlib
    0.10.2 and libtpu 0.0.42.1."""
    case = case_of(
        lambda i, g: jnp.zeros((16384, 256)).at[i].add(g), arg(65536, dtype=jnp.int32), arg(65536, 256), mesh=mesh,
        pins=(f"result={cut},-",),
    )  # fmt: skip
    plan = tuple(case.shard(place, axis) for axis in over.split() for place in ("i.0", "g.0"))
    ((found, axes, size, _),) = case.collectives(plan)
    whole = 16384 * 256 * 4
    assert (found, set(axes)) == (kind, {"data", "model"})
    assert size == (whole if kind == "all-reduce" else whole / prod(case.problem.mesh.sizes))


# The axis that a sum is scattered over, along its columns; how all that read it take it; what XLA:GPU makes of it, and
# XLA:TPU on v4-32 as well.
PIECES = [
    ("products", "data", "model,data", ["all-reduce data model 1"]),
    ("products", "model", "data,model", ["all-reduce data model 1"]),
    ("products", "data", "-,data+model", ["all-reduce data model 1"]),
    ("products", "", "data,model", ["all-reduce data model 1"]),
    ("look-up", "data", "model,data", ["all-reduce data model 1"]),
    ("look-up", "data", "-,data+model", ["all-reduce data model 1"]),
    ("look-up", "", "data,model", ["all-reduce data model 1"]),
    ("product", "", "data,model", ["all-reduce data model 1"]),
    ("product", "data", "model,data", ["reduce-scatter data 1/4", "reduce-scatter model 1/8"]),
    ("product", "model", "-,model+data", ["reduce-scatter data 1/8", "reduce-scatter model 1/2"]),
]


@pytest.mark.parametrize(("made_by", "scattered", "cut", "expected"), PIECES)
def test_pieces_along_several_dimensions_and_pieces_of_pieces_are_reduced_whole(
    made_by: str, scattered: str, cut: str, expected: list[str]
) -> None:
    rows, made = _SUMMED[made_by]
    case = case_of(made, *rows, mesh="h100-8", pins=(f"result={cut}",))
    plan = tuple(case.shard(place, axis) for axis in ("data", "model") for place in _BATCH[made_by])
    if scattered:
        plan += (case.shard("g.1", scattered),)
    whole = case.program.values[case.program.results[0].value].bytes
    found = [(kind, " ".join(axes), Fraction(size) / whole) for kind, axes, size, _ in case.collectives(plan)]
    assert sorted(f"{kind} {axes} {part}" for kind, axes, part in found) == expected
    lowered, names = case.lowered(plan), case.problem.mesh.names
    assert sorted((one.kind, " ".join(names[axis] for axis in one.axes)) for one in lowered.collectives) == sorted(
        (kind, axes) for kind, axes, _ in found
    )


@pytest.mark.parametrize("first", [0, 1])
def test_a_scatter_stays_whichever_plan_is_priced_first(first: int) -> None:
    """Over axes 2 and 1, in this order, a scatter stays if it is all of one step, and not if axis 0 comes before."""
    problem = problem_of(source_of(lambda x, w: x @ w, arg(512, 64), arg(64, 512)), "v4-32", {"a": 2, "b": 2, "c": 4})
    whole, half, to = ((), ()), ((0,), ()), ((0, 2, 1), ())
    (product,) = (number for number, op in enumerate(problem.program.ops) if op.name == DOT_GENERAL)
    cases = [
        (OpSharding((), (), (at,), (to,), (to,), (), (over,)), stays)
        for at, over, stays in ((half, (2, 1), True), (whole, (0, 2, 1), False))
    ]
    fates = ScatterDecisions(problem, TPU)
    for op_sharding, stays in (cases[first], cases[1 - first]):
        assert fates.stays(ScatterSource(product, 0), (1, 2), half, op_sharding) is stays


def test_terms_that_stay_apart_are_scattered_as_products_are_alone() -> None:
    """The gradients of queries, keys and values are added up in pieces over both axes: XLA scatters each product."""
    problem = problem_of(sample("moe_tiny")[0], "h100-8")
    plan = strategy(problem, "megatron+sequence")
    ops, found = problem.program.ops, lower(problem, plan).collectives
    products = [one for one in found if one.reason == "partial" and ops[one.op].name == DOT_GENERAL]
    assert not [one for one in products if one.kind == "all-reduce" and one.local_bytes > 2e5]
    priced = Evaluator(problem).collectives(plan)
    assert sum(use.count for use in priced if use.reason == "partial" and use.written[0] == "reduce-scatter") == sum(
        one.runs for one in found if one.reason == "partial" and one.kind == "reduce-scatter"
    )


_SUMMED: dict[str, tuple[tuple[Any, ...], Callable[..., Any]]] = {
    "product": ((arg(8192, 512), arg(8192, 512)), lambda x, g: x.T @ g),
    "products": ((arg(8192, 512), arg(8192, 512), arg(8192, 512)), lambda x, g, y: x.T @ g + y.T @ g),
    "look-up": ((arg(8192, dtype=jnp.int32), arg(8192, 512)), lambda x, g: jnp.zeros((1024, 512)).at[x].add(g)),
}
_BATCH = {"product": ("x.0",), "products": ("x.0",), "look-up": ("x.0", "g.0")}


# -- all-gathers over a whole slice, as `python -m benchmarks.singles` saw them compiled


MIB = 2**20


@pytest.mark.parametrize(
    ("named", "axes", "mib", "stays"),
    [
        ("v5e-256:data=16,model=16", (0, 1), 16, False),
        ("v5e-256:data=16,model=16", (0, 1), 18, True),
        ("v5e-256:data=16,model=16", (0,), 2, True),
        ("v5e-256:data=256", (0,), 2, False),
        ("v5e-256:data=16,a=4,b=4", (0, 1), 2, True),
        ("v5e-16:data=4,model=4", (0, 1), 2, True),
        ("v4-128:data=8,model=8", (1, 0), 64, False),
        ("v4-128:data=8,model=8", (1,), 64, True),
        ("v5p-64:data=8,model=4", (0, 1), 2, True),
        ("v6e-64:data=8,model=8", (0, 1), 16, False),
        ("v6e-64:data=8,model=8", (0, 1), 64, True),
        ("h100-64:data=64", (0,), 2, True),
    ],
)
def test_gathers_over_all_of_a_large_slice_become_all_reduces(
    named: str, axes: tuple[int, ...], mib: int, stays: bool
) -> None:
    spec, _, shape = named.partition(":")
    mesh = load_spec(spec).mesh(parse_shape(shape))
    profile = find_profile(mesh.chip)
    assert stays_slice_gather(profile, mesh, axes, mib * MIB) is stays
    if not stays:
        assert stays_slice_gather(profile.without("slice-gathers"), mesh, axes, mib * MIB)


# -- all-reduces that XLA:TPU moves behind a loop: what a loop only adds up, in one piece or in several


MOVING = replace(PLAIN, passes=PLAIN.passes | {"reduction-motion"})
TRIPS = 5


def loop(step: Any) -> Any:
    """A loop over gradients of `x.T @ (g * trip)` with two carries; the body is `step(a, b, gradient)`."""

    def run(x: Any, g: Any) -> Any:
        def body(trip: Any, carried: Any) -> Any:
            return step(*carried, x.T @ jnp.sin(g * trip))

        return lax.fori_loop(0, TRIPS, body, (jnp.zeros((16, 8)), jnp.zeros((16, 8))))

    return run


@pytest.mark.parametrize(
    ("what", "step", "each"),
    [
        ("two pieces, each added to a carry", lambda a, b, y: (a + y[:, :8], b + y[:, 8:]), 1 / TRIPS),
        ("pieces of a transposed array", lambda a, b, y: (a + y.T[:8].T, b + y[:, 8:]), 1 / TRIPS),
        ("a piece that is changed first", lambda a, b, y: (a + jnp.sin(y[:, :8]), b + y[:, 8:]), 1),
        ("a carry that is read besides", lambda a, b, y: (a + y[:, :8], jnp.sin(a) + b + y[:, 8:]), 1),
        ("pieces that change places", lambda a, b, y: (b + y[:, :8], a + y[:, 8:]), 1),
    ],
)
def test_what_is_only_added_up_is_reduced_once(what: str, step: Any, each: float) -> None:
    program = program_of(loop(step), arg(64, 16), arg(64, 16))
    (product,) = (op for op in program.ops if op.name == DOT_GENERAL)
    assert reductions_each(program, product.results[0], MOVING) == each, what
    assert reductions_each(program, product.results[0], PLAIN) == 1


def test_it_takes_the_time_of_one_and_is_promised_as_written() -> None:
    def pieces(a: Any, b: Any, y: Any) -> Any:
        return a + y[:, :8], b + y[:, 8:]

    cases = [
        case_of(loop(pieces), arg(64, 16), arg(64, 16), mesh=round_mesh(data=4), profile=profile)
        for profile in (PLAIN, MOVING)
    ]
    plain, moved = (case.evaluator.collectives((case.shard("x.0", "data"),)) for case in cases)
    assert [use.count for use in plain] == [use.count for use in moved] == [TRIPS]
    assert sum(use.seconds for use in moved) == pytest.approx(sum(use.seconds for use in plain) / TRIPS)
