"""How an array gets from one sharding to another: a table, and what must hold for any two shardings."""

from __future__ import annotations

from itertools import permutations
from math import prod
from typing import Any

import jax.numpy as jnp
import pytest
from emitted import collectives, compiled, on_cpu, strategy, worst_error
from hypothesis import given
from hypothesis import strategies as st
from programs import arg, case_of

from toast_cli.plan.reshard import ReshardPart, copies_of, is_even, moves_of, reshard_parts, reshard_steps, waypoints
from toast_cli.plan.sharding import Sharding, replicated, shards

# The mesh a=2, b=4, c=8; a sharding is written as one word a dimension.
AXES = "abc"
SIZES = (2, 4, 8)


def sharding(text: str) -> Sharding:
    return tuple(tuple(AXES.index(letter) for letter in dim if letter != "-") for dim in text.split())


# from, to, [(kind, axes, 1 / fraction of the array that each device has afterwards)]
TABLE: list[tuple[str, str, list[tuple[str, str, int]]]] = [
    # Nothing to do, and slicing what is there.
    ("- -", "- -", []),
    ("ab -", "ab -", []),
    ("- -", "a b", []),
    ("a -", "ab -", []),
    ("a -", "a b", []),
    # Gathering.
    ("a -", "- -", [("all-gather", "a", 1)]),
    ("ab -", "- -", [("all-gather", "ab", 1)]),
    ("ab -", "a -", [("all-gather", "b", 2)]),
    ("a b", "- -", [("all-gather", "b", 2), ("all-gather", "a", 1)]),
    ("a b", "a -", [("all-gather", "b", 2)]),
    # Slices come first: what is gathered is smaller by then.
    ("a -", "- b", [("all-gather", "a", 4)]),
    ("b -", "- a", [("all-gather", "b", 2)]),
    # From one dimension to another.
    ("a -", "- a", [("all-to-all", "a", 2)]),
    ("ab -", "a b", [("all-to-all", "b", 8)]),
    ("a b", "ab -", [("all-to-all", "b", 8)]),
    ("a b", "b a", [("all-to-all", "a", 8), ("collective-permute", "ba", 8), ("all-to-all", "b", 8)]),
    ("ab c", "a bc", [("all-to-all", "b", 64), ("collective-permute", "bc", 64)]),
    # In another order along one dimension: every device needs another's piece.
    ("ab -", "ba -", [("collective-permute", "ab", 8)]),
    ("abc -", "acb -", [("collective-permute", "bc", 64)]),
    # The major axis leaves: pieces move so that they lie next to each other, then they are gathered.
    ("ab -", "b -", [("collective-permute", "ab", 8), ("all-gather", "a", 4)]),
    ("ab -", "b a", [("collective-permute", "ab", 8), ("all-to-all", "a", 8)]),
]


@pytest.mark.parametrize(("source", "target", "expected"), TABLE)
def test_steps(source: str, target: str, expected: list[tuple[str, str, int]]) -> None:
    steps = reshard_steps(sharding(source), sharding(target), SIZES)
    found = [(step.kind, "".join(AXES[a] for a in step.axes), round(1 / step.fraction)) for step in steps]
    assert sorted(found) == sorted(expected)
    gathers = [step.kind == "all-gather" for step in steps]
    assert gathers == sorted(gathers)  # what makes arrays larger comes last


@st.composite
def shardings(draw: st.DrawFn, rank: int = 3) -> Sharding:
    dims: list[list[int]] = [[] for _ in range(rank)]
    for axis in draw(st.permutations(range(3))):
        place = draw(st.integers(-1, rank - 1))
        if place >= 0:
            dims[place].append(axis)
    return tuple(map(tuple, dims))


@given(shardings())
def test_staying_costs_nothing(at: Sharding) -> None:
    assert reshard_steps(at, at, SIZES) == ()


@given(shardings())
def test_slicing_costs_nothing(at: Sharding) -> None:
    assert reshard_steps(replicated(3), at, SIZES) == ()


@given(shardings())
def test_gathering_everything_ends_with_everything(at: Sharding) -> None:
    steps = reshard_steps(at, replicated(3), SIZES)
    assert {step.kind for step in steps} <= {"all-gather"}
    assert sorted(axis for step in steps for axis in step.axes) == sorted(axis for dim in at for axis in dim)
    assert (steps[-1].fraction if steps else 1.0) == 1.0 / (1 if steps else shards(at, SIZES))


@given(shardings(), shardings())
def test_the_last_step_leaves_each_device_at_least_its_part_of_the_target(source: Sharding, target: Sharding) -> None:
    steps = reshard_steps(source, target, SIZES)
    if steps:
        assert steps[-1].fraction >= 1 / shards(target, SIZES)  # what is left to do is to cut
        kept = {a for dim in source for a in dim} | {a for dim in target for a in dim}
        assert min(step.fraction for step in steps) >= 1 / prod(SIZES[a] for a in kept)


@given(shardings(), shardings())
def test_an_axis_that_stays_in_place_does_not_move(source: Sharding, target: Sharding) -> None:
    moved = {axis for step in reshard_steps(source, target, SIZES) for axis in step.axes}
    for have, want in zip(source, target, strict=True):
        if have == want[: len(have)]:
            assert not moved.intersection(have)


def test_four_axes_on_one_dimension_find_a_way_to_every_sharding_of_fewer() -> None:
    sizes = (2, 2, 2, 2)
    for kept in range(5):
        for target in permutations(range(4), kept):
            for there in (((0, 1, 2, 3), ()), ((3, 0, 2, 1), ()), ((2,), (0, 1, 3))):
                reshard_steps(there, (target, ()), sizes)
                reshard_steps(there, ((), target), sizes)


