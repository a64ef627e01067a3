"""Sums that loops add up: carried as they are and reduced once behind the loop, in every written form."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from emitted import emit, emit_shardy, partitioned
from jax import lax
from one_meaning import disagreements
from programs import Case, arg, case_of
from run_here import wrong_in
from sweeps import sweep

from toast_cli import xla
from toast_cli.ask_xla.compile import Dialect
from toast_cli.ask_xla.verdict import compare_traffic
from toast_cli.plan.decisions import Plan, Replicate
from toast_cli.plan.loops import ACCUMULATORS
from toast_cli.report.build import collective_facts

MICROBATCHES, BATCH, D, F = 4, 16, 8, 32
AXES = {"data": 4, "model": 2}
X, W = arg(MICROBATCHES, BATCH, D), arg(D, F)


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(x @ w))


def accumulated(w: jax.Array, x: jax.Array) -> jax.Array:
    """Gradients of microbatches."""
    return w - lax.scan(lambda g, part: (g + jax.grad(loss)(w, part), None), jnp.zeros_like(w), x)[0]


def begun(w: jax.Array, x: jax.Array) -> jax.Array:
    """The loop starts with something."""
    return lax.scan(lambda g, part: (g + jax.grad(loss)(jnp.ones_like(w), part), None), w, x)[0]


def narrow(w: jax.Array, x: jax.Array) -> jax.Array:
    """Products in bf16, sums in f32."""

    def low(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32))

    return w - lax.scan(lambda g, part: (g + jax.grad(low)(w, part), None), jnp.zeros_like(w), x)[0]


def turned(w: jax.Array, x: jax.Array) -> jax.Array:
    """The gradient is turned in each trip, once it has been converted."""

    def low(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32))

    return w - lax.scan(lambda g, part: (g + jax.grad(low)(w.T, part).T, None), jnp.zeros_like(w), x)[0]


def recurrent(w: jax.Array, x: jax.Array) -> jax.Array:
    """The gradient of a recurrence's weight, with microbatches around."""

    def states(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0])

    return w - lax.scan(lambda g, part: (g + jax.grad(states)(w, part), None), jnp.zeros_like(w), x)[0]


def layers(v: jax.Array, w: jax.Array, x: jax.Array) -> list[jax.Array]:
    """Two recurrences, one above the other: two loops add up gradients."""

    def states(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        for one in weights:
            _, x = lax.scan(lambda h, part, one=one: (h := jnp.tanh(h @ one + part), h), jnp.zeros_like(x[0]), x)
        return jnp.sum(x)

    return [a - b for a, b in zip((v, w), jax.grad(states)((v, w), x), strict=True)]


def tied(table: jax.Array, rows: jax.Array) -> jax.Array:
    """A table that is looked up and multiplied by: two kinds of gradients."""

    def score(table: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(table[rows] @ table.T))

    return table - lax.scan(lambda g, r: (g + jax.grad(score)(table, r), None), jnp.zeros_like(table), rows)[0]


def read(w: jax.Array, x: jax.Array) -> jax.Array:
    """What has been added up is looked at in each trip, so that it has to be complete."""
    return lax.scan(lambda g, part: (g + jax.grad(loss)(w - g, part), None), jnp.zeros_like(w), x)[0]


def beside(w: jax.Array, x: jax.Array) -> jax.Array:
    """Another loop starts with as many zeros, which are split there; XLA has both from one array."""
    h = lax.scan(lambda h, _: (jnp.tanh(h + w), None), jnp.zeros_like(w), None, length=3)[0]
    return accumulated(w, x) + h


Decisions = list[tuple[str, str]]
DATA: Decisions = [("x.1", "data")]
# function, arguments, decisions, carries left partial, (kind, axes, bytes, count) of all collectives but scalars'
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Decisions, int, list[tuple[str, str, int, int]]]] = {
    "microbatches": (accumulated, (W, X), DATA, 1, [("all-reduce", "data", 1024, 1)]),
    "starts with something": (begun, (W, X), DATA, 1, [("all-reduce", "data", 1024, 1)]),
    "converted": (narrow, (W, X), DATA, 1, [("all-reduce", "data", 1024, 1)]),
    "a loop in a loop": (recurrent, (arg(D, D), X), DATA, 2, [("all-reduce", "data", 256, 1)]),
    "two loops": (layers, (arg(D, D), arg(D, D), X), DATA, 2, [("all-reduce", "data", 256, 2)]),
    "two gradients": (tied, (arg(D, D), jax.ShapeDtypeStruct((MICROBATCHES, BATCH), jnp.int32)),
                      [("rows.1", "data")], 1, [("all-reduce", "data", 256, 1)]),
    "read in each trip": (read, (W, X), DATA, 0, [("all-reduce", "data", 1024, 4)]),
    "weights split otherwise": (accumulated, (W, X), [*DATA, ("w.1", "model")], 1, [("all-reduce", "data", 512, 1)]),
    "scattered in each trip": (accumulated, (W, X), [*DATA, ("w.0", "data")], 0,
                               [("all-gather", "data", 1024, 4), ("reduce-scatter", "data", 256, 4)]),
    "scattered behind the loop": (accumulated, (W, X), [*DATA, ("w.0", "data"), (ACCUMULATORS, "data")], 1,
                                  [("all-gather", "data", 1024, 4), ("reduce-scatter", "data", 256, 1)]),
    "zeros elsewhere": (beside, (W, X), [*DATA, ("w.0", "data"), (ACCUMULATORS, "data")], 1,
                        [("all-gather", "data", 1024, 4), ("reduce-scatter", "data", 256, 1)]),
    "turned and scattered behind": (
        turned, (arg(F, D), X), [*DATA, ("w.1", "data"), ("w.0", "model"), (ACCUMULATORS, "data")], 1,
        [("all-gather", "data", 256, 4), ("reduce-scatter", "data", 128, 1)]),
    "scattered in part": (accumulated, (W, X), [*DATA, ("x.1", "model"), ("w.0", "model")], 1,
                          [("all-gather", "model", 1024, 4), ("reduce-scatter", "model", 512, 4),
                           ("all-reduce", "data", 512, 1)]),
}  # fmt: skip


