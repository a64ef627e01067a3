"""The plan comes out in whatever order the compiler's propagation visits the ops."""

from __future__ import annotations

import pytest
from programs import problem_of, sample
from sweeps import sweep

from toast_cli.emit.minimal import choose_annotations, declining, reduced_behind_transposes
from toast_cli.emit.shardy import QUICK, propagate, without_units
from toast_cli.frontend.source import Source
from toast_cli.plan.lower import lower
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding
from toast_cli.program.model import Rule
from toast_cli.tactics import starting_plans

WHOLE, DATA, MODEL = (), (0,), (1,)
MATMUL = Rule((8, 8, 8), (((0,), (2,)), ((2,), (1,))), (((0,), (1,)),), reduction=frozenset({2}))
ADD = Rule((8, 8), (((0,), (1,)), ((0,), (1,))), (((0,), (1,)),))
MERGE = Rule((4, 8), (((0,), (1,)),), (((0, 1),),))  # a reshape of 4 x 8 to 32
SORT = Rule((8, 8), (((0,), (1,)),), (((0,), (1,)),), need_replication=frozenset({1}))


@pytest.mark.parametrize(
    ("rule", "shardings", "contested"),
    [
        # every array is split alike: nobody offers more than there is
        (ADD, ((DATA, WHOLE), (DATA, WHOLE), (DATA, WHOLE)), (False, False, False)),
        # the first operand is split further than the plan has the others
        (ADD, ((DATA, MODEL), (DATA, WHOLE), (DATA, WHOLE)), (False, True, True)),
        # along different dimensions: each wants the others
        (ADD, ((DATA, WHOLE), (WHOLE, DATA), (WHOLE, DATA)), (True, True, True)),
        # a reduce-scattered product: its columns would split those of the weight
        (MATMUL, ((WHOLE, DATA), (DATA, WHOLE), (WHOLE, DATA)), (False, True, False)),
        # an axis of another order counts as another axis
        (ADD, (((0, 1), WHOLE), ((1, 0), WHOLE), ((1, 0), WHOLE)), (True, True, True)),
        # the major factor takes the first axis, the minor one the second
        (MERGE, ((DATA, MODEL), ((0, 1),)), (False, False)),
        (MERGE, ((DATA, WHOLE), ((0, 1),)), (True, False)),
        # what an op needs whole is offered to nobody
        (SORT, ((WHOLE, MODEL), (WHOLE, WHOLE)), (False, False)),
    ],
)
def test_a_value_is_contested_where_a_neighbour_splits_it_further(
    rule: Rule, shardings: tuple[Sharding, ...], contested: tuple[bool, ...]
) -> None:
    assert declining(rule, shardings, (False,) * len(shardings), (4, 2)) == contested


def test_values_made_for_each_use_offer_nothing() -> None:
    shardings = ((DATA, MODEL), (DATA, WHOLE), (DATA, WHOLE))
    assert declining(ADD, shardings, (True, False, False), (4, 2)) == (False, False, False)


@pytest.mark.parametrize("name", sweep(["scan_tiny", "gns_tiny", "moe_tiny", "itx_decode_tiny"], "itx_decode_tiny"))
def test_the_order_of_propagation_does_not_matter(name: str) -> None:
    """Shardy propagates through elementwise ops first, then through others. XLA:TPU simplifies the program before that,
    so that the same sharding reaches a value sooner or later: a decoder's scanned layers sent 169 GiB for 3."""
    source, _ = sample(name)
    problem = problem_of(source, "v4-32")
    for plan in starting_plans(problem):
        lowered = reduced_behind_transposes(source, lower(problem, plan))
        assert strays_in_another_order(source, lowered) == []


def strays_in_another_order(source: Source, lowered: PartitionedProgram) -> list[int]:
    """Values that lie elsewhere than planned when all kinds of ops are propagated through alike."""
    annotations = choose_annotations(source, lowered).annotations
    passes = QUICK.replace("sdy-user-priority-propagate", "sdy-aggressive-propagate")
    found = propagate(source, lowered, annotations, passes).values
    return [
        value
        for value, got in found.items()
        if got not in {without_units(at, lowered.axis_sizes) for at in lowered.path(value)}
    ]
