"""What XLA's partitioner gathers everything for is written in regions, where it is split."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from emitted import emit, partitioned
from jax import lax
from programs import Case, arg, case_of
from run_here import wrong_in

from toast_cli.emit import write
from toast_cli.emit.misread import gathered_ops
from toast_cli.plan.decisions import Plan

Sent = dict[tuple[str, tuple[str, ...]], float]


def convolution(groups: int) -> Any:
    return lambda x, k: lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def gradients(groups: int) -> Any:
    return jax.grad(lambda x, k: (convolution(groups)(x, k) ** 2).sum(), (0, 1))


IMAGE, WIDE, BY_CHANNEL = arg(8, 8, 4, 32), arg(3, 3, 4, 64), arg(3, 3, 1, 32)
# what, function, arguments, how many of its ops XLA gathers everything for
CASES: list[tuple[str, Any, tuple[Any, ...], int]] = [
    ("top_k", lambda x: lax.top_k(x, 2), (arg(16, 64),), 1),
    ("Fourier", lambda x: jnp.fft.irfft(2 * jnp.fft.fft(x)), (arg(16, 64),), 2),
    ("Fourier in two dimensions", lambda x: jnp.fft.rfft2(x).real, (arg(8, 16, 32),), 1),
    ("sort", lambda x: lax.sort(x, dimension=1), (arg(16, 64),), 0),
    ("convolution", convolution(1), (IMAGE, arg(3, 3, 32, 32)), 0),
    ("grouped convolution", gradients(8), (IMAGE, WIDE), 2),
    ("depthwise convolution", gradients(32), (IMAGE, BY_CHANNEL), 0),
    ("depthwise one with more channels out", gradients(32), (IMAGE, arg(3, 3, 1, 64)), 1),
]


def promised(case: Case, plan: Plan) -> Sent:
    """kind, axes -> bytes."""
    names, found = case.problem.mesh.names, dict[tuple[str, tuple[str, ...]], float]()
    for one in case.lowered(plan).collectives:
        key = one.kind, tuple(names[axis] for axis in one.axes)
        found[key] = found.get(key, 0.0) + one.local_bytes * one.runs
    return found


def compiled(case: Case, plan: Plan, form: Any) -> Sent:
    """The same of what XLA's partitioner writes."""
    found: Sent = {}
    for one in partitioned(case, plan, form):
        found[one.kind, one.axes] = found.get((one.kind, one.axes), 0.0) + one.bytes * one.count
    return found


@pytest.mark.parametrize(
    ("function", "arguments", "gathered"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_nothing_more_is_sent(function: Any, arguments: tuple[Any, ...], gathered: int, form: Any) -> None:
    case = case_of(function, *arguments)
    first = case.program.arguments[0].path
    batch = (case.shard(f"{first}.0", "data"),)
    assert len(gathered_ops(case.source, case.lowered(batch))) == gathered
    assert compiled(case, batch, form) == promised(case, batch)


@pytest.mark.parametrize("dim", [1, 3])
def test_however_it_is_split(dim: int) -> None:
    """Neighbours' rows are sent along the picture, and nothing where groups are split."""
    case = case_of(convolution(8), IMAGE, WIDE)
    plan = (case.shard(f"{case.program.arguments[0].path}.{dim}", "data"),)
    assert compiled(case, plan, "stablehlo") == promised(case, plan)
    assert wrong_in(case.source, emit(case.source, case.lowered(plan), "hlo"), 8, "hlo") == []


def test_no_region_where_nothing_is_split() -> None:
    case = case_of(lambda x: lax.top_k(x, 2), arg(16, 64))
    assert gathered_ops(case.source, case.lowered(())) == []
    assert b"manual_computation" not in emit(case.source, case.lowered(()), "stablehlo")


def test_forms_without_regions_say_so() -> None:
    case = case_of(lambda x: lax.top_k(x, 2), arg(16, 64))
    plan = (case.shard(f"{case.program.arguments[0].path}.0", "data"),)
    (note,) = write(case.source, case.lowered(plan), "specs").notes
    assert re.match(r"XLA's partitioner gathers all that \S+:\d+ .*reads, though .*, as XLA:TPU does; --format", note)


ROWS, PART, PLACE = arg(64, 32), arg(16, 32), arg(dtype=jnp.int32)
# where an update of rows begins, its shape, whether it may touch the pieces of several devices (of 16 rows)
UPDATES: list[tuple[str, Any, tuple[Any, ...], bool]] = [
    ("at an unknown place", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), (ROWS, PART, PLACE), True),
    ("at a place in two pieces", lambda x, u: lax.dynamic_update_slice(x, u, (5, 0)), (ROWS, PART), True),
    ("at a place in one piece", lambda x, u: lax.dynamic_update_slice(x, u, (32, 0)), (ROWS, PART), False),
    ("of one row", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), (ROWS, arg(1, 32), PLACE), False),
    ("of all rows", lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i)), (ROWS, arg(64, 8), PLACE), False),
    ("of blocks", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)), (ROWS, arg(16, 8), PLACE), True),
]


@pytest.mark.parametrize(
    ("function", "arguments", "several"), [one[1:] for one in UPDATES], ids=[o[0] for o in UPDATES]
)
@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_updates_of_a_part(function: Any, arguments: tuple[Any, ...], several: bool, form: Any) -> None:
    """Each device puts in what falls into its piece: the array stays where it is, and the update is there whole."""
    case = case_of(function, *arguments)
    names = [argument.path for argument in case.program.arguments]
    plan = tuple(
        [case.shard(f"{name}.0", "data") for name, of in zip(names, arguments[:2], strict=False) if of.shape[0] > 1]
    )
    assert len(gathered_ops(case.source, case.lowered(plan))) == several
    assert compiled(case, plan, form) == promised(case, plan)
    assert wrong_in(case.source, emit(case.source, case.lowered(plan), form), 8, form) == []


def test_a_cache_filled_in_a_loop() -> None:
    """Block after block, at places that the loop counts, along the split dimension."""

    def fill(x: jax.Array, cache: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 4, lambda i, c: lax.dynamic_update_slice(c, jnp.sin(x) * i, (0, i * 8, 0)), cache)

    case = case_of(fill, arg(4, 8, 16), arg(4, 64, 16))
    plan = (case.shard("cache.1", "data"), case.shard("x.2", "model"))
    assert promised(case, plan) == {}
    assert compiled(case, plan, "stablehlo") == {}
    assert wrong_in(case.source, emit(case.source, case.lowered(plan), "stablehlo"), 8) == []


def router(x: jax.Array, w: jax.Array) -> jax.Array:
    """Layers in a loop, each of which sends rows to two of eight places."""

    def layer(rows: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        shares, places = lax.top_k(jax.nn.softmax(rows @ weight), 2)
        return rows + (jax.nn.one_hot(places, 8) * shares[..., None]).sum(1), None

    return lax.scan(layer, x, w)[0].sum()


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_in_a_loop_beside_what_nobody_needs(form: Any) -> None:
    """The sum itself is no result of its gradient: a constraint in front of it would be lost on the way to HLO."""
    case = case_of(lambda x, w: jax.grad(router, (0, 1))(x, w), arg(16, 8), arg(3, 8, 8))
    plan = (case.shard(f"{case.program.arguments[0].path}.0", "data"),)
    assert len(gathered_ops(case.source, case.lowered(plan))) == 1
    assert compiled(case, plan, form) == promised(case, plan)
    assert wrong_in(case.source, emit(case.source, case.lowered(plan), form), 8, form) == []
