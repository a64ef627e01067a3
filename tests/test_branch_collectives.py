"""Collectives in branches and loops that data decide: what is promised of each is what XLA writes, a collective in one
of n branches as 1/n, or as often as the user says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import Case, arg, case_of
from test_gathered import compiled, promised

from toast_cli.program.quantities import format_count
from toast_cli.report.build import collective_facts

X, W, V = arg(64, 32), arg(32, 16), arg(16, 32)
TRUTH, NUMBER = arg(dtype=jnp.bool_), arg(dtype=jnp.int32)


def layer(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ v


def one_of_two(x: Any, w: Any, v: Any, p: Any) -> Any:
    return lax.cond(p, lambda: layer(x, w, v), lambda: x)


def one_of_three_twice(x: Any, w: Any, v: Any, i: Any) -> Any:
    return lax.switch(i, [lambda: x, lambda: layer(layer(x, w, v), w, v), lambda: jnp.sin(x)])


def all_of_three(x: Any, w: Any, v: Any, i: Any) -> Any:
    return lax.switch(i, [lambda: layer(x, w, v), lambda: jnp.sin(layer(x, w, v)), lambda: layer(x, 2 * w, v)])


def nested(x: Any, w: Any, v: Any, p: Any) -> Any:
    return lax.cond(p, lambda: lax.cond(x[0, 0] > 0, lambda: layer(x, w, v), lambda: x), lambda: x)


def in_a_loop(x: Any, w: Any, v: Any) -> Any:
    return lax.fori_loop(0, 6, lambda i, c: lax.cond(i % 3 == 0, lambda: layer(c, w, v), lambda: c), x)


def until_small(x: Any, w: Any, v: Any) -> Any:
    return lax.while_loop(lambda c: c[0, 0] > 1, lambda c: layer(c, w, v), x)


def causal(x: Any, w: Any, v: Any) -> Any:
    return lax.fori_loop(0, 4, lambda i, c: lax.fori_loop(0, i + 1, lambda _, d: layer(d, w, v), c), x)


# what, arguments, `--runs`, runs of the all-reduces over what splits the 16 hidden numbers, and of which shape
CASES: list[tuple[Any, tuple[Any, ...], tuple[str, ...], float]] = [
    (one_of_two, (X, W, V, TRUTH), (), 1 / 2),
    (one_of_two, (X, W, V, TRUTH), ("*=9,1",), 1 / 10),
    (one_of_three_twice, (X, W, V, NUMBER), (), 2 / 3),
    (one_of_three_twice, (X, W, V, NUMBER), ("*=1,1,3",), 2 / 5),
    (all_of_three, (X, W, V, NUMBER), (), 1),
    (nested, (X, W, V, TRUTH), (), 1 / 4),
    (in_a_loop, (X, W, V), (), 2),  # in trips 0 and 3
    (until_small, (X, W, V), ("test_branch_collectives.py:*while*=37",), 37),
    (causal, (X, W, V), (), 10),  # 1 + 2 + 3 + 4
]


@pytest.mark.parametrize(
    ("function", "arguments", "stated", "runs"), CASES, ids=[" ".join([case[0].__name__, *case[2]]) for case in CASES]
)
def test_as_promised(function: Any, arguments: tuple[Any, ...], stated: tuple[str, ...], runs: float) -> None:
    case: Case = case_of(function, *arguments, runs=stated)
    plan = (case.shard("w.1", "data"),)
    facts = collective_facts(case.source, case.evaluator, plan)
    assert sum(fact.count for fact in facts) == pytest.approx(runs)
    assert all((fact.kind, fact.axes, fact.bytes) == ("all-reduce", ["data"], 64 * 32 * 4) for fact in facts)
    assert promised(case, plan) == pytest.approx({("all-reduce", ("data",)): runs * 64 * 32 * 4})
    for form in ("stablehlo", "hlo"):
        assert compiled(case, plan, form) == pytest.approx(promised(case, plan))


def test_a_report_says_how_often() -> None:
    """Half of all steps is not never."""
    case = case_of(one_of_two, X, W, V, TRUTH)
    (fact,) = collective_facts(case.source, case.evaluator, (case.shard("w.1", "data"),))
    assert format_count(fact.count) == "0.5"
    assert [format_count(count) for count in (0, 1 / 3, 1, 1.0, 2 / 3 + 1 / 3, 1.5, 9205)] == [
        "0", "0.33", "1", "1", "1", "1.5", "9,205",
    ]  # fmt: skip


def test_what_one_branch_reads_otherwise_is_exchanged_in_it() -> None:
    """64 rows over 4 devices, of which one branch of three needs columns: two all-to-alls in a third of all runs."""
    case = case_of(lambda x, i: lax.switch(i, [lambda v: jnp.sort(v, 0), jnp.sin, jnp.cos], x), X, NUMBER)
    plan = (case.shard("x.0", "data"), case.shard("x.1", "data"))
    expected = {("all-to-all", ("data",)): 2 / 3 * 64 * 32 * 4 / 4}
    assert promised(case, plan) == pytest.approx(expected)
    assert compiled(case, plan, "hlo") == pytest.approx(expected)
