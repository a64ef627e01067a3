"""Loops: what they only read is gathered once before them; what may run before or after; sums that end them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from brute_force import best_of_all
from emitted import collectives, compiled, on_cpu, strategy
from jax import lax
from programs import PLAIN, Case, arg, case_of, evaluator_of, round_mesh, source_of
from test_gathered import compiled as sent
from test_gathered import promised

from toast_cli.plan.decisions import Plan, Replicate
from toast_cli.plan.loops import LOOP_READS
from toast_cli.plan.saved import carried_over, read_plan, save_plan
from toast_cli.price.evaluator import Evaluator
from toast_cli.program.ops import DOT_GENERAL
from toast_cli.report.explain.answers import explain
from toast_cli.report.explain.study import Study
from toast_cli.report.words import decision_text, short_text
from toast_cli.search.run import Settings, run_search

WIDTH, BATCH, TRIPS, LAYERS = 512, 2048, 8, 4
WEIGHT = 4 * WIDTH * WIDTH  # bytes
KIB = 2**10


def recurrent(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    def trip(h: jax.Array, _: None) -> tuple[jax.Array, None]:
        for w in ws:
            h = jnp.tanh(h @ w)
        return h, None

    return lax.scan(trip, x, None, length=TRIPS)[0]


def case(limit_bytes: int = 2**40, **sizes: int) -> Case:
    """Weights that rest split over data, and a batch that does."""
    mesh = round_mesh(limit_bytes=limit_bytes, **(sizes or {"data": 4}))
    pins = ("ws*=data,?", "x=data,None")
    return case_of(recurrent, [arg(WIDTH, WIDTH)] * LAYERS, arg(BATCH, WIDTH), mesh=mesh, pins=pins)


def held(of: Case, *axes: str) -> Plan:
    role, names = of.problem.roles.index(LOOP_READS), of.problem.mesh.names
    return tuple(Replicate(role, names.index(axis)) for axis in axes)


def test_gathers_before_the_loop_save_time_and_take_memory() -> None:
    """Each trip would gather four weights, one at a time: (p - 1) / p of 1 MiB at 100 MB/s each."""
    of = case()
    batch = of.shard("x.0", "data")
    inside, before = (of.evaluator.exact_cost((batch, *more)) for more in ((), held(of, "data")))
    once = LAYERS * 3 / 4 * WEIGHT / 1e8
    assert inside.communication_seconds == pytest.approx(TRIPS * once)
    assert before.communication_seconds == pytest.approx(once)
    assert before.compute_seconds == inside.compute_seconds
    assert before.peak_bytes - inside.peak_bytes == (LAYERS - 1) * WEIGHT


@pytest.mark.parametrize(("limit", "holds"), [(2**40, True), (8192 * KIB, True), (8191 * KIB, False)])
def test_a_search_gathers_before_the_loop_where_the_memory_is(limit: int, holds: bool) -> None:
    of = case(limit)
    found = run_search(of.evaluator, Settings(evaluations=200))
    assert found.fits
    assert any(isinstance(d, Replicate) for d in found.plan) == holds


def test_no_sharding_is_faster_than_the_bound() -> None:
    """It takes gathers to stand before the loop: of this plan they do, and it is the best."""
    of = case()
    plan = (of.shard("x.0", "data"), *held(of, "data"))
    assert best_of_all(of.problem).least == pytest.approx(of.evaluator.cost(plan).step_seconds, rel=1e-6)


def test_what_is_split_over_several_axes_is_held_over_all_at_once() -> None:
    """Neither axis alone gains anything, so that a search takes both together."""
    mesh = round_mesh(data=4, model=2)
    pins = ("ws*=data+model,None", "x=data+model,None")
    of = case_of(recurrent, [arg(WIDTH, WIDTH)] * LAYERS, arg(BATCH, WIDTH), mesh=mesh, pins=pins)
    found = run_search(of.evaluator, Settings(evaluations=200))
    assert {d for d in found.plan if isinstance(d, Replicate)} == set(held(of, "data", "model"))
    batch = (of.shard("x.0", "data"), of.shard("x.0", "model"))
    one, other, none = ((*batch, *more) for more in (held(of, "data"), held(of, "model"), ()))
    assert of.evaluator.cost(one) == of.evaluator.cost(other) == of.evaluator.cost(none)


def test_what_is_gathered_in_part_is_held_in_part() -> None:
    """Over one axis before the loop, over the other in each trip: half of each weight is held."""
    mesh = round_mesh(data=4, model=2)
    pins = ("ws*=model,data", "x=data+model,None")
    of = case_of(recurrent, [arg(WIDTH, WIDTH)] * LAYERS, arg(BATCH, WIDTH), mesh=mesh, pins=pins)
    batch = (of.shard("x.0", "data"), of.shard("x.0", "model"))
    plan = (*batch, *held(of, "data"))
    gathers = [(c.axes, c.local_bytes, c.runs, c.edge) for c in of.lowered(plan).collectives]
    assert sorted(gathers) == [((0,), WEIGHT / 2, 1, "before")] * LAYERS + [((1,), WEIGHT, TRIPS, "inside")] * LAYERS
    more = of.evaluator.exact_cost(plan).peak_bytes - of.evaluator.exact_cost(batch).peak_bytes
    assert more == LAYERS * WEIGHT / 2


def test_evaluating_by_changes_is_evaluating_anew() -> None:
    of = case(data=4, model=2)
    batch = of.shard("x.0", "data")
    plans = [(batch,), (batch, *held(of, "data")), held(of, "data"), (batch, *held(of, "model", "data")), (batch,)]
    for plan in plans:
        assert of.evaluator.exact_cost(plan) == Evaluator(of.problem).exact_cost(plan)


def test_nothing_is_offered_where_no_loop_reads_in_several_trips() -> None:
    once = case_of(lambda w, x: x @ w, arg(8, 8), arg(8, 8))
    pieces = case_of(lambda ws, x: lax.scan(lambda h, w: (h @ w, None), x, ws)[0], arg(4, 8, 8), arg(8, 8))  # layers
    assert all(LOOP_READS not in of.problem.roles for of in (once, pieces))
    assert LOOP_READS in case().problem.roles


def test_the_decision_is_saved_and_told(tmp_path: Path) -> None:
    of = case()
    plan = (of.shard("x.0", "data"), *held(of, "data"))
    file = tmp_path / "plan.json"
    file.write_bytes(save_plan(of.problem, plan))
    assert carried_over(of.problem, read_plan(str(file)))[0] == plan
    assert decision_text(of.problem, plan[1]) == "gather what loops read over data once, before the loop, and hold it"
    assert short_text(of.problem, plan[1]) == "what loops read gathered before the loop over data"
    told = explain(Study(of.source, of.evaluator, plan), decision="2")
    assert told.subject == "decision 2: what loops read gathered before the loop over data"
    assert [one.text for one in told.items] == ["- all-gather over data"]


def decoding(table: Any, tokens: Any) -> Any:
    """Rows of a table are looked up, and multiplied with all of it, in each trip."""

    def step(_: Any, tokens: Any) -> Any:
        return jnp.argmax(jnp.tanh(table[tokens]) @ table.T, -1).astype(tokens.dtype)

    return lax.fori_loop(0, 4, step, tokens)


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_a_table_that_one_use_in_a_loop_reads_split_stays_whole_for_the_others(form: str) -> None:
    """Shardy would split what the loop passes through as that use reads it, and gather it in each trip."""
    case = case_of(decoding, arg(64, 16), arg(8, dtype=jnp.int32))
    plan = (*strategy(case, "table.0=data", "tokens.0=model"), case.replicate("weights", "data"))
    assert collectives(case, compiled(case, plan, form)) == on_cpu(case, case.collectives(plan))


# -- what may run before a loop or after it


def test_a_product_waits_for_a_loop_inside_another_loop_as_well() -> None:
    """The gradient of an output projection, beside the backward loop of one microbatch."""

    def microbatch(x: Any, w: Any) -> Any:
        first, second = jnp.sort(x @ w), jnp.sort(jnp.tanh(x @ w))
        gradient = x.T @ jnp.sort(jnp.cos(x))
        total = lax.fori_loop(0, 5, lambda _, c: jnp.sin(c @ first @ second), x)
        return gradient + total.T @ total, total

    def run(x: Any, w: Any) -> Any:
        return lax.fori_loop(0, 3, lambda _, c: microbatch(c[1], w), (x, x))

    evaluator = evaluator_of(source_of(run, arg(64, 64), arg(64, 64)), round_mesh(data=2), profile=PLAIN)
    program, times = evaluator.problem.program, evaluator.items.lives.times
    (inner,) = [loop for loop in program.loops if loop.parent >= 0]
    products = [n for n, op in enumerate(program.ops) if op.name == DOT_GENERAL and n < inner.first]
    assert [times[n] >= 2 * inner.last for n in products] == [False, False, True]


# -- loops that go on until sums of split arrays are small: conjugate gradients, power iterations


MATRIX, VECTOR, ROUNDS = arg(64, 64), arg(64), 20


def conjugate_gradients(a: jax.Array, b: jax.Array) -> jax.Array:
    def step(carry: Any) -> Any:
        x, r, p, square, k = carry
        along = a @ p
        by = square / jnp.vdot(p, along)
        x, r = x + by * p, r - by * along
        fresh = jnp.vdot(r, r)
        return x, r, r + (fresh / square) * p, fresh, k + 1

    start = jnp.zeros_like(b), b, b, jnp.vdot(b, b), 0
    return lax.while_loop(lambda c: (c[3] > 1e-10) & (c[4] < ROUNDS), step, start)[0]


def power_iteration(a: jax.Array, b: jax.Array) -> jax.Array:
    def step(carry: Any) -> Any:
        v, _, k = carry
        w = a @ v
        size = jnp.linalg.norm(w)
        return w / size, size, k + 1

    return lax.while_loop(lambda c: (c[1] > 1e-6) & (c[2] < ROUNDS), step, (b, jnp.float32(1), 0))[0]


def test_what_is_gathered_for_a_product_stays_split_for_the_rest() -> None:
    """Rows of the matrix are split: each trip gathers 64 numbers, and sums up two inner products; one more before."""
    case = case_of(conjugate_gradients, MATRIX, VECTOR)
    gather, sums = ("all-gather", ("data",)), ("all-reduce", ("data",))
    assert promised(case, (case.shard("a.0", "data"),)) == {gather: ROUNDS * 64 * 4, sums: (2 * ROUNDS + 1) * 4}


@pytest.mark.parametrize("function", [conjugate_gradients, power_iteration])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_as_promised(function: Any, side: int, form: Any) -> None:
    case = case_of(function, MATRIX, VECTOR)
    plan = (case.shard("a.0", "data", side),)
    assert promised(case, plan)
    assert sent(case, plan, form) == promised(case, plan)