def test_no_dimension_is_cut_unevenly_on_the_way() -> None:
    sizes = (2, 2, 2, 2)
    source, target = ((0, 1, 2), (3,)), ((2, 3), ())
    assert any(step.kind == "all-to-all" and 3 in step.axes for step in reshard_steps(source, target, sizes))
    steps = reshard_steps(source, target, sizes, (8, 32))
    assert steps[-1].fraction == 1 / 4
    ways = waypoints(source, target, sizes, (8, 32))
    assert ways and all(is_even(at, (8, 32), sizes) for at in ways)
    assert not all(is_even(at, (8, 32), sizes) for at in waypoints(source, target, sizes))


@given(shardings(), shardings(), st.tuples(*[st.integers(1, 64)] * 3))
def test_there_is_a_way_for_an_array_of_any_shape(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> None:
    even = all(is_even(at, shape, SIZES) for at in (source, target))
    ways = waypoints(source, target, SIZES, shape)
    assert not even or all(is_even(at, shape, SIZES) for at in ways)


def test_what_finds_no_room_is_gathered() -> None:
    steps = reshard_steps(((1,), (0,)), ((0,), (1,)), (4, 2), (4, 4))
    assert steps[0].kind == "all-gather"


def test_ways_that_begin_alike_are_gone_once() -> None:
    """What is gathered for one use is cut for another: one gather serves both, since the way to the second spells out
    the whole array. Gathers of two dimensions in one go are shared with nobody.
    """

    def moves(made: Sharding, *needed: Sharding) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [(m.step.axes, m.places) for m in moves_of(made, copies_of(made, needed, (4, 2), (4, 8)))]

    assert moves(((0,), ()), ((), ()), ((1,), ()), ((), ())) == [((0,), (0, 2, 1))]
    assert moves(((0,), (1,)), ((), ()), ((0,), ())) == [((1,), (0,)), ((0,), (0,)), ((1,), (1,))]


WHOLE: Sharding = ((), ())
# from, to -> what is done ahead of loops that only read the array, and what in each trip
STRETCHES: dict[tuple[Sharding, Sharding], tuple[ReshardPart | None, ReshardPart | None]] = {
    (((0,), ()), ((), (0,))): (ReshardPart(((0,), ()), ((), (0,))), None),
    (((0,), ()), WHOLE): (None, ReshardPart(((0,), ()), WHOLE)),
    (WHOLE, ((0,), ())): (None, ReshardPart(WHOLE, ((0,), ()))),
    (((0, 1), ()), ((1, 0), ())): (ReshardPart(((0, 1), ()), ((1, 0), ())), None),
    (((0, 1), ()), ((1,), ())): (
        ReshardPart(((0, 1), ()), ((1, 0), ())),
        ReshardPart(((1, 0), ()), ((1,), ())),
    ),
    (((0, 1), ()), ((), (1,))): (
        ReshardPart(((0, 1), ()), ((0,), (1,))),
        ReshardPart(((0,), (1,)), ((), (1,))),
    ),
    (((0,), ()), ((1,), (0,))): (ReshardPart(((0,), ()), ((1,), (0,)), (((), (0,)),)), None),
}


@pytest.mark.parametrize(("source", "target"), STRETCHES)
def test_nothing_is_gathered_ahead_of_a_loop(source: Sharding, target: Sharding) -> None:
    assert reshard_parts(source, target, (4, 2), (32, 32)) == STRETCHES[source, target]


# -- arrays that are repeated or widened for a product are moved before that, while they are small


QUERIES, KEYS = (8, 16, 4, 8), (8, 16, 2, 8)
SCORES = "bshd,bthd->bhst"


def repeated(q: Any, k: Any) -> Any:
    return jnp.einsum(SCORES, q, jnp.repeat(k, 2, axis=2))


def widened(q: Any, k: Any) -> Any:
    return jnp.einsum(SCORES, q, k.astype(jnp.float32))


def repeated_and_added(q: Any, k: Any) -> Any:
    return q + jnp.repeat(k, 2, axis=2)


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
@pytest.mark.parametrize(
    ("program", "keys", "gathered"),
    [
        (repeated, arg(*KEYS), 8 * 16 * 2 * 8 * 4.0),
        (widened, arg(*QUERIES, dtype=jnp.bfloat16), 8 * 16 * 4 * 8 * 2.0),
    ],
)
def test_keys_are_gathered_before_they_grow(program: Any, keys: Any, gathered: float, form: str) -> None:
    case = case_of(program, arg(*QUERIES), keys)
    plan = strategy(case, "q.1=data", "k.1=data")
    assert case.collectives(plan) == [("all-gather", ("data",), gathered, 1.0)]
    if program is repeated:  # XLA:CPU computes in float32 only
        assert collectives(case, compiled(case, plan, form)) == on_cpu(case, case.collectives(plan))
        assert worst_error(case.source, case.lowered(plan), form) < 1e-5


def test_a_repeat_that_no_product_reads_stays_split() -> None:
    case = case_of(repeated_and_added, arg(*QUERIES), arg(*KEYS))
    assert case.collectives(strategy(case, "q.1=data", "k.1=data")) == []


def test_heads_are_split_through_a_repeat() -> None:
    """Keys are split over their own heads, and each device repeats its own."""
    case = case_of(repeated, arg(*QUERIES), arg(*KEYS))
    plan = strategy(case, "k.2=model")
    assert case.collectives(plan) == []
    assert case.rest("q", plan) == "-|-|model|-"
