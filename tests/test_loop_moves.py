"""What loops only read is moved ahead of them, once, as far as that makes it no larger, and all the way where they take
pieces of it or it is a vector; in every written form."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from emitted import emit, partitioned
from jax import lax
from one_meaning import disagreements
from programs import Case, arg, case_of
from run_here import wrong_in
from sweeps import sweep

from toast_cli.ask_xla.compile import Dialect
from toast_cli.ask_xla.verdict import compare_traffic
from toast_cli.emit.minimal import choose_annotations
from toast_cli.plan.decisions import Plan, Replicate
from toast_cli.plan.loops import ACCUMULATORS, LOOP_READS
from toast_cli.report.build import collective_facts

BATCH, TIME, HEADS, WIDTH, BLOCK = 4, 32, 4, 8, 8
BLOCKS = TIME // BLOCK
AXES = {"data": 4, "model": 2}
X = arg(BATCH, TIME, HEADS, WIDTH)


def in_blocks(x: jax.Array) -> jax.Array:
    """[blocks, batch, time in the block, heads, width]"""
    return jnp.moveaxis(x.reshape(BATCH, BLOCKS, BLOCK, HEADS, WIDTH), 1, 0)


def attended(q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """One block of queries over all blocks of keys and values."""

    def one(carry: Any, block: Any) -> Any:
        most, total, out = carry
        k, v = block
        scores = jnp.einsum("bshk,bthk->bhst", q, k)
        now = jnp.maximum(most, scores.max(-1))
        weights, scale = jnp.exp(scores - now[..., None]), jnp.exp(most - now)
        total = total * scale + weights.sum(-1)
        return (now, total, out * scale[..., None] + jnp.einsum("bhst,bthk->bhsk", weights, v)), None

    shape = (BATCH, HEADS, BLOCK)
    start = (jnp.full(shape, -1e30), jnp.zeros(shape), jnp.zeros((*shape, WIDTH)))
    (_, total, out), _ = lax.scan(one, start, (keys, values))
    return out / total[..., None]


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Two loops, one in the other, neither of which makes keys or values."""
    keys, values = in_blocks(jnp.tanh(k)), in_blocks(jnp.tanh(v))
    return lax.map(lambda q: attended(q, keys, values), in_blocks(q))


def chosen(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The inner loop stands in a branch."""
    keys, values = in_blocks(jnp.tanh(k)), in_blocks(jnp.tanh(v))

    def either(q: jax.Array) -> jax.Array:
        return lax.cond(jnp.sum(q) > 0, lambda: attended(q, keys, values), lambda: jnp.swapaxes(q, 1, 2))

    return lax.map(either, in_blocks(q))


def refined(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """What the inner loop reads the outer one carries."""

    def again(keys: jax.Array, q: jax.Array) -> Any:
        keys = jnp.tanh(keys)
        return keys, attended(q, keys, keys)

    keys, out = lax.scan(again, in_blocks(k), in_blocks(q))
    return out + lax.map(lambda q: attended(q, keys, keys), in_blocks(v))


def trained(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    return jax.grad(lambda *arrays: jnp.sum(attention(*arrays) ** 2), argnums=(0, 1, 2))(q, k, v)


def multiplied(x: jax.Array, h: jax.Array) -> jax.Array:
    """The loop reads all of it in each trip."""
    w = jnp.tanh(x)
    return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, None, length=4)[0]


def decayed(x: jax.Array, w: jax.Array) -> jax.Array:
    """The loop reads a decay and a bias in each trip, in the form in which JAX differentiates a loop over time."""
    decay, bias = jnp.tanh(w)[None, :], w[None, :] + 1.0
    return lax.scan(lambda h, _: (h * decay + bias, None), x, None, length=4)[0]


def trained_twice(x: jax.Array, h: jax.Array) -> jax.Array:
    """A weight that two loops read, forward and backward."""
    return x - jax.grad(lambda x: jnp.sum(multiplied(x, h) ** 2))(x)


def microbatches(w: jax.Array, x: jax.Array) -> jax.Array:
    """Gradients that a loop adds up: it becomes a region."""

    def loss(w: jax.Array, part: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(part @ w) ** 2)

    return w - lax.scan(lambda g, part: (g + jax.grad(loss)(w, part), None), jnp.zeros_like(w), x)[0]


def recurrence(w: jax.Array, x: jax.Array) -> jax.Array:
    """The backward loop adds up the weight's gradient, so that it becomes a region; the forward loop does not."""
    return w - jax.grad(lambda w: jnp.sum(lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=4)[0]))(w)