def planned(name: str) -> tuple[Case, Plan]:
    function, arguments, decisions, *_ = PROGRAMS[name]
    case = case_of(function, *arguments)
    roles, axes = case.problem.roles, case.problem.mesh.names
    plan = [
        Replicate(roles.index(place), axes.index(axis)) if place == ACCUMULATORS else case.shard(place, axis)
        for place, axis in decisions
    ]
    return case, tuple(plan)


@pytest.mark.parametrize("name", PROGRAMS)
def test_sums_are_reduced_behind_loops(name: str) -> None:
    """What is planned: how many carries stay partial, and what is sent then."""
    *_, carried, expected = PROGRAMS[name]
    case, plan = planned(name)
    lowered = case.lowered(plan)
    assert len(lowered.carried) == carried
    found = [(kind, ",".join(axes), round(size), count) for kind, axes, size, count in case.collectives(plan)]
    assert sorted(one for one in found if one[2] > 4) == sorted(expected)
    assert disagreements(case.source, case.evaluator, plan) == []
    behind = [one for one in lowered.collectives if one.edge == "behind"]
    assert len({one.op for one in behind}) == (2 if name == "two loops" else min(carried, 1))  # an outer loop's


@pytest.mark.parametrize(("mesh", "kind"), [("v5p-16", "all-reduce"), ("h100-8", "reduce-scatter")])
def test_sums_that_are_cut_over_the_whole_mesh(mesh: str, kind: str) -> None:
    """XLA:TPU reduces them whole, as it does behind no loop."""
    case = case_of(accumulated, arg(4096, 1024), arg(MICROBATCHES, BATCH, 4096), mesh=mesh)
    roles, axes = case.problem.roles, case.problem.mesh.names
    plan = [case.shard(place, axis) for place in ("x.1", "w.0") for axis in axes]
    plan += [Replicate(roles.index(ACCUMULATORS), axis) for axis in range(len(axes))]
    sums = [(made, set(over), count) for made, over, _, count in case.collectives(tuple(plan)) if "reduce" in made]
    assert (kind, set(axes), 1) in sums


@pytest.mark.parametrize("name", PROGRAMS)
def test_bytecode_says_what_the_text_says(name: str) -> None:
    """MLIR's writer died of the loops that stand aside while regions are in their places."""
    case, plan = planned(name)
    text, binary = (emit_shardy(case.source, case.lowered(plan), binary=binary) for binary in (False, True))
    one, other = (xla.parse_module(xla.make_context(), content) for content in (text, binary))
    assert str(one) == str(other)


FORMS: tuple[Dialect, ...] = ("stablehlo", "hlo")
WRITTEN = sweep(product(PROGRAMS, FORMS), *((name, FORMS[number % 2]) for number, name in enumerate(PROGRAMS)))


@pytest.mark.parametrize(("name", "form"), WRITTEN)
def test_what_is_written_is_promised(name: str, form: Dialect) -> None:
    """Numbers stay, and the partitioner makes of it what the report says."""
    case, plan = planned(name)
    content = emit(case.source, case.lowered(plan), form)
    assert wrong_in(case.source, content, 8, form) == []
    promised = collective_facts(case.source, case.evaluator, plan)
    assert compare_traffic(promised, partitioned(case, plan, form), AXES).share == 1.0
