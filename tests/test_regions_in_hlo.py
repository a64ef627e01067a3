"""Manual regions (`shard_map`) written as HLO for XLA without Shardy: between custom calls, over all axes or some."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from emitted import emit
from jax import lax
from test_manual_regions import AXES, P, W, X, by_hand, outcome_of, over_one_axis, tensor_parallel

from toast_cli.ask_xla.compile import collectives_after_partitioning
from toast_cli.ask_xla.numbers import compare_numbers
from toast_cli.ask_xla.verdict import compare_traffic
from toast_cli.base.errors import UsageError
from toast_cli.emit.hlo import gspmd_string
from toast_cli.pipeline import Outcome, partition
from toast_cli.plan.decisions import Shard
from toast_cli.report.build import collective_facts
from toast_cli.request import Request
from toast_cli.xla import write_bytecode

# sharding of a local array, axes that are manual -> on axes of 4, 2 and 3 devices
STRINGS = [
    (((), ()), {0, 1, 2}, "{manual}"),
    (((0,), (1,)), {0}, "{devices=[1,2,4,3]<=[4,2,3]T(1,0,2) last_tile_dims={manual, replicated}}"),
    (((0, 1), (2,)), {0}, "{devices=[2,3,4]<=[4,6]T(1,0) last_tile_dims={manual}}"),
    ((), {1}, "{devices=[2,12]<=[4,2,3]T(1,0,2) last_tile_dims={manual, replicated}}"),
    (((0,),), set(), "{devices=[4,6]<=[24] last_tile_dim_replicate}"),
]


@pytest.mark.parametrize(("sharding", "manual", "text"), STRINGS)
def test_notation(sharding: Any, manual: set[int], text: str) -> None:
    assert gspmd_string(sharding, (4, 2, 3), frozenset(manual)) == text


def looped(x: Any, w: Any) -> Any:
    return lax.scan(lambda c, _: (tensor_parallel(c, w), None), x, length=3)[0]


def chosen(x: Any, w: Any) -> Any:
    """A branch in a region that asks which device it is on; zeros inside and outside of it."""

    def first(x: Any) -> Any:
        return lax.cond(lax.axis_index("data") == 0, lambda: x * 2, lambda: jnp.zeros_like(x))

    return by_hand(first, P("data"), P("data"))(jnp.where(x > 0, x, 0.0)) @ w


def over_some(body: Any, *ins: Any) -> Any:
    return lambda x, w: over_one_axis(body, ins, P(None, None, "model"))(x, w)


def scattered(x: Any, w: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        return lax.psum_scatter(x @ w, "model", scatter_dimension=2, tiled=True)

    return over_some(body, P(None, None, "model"), P("model"))(x, w)


def planned(function: Any) -> Outcome:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (X, W)]
    text = jax.jit(function).lower(*arguments).as_text(debug_info=True)
    return partition(Request("r.mlir", "v4-32", "data=4,model=4", iterations=200, content=text.encode()))


NAMED = ["ring attention", "experts' gradient", "fsdp", "halves", "partly's gradient", "pipeline"]


@pytest.mark.parametrize("function", [*NAMED, looped, chosen, scattered], ids=lambda one: getattr(one, "__name__", one))
def test_as_planned(function: Any) -> None:
    """With the batch split over the devices along "data"."""
    outcome = outcome_of(function) if isinstance(function, str) else planned(function)
    batch = [k for k, group in enumerate(outcome.problem.dimensions.groups) if group.role == "batch"]
    plan = outcome.problem.canonical(tuple(Shard(group, 0) for group in batch[:1]))
    written = emit(outcome.source, outcome.evaluator.lowered(plan), "hlo")
    found = collectives_after_partitioning(written, "hlo", AXES)
    assert isinstance(found, list), found
    promised = collective_facts(outcome.source, outcome.evaluator, plan)
    assert compare_traffic([one.as_written() for one in promised], found, AXES).differences == []
    if function in ("partly's gradient", chosen):
        errors = compare_numbers(write_bytecode(outcome.source.module), written, 16, form="hlo")
        assert isinstance(errors, list) and all(one.error <= one.allowed for one in errors), errors


REFUSED = {
    "all-gather, all-to-all or broadcast in it": lambda x, w: x @ lax.all_gather(w, "model", axis=1, tiled=True),
    "in another one": lambda x, w: x @ w * lax.axis_index("model"),
}


@pytest.mark.parametrize(("what", "body"), REFUSED.items())
def test_what_only_shardy_partitions(what: str, body: Any) -> None:
    outcome = planned(over_some(body, P(), P(None, "model")))
    with pytest.raises(UsageError, match=what) as raised:
        emit(outcome.source, outcome.evaluator.lowered(()), "hlo")
    assert "test_regions_in_hlo.py" in raised.value.where and "--format stablehlo" in raised.value.hint