def converted(w: jax.Array, x: jax.Array) -> jax.Array:
    """The loop converts the weight in each trip."""

    def loss(w: jax.Array, part: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(part @ w.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    return w - lax.scan(lambda g, part: (g + jax.grad(loss)(w, part), None), jnp.zeros_like(w), x)[0]


def layers(w: jax.Array, x: jax.Array) -> jax.Array:
    """A loop over layers in one over microbatches: it takes the same pieces of the stacked weights again."""

    def loss(w: jax.Array, part: jax.Array) -> jax.Array:
        return jnp.sum(lax.scan(lambda h, one: (jnp.tanh(h @ one), None), part, w)[0] ** 2)

    return w - lax.scan(lambda g, part: (g + jax.grad(loss)(w, part), None), jnp.zeros_like(w), x)[0]


def many_microbatches(w: jax.Array, x: jax.Array) -> jax.Array:
    """A region in a loop, and neither makes the weight."""
    return lax.map(lambda parts: microbatches(w, parts), x)


def nested(w: jax.Array, x: jax.Array) -> jax.Array:
    """The inner loop reads it, and neither makes it."""
    w = jnp.tanh(w)
    return lax.map(lambda part: lax.scan(lambda h, _: (jnp.tanh(h @ w), None), part, None, length=4)[0], x)


def also_behind(x: jax.Array, h: jax.Array) -> jax.Array:
    """The weight is read outside of the loop as well."""
    w = jnp.tanh(x)
    return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, None, length=4)[0] @ w


def shrunk(w: jax.Array, x: jax.Array) -> Any:
    """The inner loop reads what the outer one carries, before the outer one changes it."""

    def again(w: jax.Array, part: jax.Array) -> Any:
        return w * 0.9, lax.scan(lambda h, _: (jnp.tanh(h @ w), None), part, None, length=4)[0]

    return lax.scan(again, w, x)


HEADS_IN_LOOPS = ["q.1", "q.2"]  # time is split outside the loops, which go along it, and heads in them
# function, what is split over data, (kind, bytes, runs, where) of what moves arrays that are made outside loops
PROGRAMS: dict[str, tuple[Callable[..., Any], list[str], list[tuple[str, float, float, str]]]] = {
    "a loop in a loop": (attention, HEADS_IN_LOOPS, [("all-to-all", 4096, 1, "before")] * 3),
    "a branch": (chosen, HEADS_IN_LOOPS,
                 [("all-to-all", 4096, 1, "before"), *[("all-to-all", 4096, 8, "inside")] * 2]),
    "carried": (refined, HEADS_IN_LOOPS,
                [*[("all-to-all", 4096, 1, "before")] * 3, ("all-to-all", 4096, 4, "before")]),
    "forward and backward": (trained, HEADS_IN_LOOPS, [("all-to-all", 4096, 1, "before")] * 3),
    "pieces": (attention, ["q.1"], [("all-gather", 16384, 1, "before")] * 3),
    "pieces, forward and backward": (trained, ["q.1"], [("all-gather", 16384, 1, "before")] * 3),
    "pieces of what is carried": (refined, ["q.1"],
                                  [*[("all-gather", 16384, 1, "before")] * 3, ("all-gather", 16384, 4, "before")]),
    "no pieces": (multiplied, ["h.0", "x.1"], [("all-gather", 256, 4, "inside")]),
    "held": (multiplied, ["h.0", "x.1", LOOP_READS], [("all-gather", 256, 1, "before")]),
    "held, forward and backward": (trained_twice, ["h.0", "x.1", LOOP_READS], [("all-gather", 256, 1, "before")]),
    "held, accumulating": (microbatches, ["x.1", "w.1", LOOP_READS], [("all-gather", 256, 1, "before")]),
    "held for a region too": (recurrence, ["x.0", "w.1", ACCUMULATORS, LOOP_READS], [("all-gather", 256, 1, "before")]),
    "held for regions in a loop": (many_microbatches, ["x.2", "w.1", ACCUMULATORS, LOOP_READS],
                                   [("all-gather", 256, 1, "before")]),
    "held, converted": (converted, ["x.1", "w.1", LOOP_READS], [("all-gather", 256, 1, "before")]),
    "held, layers": (layers, ["x.1", "w.1", LOOP_READS], [("all-gather", 768, 1, "before")]),
    "held, a loop in a loop": (nested, ["x.1", "w.1", LOOP_READS], [("all-gather", 256, 1, "before")]),
    "held, and read behind": (also_behind, ["h.0", "x.1", LOOP_READS], [("all-gather", 256, 1, "before")]),
    "held, carried": (shrunk, ["x.1", "w.1", LOOP_READS], [("all-gather", 256, 4, "before")]),
    "vectors": (decayed, ["x.0", "w.0"], [("all-gather", 32, 1, "before")] * 2),
}  # fmt: skip


def planned(name: str) -> tuple[Case, Plan]:
    function, places, _ = PROGRAMS[name]
    square, parts = (arg(8, 8), arg(8, 8)), (arg(8, 8), arg(4, 8, 8))
    arguments = {
        multiplied: square, trained_twice: square, also_behind: square, recurrence: square,
        microbatches: parts, nested: parts, shrunk: parts, many_microbatches: (arg(8, 8), arg(2, 4, 8, 8)),
        converted: (arg(8, 8), arg(4, 8, 8, dtype=jnp.bfloat16)), layers: (arg(3, 8, 8), arg(4, 8, 8)),
        decayed: (arg(8, 8), arg(8)),
    }.get(function, (X, X, X))  # fmt: skip
    case = case_of(function, *arguments)
    roles = case.problem.roles
    return case, tuple(
        [Replicate(roles.index(place), 0) if place in roles else case.shard(place, "data") for place in places]
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_loops_only_read_is_moved_once(name: str) -> None:
    """The plan says so, and the evaluator prices the same."""
    case, plan = planned(name)
    kinds = {kind for kind, *_ in PROGRAMS[name][2]}
    moves = [one for one in case.lowered(plan).collectives if one.kind in kinds]
    assert sorted((one.kind, one.local_bytes, one.runs, one.edge) for one in moves) == sorted(PROGRAMS[name][2])
    assert disagreements(case.source, case.evaluator, plan) == []


FORMS: tuple[Dialect, ...] = ("stablehlo", "hlo")
KEPT = [(name, FORMS[n % 2]) for n, name in enumerate(PROGRAMS) if name != "pieces, forward and backward"]
WRITTEN = sweep(product(PROGRAMS, FORMS), *KEPT)


@pytest.mark.parametrize(("name", "form"), WRITTEN)
def test_what_is_written_is_promised(name: str, form: Dialect) -> None:
    """Numbers stay, and the partitioner makes of it what the report says."""
    case, plan = planned(name)
    content = emit(case.source, case.lowered(plan), form)
    assert wrong_in(case.source, content, 8, form) == []
    promised = collective_facts(case.source, case.evaluator, plan)
    compared = compare_traffic(promised, partitioned(case, plan, form), AXES)
    assert compared.missing_bytes == compared.extra_bytes == 0


def test_what_is_moved_is_held_while_the_loops_run() -> None:
    """Keys and values as the loops read them: two arrays of a quarter of 16 KiB, from the outer loop's start on."""
    case, plan = planned("a loop in a loop")
    times = case.evaluator.timeline.candidates
    held = case.evaluator.memory_by(plan, lambda _, role: role)["gathered"]
    (outer,) = [loop for loop in case.program.loops if loop.parent < 0]
    inside = (times >= 2 * outer.first) & (times < 2 * outer.last)
    assert held[inside].min() >= 2 * 4096
    assert held[~inside].max() == 0


def test_few_constraints_suffice_before_loops() -> None:
    case, plan = planned("forward and backward")
    chosen = choose_annotations(case.source, case.lowered(plan))
    assert any(one.ahead for one in chosen.annotations.reshards)
    assert chosen.astray == []
