"""Constraints that Shardy's propagation could do without, and XLA:TPU's, which sees a simplified program, could not."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from emitted import by_hand
from jax import lax
from programs import Case, arg, case_of, round_mesh

from toast_cli.emit.annotations import Annotations
from toast_cli.emit.minimal import choose_annotations
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding
from toast_cli.program.ops import CARRY, REDUCE


def few(case: Case, lowered: PartitionedProgram) -> Annotations:
    chosen = choose_annotations(case.source, lowered)
    assert chosen.astray == []
    return chosen.annotations


def test_what_a_reduction_reads_a_piece_of_is_cut_in_front_of_it() -> None:
    """XLA sums up all of it else, on each device, and cuts the result."""
    case = case_of(lambda x: jnp.sin(x).sum(1), arg(64, 64), mesh=round_mesh(data=4))
    (reduction,) = (number for number, op in enumerate(case.program.ops) if op.name == REDUCE)
    shardings: list[Sharding] = [((),) * len(value.shape) for value in case.program.values]
    shardings[case.program.ops[reduction].results[0]] = ((0,),)
    lowered = by_hand({"data": 4}, shardings, required={(reduction, 0): ((0,), ())})
    found = [(reshard.edges, case.text(reshard.sharding)) for reshard in few(case, lowered).reshards]
    assert (((reduction, 0),), "data|-") in found


@pytest.mark.parametrize(
    ("decisions", "pinned"), [("w.1:data x.0:data x.0:model", True), ("x.0:data x.0:model", False)]
)
def test_what_a_loop_carries_is_pinned_where_its_axes_come_in_another_order_elsewhere(
    decisions: str, pinned: bool
) -> None:
    """The product's columns take one of the two axes of the batch, the first one: the other comes first on the way."""

    def run(x: Any, w: Any) -> Any:
        return lax.fori_loop(0, 4, lambda _, x: jnp.sin(x) * 2.0, x) @ w

    case = case_of(run, arg(16, 16), arg(16, 16), mesh=round_mesh(data=2, model=4))
    plan = tuple(case.shard(*decision.split(":")) for decision in decisions.split())
    results = (op.results[0] for op in case.program.ops if op.name == CARRY)
    carried = {case.source.definitions[value] for value in results if case.program.values[value].shape}
    constraints = few(case, case.lowered(plan)).constraints
    assert any(constraint.handle in carried for constraint in constraints) is pinned
