"""Random small programs and random plans for them, as hypothesis strategies.

A program is a list of steps over a growing pile of arrays: products, transposes, reshapes that split and merge
dimensions, sums, concatenations, slices, elementwise work and loops. A step that does not fit the arrays it is pointed
at does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import permutations
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import settings
from hypothesis import strategies as st
from jax import lax
from programs import Case, arg, case_on, source_of

from toast_cli.frontend import Source
from toast_cli.plan.decision_space import decision_space
from toast_cli.plan.decisions import Decision, Plan, Replicate, Shard
from toast_cli.plan.problem import Problem
from toast_cli.search.moves import subject

Pile = list[Any]
SIZES = (4, 8, 16)


def product(pile: Pile, x: Any, y: Any, k: int) -> Any:
    pairs = [(i, j) for i in range(x.ndim) for j in range(y.ndim) if x.shape[i] == y.shape[j]]
    if not pairs or x.ndim + y.ndim > 6:
        return None
    i, j = pairs[k % len(pairs)]
    return lax.dot_general(x, y, (((i,), (j,)), ((), ())))


def transpose(pile: Pile, x: Any, y: Any, k: int) -> Any:
    orders = list(permutations(range(x.ndim)))
    return jnp.transpose(x, orders[k % len(orders)])


def merge(pile: Pile, x: Any, y: Any, k: int) -> Any:
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1]) if x.ndim > 1 else None


def split(pile: Pile, x: Any, y: Any, k: int) -> Any:
    major = (2, 4)[k % 2]
    fits = 0 < x.ndim < 4 and x.shape[-1] % major == 0
    return x.reshape(*x.shape[:-1], major, x.shape[-1] // major) if fits else None


def combine(pile: Pile, x: Any, y: Any, k: int) -> Any:
    alike = [v for v in pile if v.shape == x.shape]
    return x * alike[k % len(alike)] + 1.0


def total(pile: Pile, x: Any, y: Any, k: int) -> Any:
    return jnp.sum(x, axis=k % x.ndim) if x.ndim > 1 else None


def double(pile: Pile, x: Any, y: Any, k: int) -> Any:
    return jnp.concatenate([x, x], axis=k % x.ndim) if x.ndim else None


def halve(pile: Pile, x: Any, y: Any, k: int) -> Any:
    return lax.slice_in_dim(x, 0, max(1, x.shape[k % x.ndim] // 2), axis=k % x.ndim) if x.ndim else None


def loop(pile: Pile, x: Any, y: Any, k: int) -> Any:
    if x.ndim != 2 or x.shape[0] != x.shape[1]:
        return None
    return lax.fori_loop(0, 3, lambda _, carry: carry @ x + (carry.T if k % 2 else carry), x)


def ordered(pile: Pile, x: Any, y: Any, k: int) -> Any:
    return jnp.sort(x, axis=k % x.ndim) if x.ndim else None


def softmax(pile: Pile, x: Any, y: Any, k: int) -> Any:
    return jax.nn.softmax(x, axis=k % x.ndim) if x.ndim else None


def look_up(pile: Pile, x: Any, y: Any, k: int) -> Any:
    return x[jnp.argmax(y, axis=-1)] if 1 < x.ndim < 3 and 1 < y.ndim < 3 else None


Step = Callable[[Pile, Any, Any, int], Any]
STRAIGHT: tuple[Step, ...] = (product, transpose, merge, split, combine, total, double, halve)
STEPS = (*STRAIGHT, loop)
MORE_STEPS = (*STEPS, ordered, softmax, look_up)


PROGRAMS = 40  # that all tests share; `make check-all` draws new ones


def cases(loops: bool = True) -> st.SearchStrategy[Case]:
    """A random program on the mesh data=4, model=2; half of them donate their arguments where a result fits."""
    new = not settings().derandomize  # see the profiles in `conftest`
    seeds = st.integers(0, 2**32) if new else st.integers(0, PROGRAMS - 1)
    return seeds.map(lambda seed: case_on(source_by(seed, STEPS if loops else STRAIGHT)))


@lru_cache(maxsize=2 * PROGRAMS)
def source_by(seed: int, kinds: tuple[Step, ...]) -> Source:
    """The same seed, the same program."""
    draw = Random(seed)
    shapes = [draw.choices(SIZES, k=draw.randint(2, 3)) for _ in range(draw.randint(2, 3))]
    steps = [
        (draw.choice(kinds), draw.randint(0, 9), draw.randint(0, 9), draw.randint(0, 23))
        for _ in range(draw.randint(2, 6))
    ]
    donates = draw.random() < 0.5

    def run(*arguments: Any) -> Any:
        pile = list(arguments)
        for kind, a, b, k in steps:
            made = kind(pile, pile[a % len(pile)], pile[b % len(pile)], k)
            if made is not None:
                pile.append(made)
        taking_over = [next(v for v in reversed(pile) if v.shape == x.shape) for x in arguments] if donates else []
        return [*taking_over, pile[-1], pile[len(pile) // 2]]

    return source_of(run, *(arg(*s) for s in shapes), donate=tuple(range(len(shapes))) if donates else ())


def plans(problem: Problem) -> st.SearchStrategy[Plan]:
    """Plans of at most six decisions: each group takes each axis once in a part of the program, `Replicate` stands
    last."""
    if not decision_space(problem).choices:
        return st.just(())
    choices = decision_space(problem).choices
    offered = [*choices, *(part for decision in choices for part in decision_space(problem).parts(decision))]
    return st.lists(st.sampled_from(offered), max_size=6, unique_by=_place).map(
        lambda found: tuple(sorted(found, key=lambda d: isinstance(d, Replicate)))
    )


def _place(decision: Decision) -> tuple[object, ...]:
    return subject(decision) if isinstance(decision, Shard) else decision
