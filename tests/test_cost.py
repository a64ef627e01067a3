"""The cost model on programs small enough to work out by hand, and laws for random ones.

`ROUND_CHIP`: 1e12 FLOP/s for f32 products, 1e10 for everything else, 1e9 bytes/s of memory; links carry 1e8 bytes/s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from programs import PLAIN, ROUND_CHIP, arg, case_of, problem_of, round_mesh, sample, source_of
from random_programs import cases, plans

from toast_cli.hardware import Axis, Mesh
from toast_cli.plan.decisions import Plan
from toast_cli.plan.loops import LOOP_EDGES, edges, held_over
from toast_cli.plan.problem import Problem, make_problem
from toast_cli.price.buffers import Buffers
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.fusion import materialised
from toast_cli.price.items import make_items
from toast_cli.price.kernel_pricing import WorkPricer
from toast_cli.price.pricing import Pricer
from toast_cli.price.profile import CompilerProfile

US = 1e-6
KIB = 1024.0

# ---------------------------------------------------------------- roofline


def product(x: Any, w: Any) -> Any:
    return x @ w


X, W = arg(100, 200), arg(200, 300)

# name, function, arguments, seconds on one device
ROOFLINES: list[tuple[str, Any, tuple[Any, ...], float]] = [
    # 2*100*200*300 = 12e6 FLOP at 1e12: 12 us; (20,000 + 60,000 + 30,000) * 4 = 440,000 bytes at 1e9: 440 us.
    ("product, bound by memory", product, (X, W), 440 * US),
    # The product is read by one elementwise op of its size, which writes it: the same bytes, and 30,000 comparisons
    # less than that.
    ("product with an epilogue", lambda x, w: jnp.maximum(x @ w, 0.0), (X, W), (320 + 120) * US),
    # Reads 80,000 bytes and writes 80,000: 160 us; 20,000 additions at 1e10: 2 us.
    ("elementwise", lambda x: x + 1.0, (X,), 160 * US),
    # The sine lies in no memory: reading is its part (80 us; 20,000 * 4 FLOP: 8 us), writing that of the addition (80
    # us).
    ("a chain of two is one", lambda x: jnp.sin(x) + 1.0, (X,), 160 * US),
    # 40 * 20,000 * 4 FLOP at 1e10 = 320 us, which hides 160 us of reading and writing.
    ("bound by arithmetic", lambda x: _times(40, jnp.sin, x), (arg(100, 200),), 320 * US),
    # Reads 80,000 bytes, writes 800.
    ("sum", lambda x: jnp.sum(x, 0), (X,), 80.8 * US),
    # Only the slice is read and written: 10 * 200 * 4 bytes each.
    ("slice", lambda x: lax.slice_in_dim(x, 0, 10), (X,), 16 * US),
    # 5 runs of (40,000 + 40,000 + 40,000) bytes.
    ("loop", lambda x, w: lax.fori_loop(0, 5, lambda _, c: c @ w, x), (arg(100, 100),) * 2, 5 * 120 * US),
]


def _times(count: int, function: Any, x: Any) -> Any:
    for _ in range(count):
        x = function(x)
    return x


@pytest.mark.parametrize(("run", "shapes", "seconds"), [r[1:] for r in ROOFLINES], ids=[r[0] for r in ROOFLINES])
def test_compute_on_one_device(run: Any, shapes: tuple[Any, ...], seconds: float) -> None:
    cost = case_of(run, *shapes).evaluator.cost(())
    assert cost.compute_seconds == pytest.approx(seconds, rel=1e-3)
    assert cost.communication_seconds == 0.0


def test_products_run_at_the_rate_of_their_type() -> None:
    fast_memory = replace(round_mesh(data=4), chip=replace(ROUND_CHIP, memory_bytes_per_second=1e15))
    for dtype, rate in ((jnp.float32, 1e12), (jnp.bfloat16, 2e12)):
        case = case_of(product, arg(100, 200, dtype=dtype), arg(200, 300, dtype=dtype), mesh=fast_memory)
        assert case.evaluator.cost(()).compute_seconds == pytest.approx(12e6 / rate, rel=1e-6)


def test_splitting_divides_what_it_splits() -> None:
    """Rows of x over 4: a quarter of x (20,000 bytes), all of w (240,000), a quarter of the result (30,000)."""
    case = case_of(product, X, W)
    assert case.evaluator.cost((case.shard("x.0", "data"),)).compute_seconds == pytest.approx(290 * US, rel=1e-3)


# ---------------------------------------------------------------- communication


def test_an_all_reduce_takes_twice_a_gather() -> None:
    """x [100, 200 split by 4] @ w [200 split by 4, 300]: 120,000 bytes partial; 2 * 3/4 * 120,000 / 1e8 = 1800 us."""
    case = case_of(product, X, W)
    plan = (case.shard("x.1", "data"),)
    cost = case.evaluator.cost(plan)
    assert cost.communication_seconds == pytest.approx(1800 * US)
    assert cost.compute_seconds == pytest.approx((20 + 60 + 120) * US, rel=1e-3)
    assert cost.step_seconds == cost.compute_seconds + cost.communication_seconds
    least = case.evaluator.exact_cost(plan).least_seconds
    assert least == pytest.approx(cost.step_seconds)  # nothing is left to compute


def test_a_reshard_takes_a_gather() -> None:
    """v and w are split by columns, so x [100, 200 split by 4] is gathered, once for both: 3/4 * 80,000 / 1e8 = 600 us;
    half of that on a chip that multiplies f32 in one bf16 pass, whose compiler converts before it gathers.
    """
    for narrow, seconds, size in ((False, 600 * US, 80_000.0), (True, 300 * US, 40_000.0)):
        profile = replace(PLAIN, passes=PLAIN.passes | {"narrowing"}) if narrow else PLAIN
        case = case_of(lambda x, v, w: (x @ v, x @ w), X, W, W, mesh=round_mesh(data=4), profile=profile)
        plan = (case.shard("v.1", "data"), case.shard("w.1", "data"), case.shard("x.1", "data"))
        assert case.evaluator.cost(plan).communication_seconds == pytest.approx(seconds)
        assert case.collectives(plan) == [("all-gather", ("data",), size, 1.0)]
        assert [use.written for use in case.evaluator.collectives(plan)] == [("all-gather", 80_000.0)]


def test_what_stands_on_the_critical_path() -> None:
    """Two layers, data parallel with the weights split at rest (FSDP): gathers and gradient reductions can hide. Tensor
    parallel: the all-reduce between the layers cannot.
    """

    def step(w: Any, v: Any, x: Any) -> Any:
        gradients = jax.grad(lambda w, v: jnp.sum((x @ w @ v) ** 2), argnums=(0, 1))(w, v)
        return [p - 0.1 * g for p, g in zip((w, v), gradients, strict=True)]

    case = case_of(step, arg(64, 64), arg(64, 64), arg(128, 64))
    fsdp = (case.shard("x.0", "data"), case.shard("w.0", "data"), case.shard("v.0", "data"))
    found = case.evaluator.collectives(fsdp)
    assert found
    assert not any(use.waited_for for use in found)
    tensor = case.evaluator.collectives((case.shard("v.0", "data"),))  # contracts the dimension between the layers
    assert any(use.waited_for and use.kind == "all-reduce" for use in tensor)


def test_scanned_layers_gather_early_and_reduce_late() -> None:
    """The same through a scan: stacked weights are sliced inside, stacked gradients leave through the carry."""

    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            return jnp.sum(lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0])

        return ws - 0.1 * jax.grad(loss)(ws)

    case = case_of(step, arg(4, 64, 64), arg(128, 64))
    found = case.evaluator.collectives((case.shard("x.0", "data"), case.shard("ws.1", "data")))
    assert {use.kind for use in found} >= {"all-gather"}
    assert not any(use.waited_for for use in found if use.kind in ("all-gather", "reduce-scatter"))


def test_neighbours_of_a_split_stencil_are_exchanged() -> None:
    """A 3-wide window over 64 rows on 4 devices: 2 of each 16 rows of 4 * 64 * 8 * 8 * 4 / 4 = 16,384 bytes cross,
    20.48 us.
    """

    def blur(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    case = case_of(blur, arg(4, 64, 8, 8), arg(3, 3, 8, 8))
    plan = (case.shard("x.1", "data"),)
    assert case.collectives(plan) == [("collective-permute", ("data",), 4 * 64 * 8 * 8 * 4 / 4 / 16, 2.0)]


def test_terms_of_a_sum_are_reduced_together() -> None:
    case = case_of(lambda x, v, w: x @ v + x @ w, *(arg(8, 8),) * 3)
    plan = (case.shard("x.1", "data"),)
    assert case.collectives(plan) == [("all-reduce", ("data",), 8 * 8 * 4.0, 1.0)]


# ---------------------------------------------------------------- what is written to memory


def stored(run: Any, *shapes: Any) -> list[str]:
    """Ops whose results reach memory, in order, arguments left out."""
    problem = problem_of(source_of(run, *shapes), round_mesh(data=4))
    program = problem.program
    kept = materialised(program, problem.free, PLAIN)[0]
    return [
        op.name.partition(".")[2] for op in program.ops for v in op.results if kept[v] and op.name != "toast.argument"
    ]


S = arg(16, 16)

# name, function, arguments, ops whose results reach memory
STORED: list[tuple[str, Any, tuple[Any, ...], list[str]]] = [
    ("elementwise work is fused into what reads it", lambda x: jnp.sin(x) * 2.0 + 1.0, (S,), ["add"]),
    ("a product is read from memory", lambda x, w: (x @ w) @ w, (S, S), ["dot_general", "dot_general"]),
    ("a product is finished by its one elementwise reader", lambda x, w: jnp.tanh(x @ w), (S, S), ["tanh"]),
    ("or by several", lambda x, w: (lambda y: (jnp.sin(y), jnp.cos(y)))(x @ w), (S, S), ["sine", "cosine"]),
    # Written as the view of it that the sum reads.
    ("not by one of another size", lambda x, w: (x @ w)[None] + jnp.sin(x).reshape(16, 4, 4).sum(1)[..., None, None],
     (S, S), ["reduce", "broadcast_in_dim", "add"]),
    ("nor by one that needs what is made later", lambda x, w: (lambda y: (jnp.sin(y), y * (w @ y)))(x @ w), (S, S),
     ["dot_general", "sine", "multiply"]),
    ("what a product reads is computed as it reads it", lambda x, w: jnp.sin(x) @ w, (S, S), ["dot_general"]),
    ("unless it is a view of something there", lambda x, w: x.T @ w, (S, S), ["dot_general"]),
    ("sums are fused with what they read", lambda x: jnp.sum(jnp.sin(x), 0), (S,), ["reduce"]),
    # Reads x twice, 2 KiB; written it would be 1 + 1 + 2.
    ("what takes few bytes to compute is computed for each reader",
     lambda x: (lambda y: y.sum(0) + y.sum(1))(jnp.exp(x)), (S,),
     ["reduce", "reduce", "add"]),
    # Reads x, v and w three times, 9 KiB; written it is 3 + 1 + 3.
    ("what takes many is written", lambda x, v, w: (lambda y: y.sum(0) + y.sum(1) + y.max(0))(x * v + w), (S, S, S),
     ["add", "reduce", "reduce", "reduce", "add"]),
    # Two products read the product of g and u. Computed for each: g and u twice; written as u is made: g, and one
    # written and read twice.
    ("or what is computed where a product is made",
     lambda x, v, w: (lambda g, u: (lambda h: (h @ v, u @ g, x @ h))(g * u))(x @ v, x @ w),
     (S, S, S), ["dot_general", "dot_general", "multiply", "dot_general", "dot_general", "dot_general"]),
    ("nothing is fused across a loop's boundary",
     lambda x, w: (lambda v: lax.fori_loop(0, 3, lambda _, c: c @ v, x))(w * 2.0), (S, S),
     ["multiply", "carry", "dot_general"]),
    ("constants are made where they are read", lambda x: x + jnp.tril(jnp.ones((16, 16))), (S,), ["add"]),
    ("unless they leave", lambda x: (x * 2.0, jnp.ones((64, 64))), (S,), ["multiply", "broadcast_in_dim"]),
]  # fmt: skip


@pytest.mark.parametrize(("run", "shapes", "expected"), [s[1:] for s in STORED], ids=[s[0] for s in STORED])
def test_what_reaches_memory(run: Any, shapes: tuple[Any, ...], expected: list[str]) -> None:
    assert stored(run, *shapes) == expected


# ---------------------------------------------------------------- liveness


def into_cache(cache: Any, x: Any) -> Any:
    def body(i: Any, state: Any) -> Any:
        cache, y = state
        y = jnp.sin(y)
        return lax.dynamic_update_slice(cache, y[None], (i, 0)), y

    return lax.fori_loop(0, 8, body, (cache, x))


def with_cache(cache: Any, x: Any) -> Any:
    def body(i: Any, state: Any) -> Any:
        cache, y = state
        cache = lax.dynamic_update_slice(cache, y[None], (i, 0))
        return cache, jnp.sin(y @ (cache.T @ cache))

    return lax.fori_loop(0, 8, body, (cache, x))


def scan_and_stack(x: Any, w: Any) -> Any:
    return lax.scan(lambda c, _: (c @ w, c), x, None, length=8)


CACHE, ROW = arg(4096, 16), arg(16)  # 256 KiB, 1/16 KiB
COUNTER = 4 / KIB

# name, function, arguments (f32[16,16] is 1 KiB), donated, peak in KiB. x, w, … are arguments, c a carry, y what a body
# yields.
PEAKS: list[tuple[str, Any, tuple[Any, ...], tuple[int, ...], float]] = [
    ("x, result", lambda x: x * 2.0, (S,), (), 2),
    ("in place of a donated argument", lambda x: x * 2.0, (S,), (0,), 1),
    # x, w, and the product before it takes x's place
    ("not while it is still read", lambda x, w: x @ w, (S, S), (0,), 3),
    ("x, w, result", lambda x, w: jnp.sin(x) @ w, (S, S), (), 3),
    ("x, w, two products at a time", lambda x, w: x @ w @ w @ w, (S, S), (), 4),
    ("x, w, two results", lambda x, w: (x @ w, w @ x), (S, S), (), 4),
    ("a value waits for its last reader", lambda x, w: (lambda y: y @ (w @ (w @ y)))(x @ w), (S, S), (), 5),
    ("elementwise work takes its operand's place", lambda x, w: jnp.cos(jnp.exp(x @ w)) @ w, (S, S), (), 4),
    ("loop: x, w, c, y", lambda x, w: lax.fori_loop(0, 3, lambda _, c: c @ w, x), (S, S), (), 4),
    ("loop in a donated buffer: x, w, y", lambda x, w: lax.fori_loop(0, 3, lambda _, c: c @ w, x), (S, S), (0,), 3),
    ("loop in place: x, c", lambda x: lax.fori_loop(0, 3, lambda _, c: jnp.sin(c), x), (S,), (), 2),
    ("loop in place of a donated buffer", lambda x: lax.fori_loop(0, 3, lambda _, c: jnp.sin(c), x), (S,), (0,), 1),
    ("after the loop: x, w, c, y", lambda x, w: lax.fori_loop(0, 3, lambda _, c: c @ w, x) @ w, (S, S), (), 4),
    ("made before a loop, read in it: x, w, v, c, y",
     lambda x, w: (lambda v: lax.fori_loop(0, 3, lambda _, c: c @ v, x))(jnp.sin(w)), (S, S), (), 5),
    ("swapped carries: a, b, c, d, y", lambda a, b: lax.fori_loop(0, 3, lambda _, c: (c[1], c[0] @ c[1]), (a, b)),
     (S, S), (), 5),
    ("a loop in a loop: x, w, both carries, y",
     lambda x, w: lax.fori_loop(0, 3, lambda _, c: lax.fori_loop(0, 3, lambda _, d: d @ w, c) + c, x), (S, S), (), 5),
    ("stacked by a scan: x, w, c, y, the stack (8), the counter", scan_and_stack, (S, S), (), 4 + 8 + COUNTER),
    ("slices of a stack: x, the stack (8), c, y, the counter",
     lambda x, w: lax.scan(lambda c, v: (c @ v, None), x, w)[0], (S, arg(8, 16, 16)), (), 1 + 8 + 2 + COUNTER),
    ("a cache updated in place: cache, x, y, two counters", into_cache, (CACHE, ROW), (0,), 256 + 2 / 16 + 2 * COUNTER),
    ("a cache that is not donated is copied once", into_cache, (CACHE, ROW), (), 2 * 256 + 2 / 16 + 2 * COUNTER),
    ("a cache updated and read: cache, x, y, the next y, what is made of the cache, the counter",
     with_cache, (CACHE, ROW), (0,), 256 + 3 / 16 + 1 + COUNTER),
    ("a cache whose old contents are read later is copied",
     lambda cache, x: (lax.dynamic_update_slice(cache, x[None], (3, 0)), cache.T @ cache), (CACHE, ROW), (0,
         ), 2 * 256 + 1 / 16 + 1),
]  # fmt: skip


@pytest.mark.parametrize(("run", "shapes", "donate", "kib"), [p[1:] for p in PEAKS], ids=[p[0] for p in PEAKS])
def test_peak_memory_on_one_device(run: Any, shapes: tuple[Any, ...], donate: tuple[int, ...], kib: float) -> None:
    evaluator = case_of(run, *shapes, donate=donate).evaluator
    assert evaluator.exact_cost(()).peak_bytes / KIB == pytest.approx(kib)
    _, alive = evaluator.alive_at_peak(())
    assert sum(a.bytes for a in alive) / KIB == pytest.approx(kib)


def test_the_arrays_alive_at_the_peak_are_told_apart() -> None:
    case = case_of(lambda x, w: lax.fori_loop(0, 3, lambda _, c: c @ w, x), S, S)
    op, alive = case.evaluator.alive_at_peak(())
    assert case.program.ops[op].name == "stablehlo.dot_general"
    assert sorted(a.role for a in alive) == ["argument", "argument", "carry", "temporary"]


def layers(x: Any, w: Any) -> Any:
    for k in range(4):
        x = x @ w[k]
    return x


def test_a_gathered_copy_lives_from_its_first_to_its_last_reader() -> None:
    """x [16 split by 4, 16]: 1/4 KiB. Each of four weights (1/4 KiB at rest) is gathered (1 KiB), one at a time."""
    case = case_of(layers, S, [S] * 4)
    plan = (case.shard("x.0", "data"), *(case.shard(f"w[{k}].0", "data") for k in range(4)))
    _, alive = case.evaluator.alive_at_peak(plan)
    assert sorted((a.role, a.bytes / KIB) for a in alive) == [
        *[("argument", 0.25)] * 5,
        ("gathered", 1.0),
        *[("temporary", 0.25)] * 2,
    ]


def test_what_is_gathered_into_a_donated_buffer_takes_no_more() -> None:
    """ZeRO-1: both new weights are gathered in the end, into the buffers of the old ones."""

    def step(p: Any, m: Any, x: Any) -> Any:
        g = jax.grad(lambda p: jnp.sum((x @ p) ** 2))(p)
        return p - 0.9 * m - g, 0.9 * m + g

    case = case_of(step, arg(64, 64), arg(64, 64), arg(4, 64), donate=(0, 1))
    split = (case.shard("x.0", "data"), case.shard("x.1", "data"))
    weight, data = 64 * 64 * 4, 4 * 64 * 4 / 4
    whole = case.evaluator.exact_cost((*split, case.replicate("weights", "data")))
    assert whole.argument_bytes == weight + weight / 4 + data
    # At most beside the arguments: the gradient before it is scattered.
    assert whole.peak_bytes <= whole.argument_bytes + weight + 2 * data + weight / 4


# ---------------------------------------------------------------- laws


@settings(max_examples=30)
@given(st.data())
def test_plans_cost_the_same_after_any_other_plans(data: st.DataObject) -> None:
    """The evaluator works out what changed since the plans before; a fresh one starts from nothing."""
    case = data.draw(cases())
    for plan in data.draw(st.lists(plans(case.problem), min_size=1, max_size=6)):
        found, fresh = case.evaluator.cost(plan), Evaluator(case.problem).cost(plan)
        assert found.compute_seconds == pytest.approx(fresh.compute_seconds, rel=1e-9)
        assert found.communication_seconds == pytest.approx(fresh.communication_seconds, rel=1e-9)
        assert found.peak_bytes == pytest.approx(fresh.peak_bytes, rel=1e-9)
        assert found.argument_bytes == pytest.approx(fresh.argument_bytes, rel=1e-9)


@settings(max_examples=30)
@given(st.data())
def test_the_parts_add_up(data: st.DataObject) -> None:
    case = data.draw(cases())
    plan = data.draw(plans(case.problem))
    cost, devices = case.evaluator.exact_cost(plan), case.problem.mesh.devices
    assert sum(use.seconds for use in case.evaluator.collectives(plan)) == pytest.approx(
        cost.communication_seconds, rel=1e-9, abs=1e-12
    )
    _, alive = case.evaluator.alive_at_peak(plan)
    assert sum(a.bytes for a in alive) == pytest.approx(cost.peak_bytes)
    whole = sum(case.program.values[a.value].bytes for a in case.program.arguments)
    assert cost.argument_bytes * devices >= whole
    assert cost.peak_bytes >= cost.argument_bytes
    unsharded = case.evaluator.exact_cost(())
    assert cost.compute_seconds * devices >= unsharded.compute_seconds - 1e-11  # parts are rounded to 2**-48 seconds


def faster(mesh: Mesh, factor: float) -> Mesh:
    def quick(axis: Axis) -> Axis:
        return replace(axis, links=tuple(replace(k, bytes_per_second=k.bytes_per_second * factor) for k in axis.links))

    return replace(mesh, axes=tuple(map(quick, mesh.axes)))


@settings(max_examples=20)
@given(st.data(), st.floats(1.0, 100.0))
def test_a_faster_link_never_makes_a_plan_slower(data: st.DataObject, factor: float) -> None:
    case = data.draw(cases())
    plan: Plan = data.draw(plans(case.problem))
    slow = case.evaluator.cost(plan)
    fast = Evaluator(problem_of(case.source, faster(case.problem.mesh, factor))).cost(plan)
    assert fast.step_seconds <= slow.step_seconds * (1 + 1e-9)
    assert fast.compute_seconds == slow.compute_seconds
    assert fast.peak_bytes == slow.peak_bytes


def test_memory_is_looked_at_wherever_a_search_would_not() -> None:
    """A thousand moments: a search looks at a few hundred of them; the exact answer for one plan looks at all and
    remembers.
    """

    def run(x: Any, w: Any) -> Any:
        total = x
        for _ in range(400):
            total = jnp.tanh(total @ w) @ w.T
        return total

    case = case_of(run, S, S)
    evaluator = case.evaluator
    assert len(evaluator.timeline.candidates) > len(evaluator.timeline.moments)
    for plan in ((), (case.shard("x.0", "data"),), (case.shard("x.1", "data"),)):
        exact = evaluator.exact_cost(plan)
        assert exact.peak_bytes == evaluator.memory_profile(plan).max()
        evaluator.learn(plan)
        assert evaluator.cost(plan).peak_bytes == pytest.approx(exact.peak_bytes)


def test_what_is_all_reduced_and_then_cut_is_there_whole_until_it_is_cut() -> None:
    """A sum that goes on split along two dimensions is all-reduced, and cut by the kernel that reads it: the cosine's.
    Split along one it is scattered, and nobody has it whole."""

    def fn(x: Any, v: Any, w: Any) -> Any:
        return jnp.sort(jnp.cos(w + x.sum(0) * jnp.sort(v))) @ jnp.ones((256, 8))

    case = case_of(fn, arg(64, 256, 256), arg(256, 256), arg(256, 256), mesh=round_mesh(data=4, model=2))
    cosine = next(n for n, op in enumerate(case.program.ops) if op.name == "stablehlo.cosine")
    rows = case.shard("x.0", "data")
    twice = (rows, case.shard("x.0", "model"), case.shard("w.0", "data"), case.shard("w.1", "model"))
    for plan, kind, held in ((twice, "all-reduce", 256 - 32), ((rows, case.shard("w.0", "data")), "reduce-scatter", 0)):
        assert case.evaluator.collectives(plan)[0].kind == kind
        partial = case.evaluator.memory_by(plan, lambda value, role: role)["partial"] / 2**10
        moments = case.evaluator.timeline.candidates.tolist()
        made = partial.argmax()
        assert partial[made] == 256
        assert set(partial[made + 1 : moments.index(2 * cosine) + 1]) == {held}
        assert not partial[moments.index(2 * cosine) + 1 :].any()


@pytest.mark.parametrize("name", ["scan_tiny", "rnn_tiny", "itx_decode_tiny", "t2b_tiny"])
def test_nothing_is_over_before_it_began(name: str) -> None:
    """What reads a loop's result runs after the loop, so that arrays alive at a moment are as large as the profile
    says.
    """
    source, dimensions = sample(name)
    evaluator = Evaluator(make_problem(source.program, dimensions, round_mesh(data=4)))
    for intervals in evaluator.items.lives.intervals:
        assert all(last >= first - 1 for first, last in intervals)
    _, alive = evaluator.alive_at_peak(())
    assert sum(array.bytes for array in alive) == pytest.approx(evaluator.exact_cost(()).peak_bytes)


# -- the evaluator, which remembers and works out differences, against a plain one that walks over everything for
# each plan


def reference(problem: Problem, plan: Plan, profile: CompilerProfile) -> tuple[float, float, float, float]:
    """(compute seconds, communication seconds, peak bytes, argument bytes): every op and every tick looked at,
    nothing remembered.
    """
    items = make_items(problem, profile)
    pricer, working = Pricer(problem, items, {}), WorkPricer(problem, profile, {})
    buffers = Buffers(problem, items, pricer)
    lowered = {number: problem.op_sharding(number, plan) for number in range(len(problem.patterns))}
    lowered[LOOP_EDGES] = edges(problem.mesh.sizes, held_over(problem.roles, plan))
    compute = communication = arguments = 0.0
    for work in items.work:
        compute += working.seconds(work, lowered[work.pattern])
        communication += sum(use.seconds for use in pricer.work_collectives(work, lowered[work.pattern]))
    for read in items.neighbours:
        communication += sum(use.seconds for use in pricer.neighbour_collectives(read, lowered))
    for added in items.sums:
        communication += sum(use.seconds for use in pricer.sum_collectives(added, lowered))
    alive, brief = [0.0] * (items.lives.end + 2), [0.0] * (items.lives.end + 2)
    on_chip = buffers.on_chip
    for item in items.arrays:
        copies, made = pricer.copies(item, lowered), lowered[item.pattern].shardings[item.result]
        communication += sum(use.seconds for use in pricer.array_collectives(item, made, copies))
        for kind, size in buffers.held(item, lowered[item.pattern], copies):
            for value in item.values:
                for first, last in buffers.of_value(item, kind, value):
                    for step in range(first, last + 1):
                        alive[step] += size
                        if size <= on_chip.largest and buffers.is_brief(kind, value, (first, last)):
                            brief[step] += size
            if buffers.role(item, kind) == "argument":
                arguments += size * len(item.values)
    peak = max(a - min(b, on_chip.capacity) for a, b in zip(alive, brief, strict=True))
    return compute, communication, peak, arguments


@settings(max_examples=40)
@given(st.data())
def test_the_evaluator_agrees_with_a_plain_one(data: st.DataObject) -> None:
    case = data.draw(cases())
    for plan in data.draw(st.lists(plans(case.problem), min_size=1, max_size=4)):
        cost = case.evaluator.exact_cost(plan)
        found = (cost.compute_seconds, cost.communication_seconds, cost.peak_bytes, cost.argument_bytes)
        assert found == pytest.approx(reference(case.problem, plan, case.evaluator.profile), rel=1e-9, abs=1e-12)
