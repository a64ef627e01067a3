"""Reductions of products that are only transposed are written behind the transpose, where XLA folds it into the
product.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
from emitted import emit
from programs import Case, arg, case_of

from toast_cli.plan.decisions import Plan
from toast_cli.plan.lower import lower

CONSTRAINT = re.compile(r"(%\w+) = sdy.sharding_constraint (%\w+) <@mesh, \[(.*?)\]")


def gradient(rows: int = 64, columns: int = 32, *, twice: bool = False) -> Case:
    """A weight w [rows, columns] and the gradient of x @ w, which jax makes as dy x and transposes. twice: the product
    is read as it is, too.
    """

    def step(w: jax.Array, x: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        product = jnp.einsum("bf,bd->fd", dy, x)
        updated = w - 0.1 * product.T
        return (updated, product) if twice else (updated,)

    return case_of(step, arg(rows, columns), arg(16, rows), arg(16, columns))


def scattered(case: Case) -> Plan:
    """Over both axes, the batch and then w's first dimension."""
    return tuple(case.shard(path, axis) for path in ("x.0", "w.0") for axis in ("data", "model"))


def chain(text: str) -> list[tuple[str, str]]:
    """(op, what it says) from the product on."""
    lines = text.splitlines()
    start = next(k for k, line in enumerate(lines) if "stablehlo.dot_general" in line)
    found = []
    for line in lines[start:]:
        constraint = CONSTRAINT.search(line)
        if constraint:
            found.append(("constraint", constraint[3]))
        elif "= stablehlo." in line:
            found.append((line.split("stablehlo.")[1].split()[0], ""))
    return found


def test_the_pins_of_a_gradient_stand_behind_its_transpose() -> None:
    case = gradient()
    found = chain(emit(case.source, lower(case.problem, scattered(case)), "stablehlo").decode())
    assert [name for name, _ in found[:4]] == ["dot_general", "transpose", "constraint", "constraint"]
    assert found[2][1].endswith("{}") and found[3][1].endswith(
        "{}"
    )  # dimensions as transposed: w's first is the one that is split


def test_a_gradient_of_narrow_pieces_is_scattered_as_it_is_made() -> None:
    """XLA:TPU lays out pieces of 1024 x 16 the other way round."""
    case = gradient(1024, 128)
    plan = tuple(case.shard(path, axis) for path in ("x.0", "w.1") for axis in ("data", "model"))
    found = chain(emit(case.source, lower(case.problem, plan), "stablehlo").decode())
    assert [name for name, _ in found[:4]] == ["dot_general", "constraint", "constraint", "transpose"]
    assert found[2][1].endswith("{}")  # the dimension that is split is the product's first


def test_what_others_read_too_is_pinned_where_it_is_made() -> None:
    case = gradient(twice=True)
    found = chain(emit(case.source, lower(case.problem, scattered(case)), "stablehlo").decode())
    assert [name for name, _ in found[:2]] == ["dot_general", "constraint"]
