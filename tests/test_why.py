"""The words that compare a plan with the known strategies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from programs import evaluator_of, round_mesh, sample

from toast_cli.plan.decisions import Plan, Shard
from toast_cli.price.cost import Cost
from toast_cli.price.evaluator import Evaluator
from toast_cli.report.build import build_report
from toast_cli.report.words import traffic, why
from toast_cli.search.incumbent import SearchResult
from toast_cli.tactics import PricedStrategy, strategy

MIB = 2**20
ELSEWHERE = round_mesh(data=2, model=4)
COST = Cost(0.016, 0.009, 100 * MIB, 50 * MIB)


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    """Of a mesh on which less than 1 GiB surely fits."""
    return evaluator_of(sample("mlp_tiny")[0], round_mesh(2**30, data=4, model=2))


def found(plan: Plan, cost: Cost) -> SearchResult:
    return SearchResult(plan, cost, True, 100, 50, 1.0, "iterations")


def known(evaluator: Evaluator, name: str, cost: Cost) -> PricedStrategy:
    """A strategy on another mesh shape, so that its collectives are not those of `evaluator`."""
    return PricedStrategy(name, "", strategy(evaluator.problem, name), cost, ELSEWHERE)


@pytest.mark.parametrize(
    ("cost", "says"),
    [
        (
            COST,  # 25 ms against 30
            "This plan is 16.7% faster than fsdp, the fastest listed strategy that fits: communication -4.00 ms, "
            "compute -1.00 ms, peak memory +20.0 MiB.",
        ),
        (
            replace(COST, communication_seconds=0.014, peak_bytes=40 * MIB),  # equally fast, and smaller
            "This plan is as fast as fsdp, the fastest listed strategy that fits: compute -1.00 ms, "
            "communication +1.00 ms, peak memory -40.0 MiB.",
        ),
        (
            replace(COST, exposed_seconds=0.007, communication_seconds=0.013),  # hides 6 of 13 ms
            "This plan is 23.3% faster than fsdp, the fastest listed strategy that fits: more overlap -6.00 ms, "
            "compute -1.00 ms, peak memory +20.0 MiB.",
        ),
        (
            replace(COST, compute_seconds=0.024),
            "This plan is 10.0% slower than fsdp, the fastest listed strategy that fits: compute +7.00 ms, "
            "communication -4.00 ms, peak memory +20.0 MiB.",
        ),
    ],
)
def test_a_plan_against_the_fastest_known_strategy(evaluator: Evaluator, cost: Cost, says: str) -> None:
    strategies = {
        "megatron": known(evaluator, "megatron", replace(COST, compute_seconds=1.0)),
        "fsdp": known(
            evaluator, "fsdp", replace(COST, compute_seconds=0.017, communication_seconds=0.013, peak_bytes=80 * MIB)
        ),
    }
    plan = strategy(evaluator.problem, "zero2")[1:]
    text = why(evaluator, found(plan, cost), strategies)
    decided = (
        "The plan adds weights replicated over data; weights replicated over model. The plan lacks batch over data."
    )
    assert text == f"{says} {decided}"


def test_a_faster_strategy_that_does_not_fit_is_named(evaluator: Evaluator) -> None:
    fast = known(evaluator, "data-parallel", replace(COST, compute_seconds=0.001, peak_bytes=2**30))
    slow = known(evaluator, "fsdp", replace(COST, compute_seconds=0.017))
    result = found(strategy(evaluator.problem, "megatron"), COST)
    text = why(evaluator, result, {"data-parallel": fast, "fsdp": slow})
    assert text.startswith("This plan is 3.8% faster than fsdp, the fastest listed strategy that fits: ")
    assert text.endswith(" data-parallel is faster, but does not surely fit.")
    assert why(evaluator, replace(result, strategy="zero2"), {"fsdp": slow}).startswith("This plan (zero2) is 3.8% ")
    text = why(evaluator, result, {"data-parallel": fast})
    assert "% slower than data-parallel, the fastest listed strategy (none surely fits): " in text
    assert not text.endswith("fit.")


def test_a_known_strategy_needs_no_words(evaluator: Evaluator) -> None:
    strategies = {
        name: known(evaluator, name, cost)
        for name, cost in (("megatron", COST), ("fsdp", replace(COST, peak_bytes=MIB)))
    }
    assert not why(evaluator, found((), COST), strategies)
    assert not why(
        evaluator,
        found((), COST),
        {"unsharded": PricedStrategy("unsharded", "", (), replace(COST, peak_bytes=1), ELSEWHERE)},
    )


def test_a_strategy_without_what_changes_nothing_is_not_compared_with_itself(evaluator: Evaluator) -> None:
    strategies = {"fsdp": known(evaluator, "fsdp", replace(COST, peak_bytes=101 * MIB))}
    assert not why(evaluator, replace(found((), COST), strategy="fsdp"), strategies)


def test_the_parts_account_for_the_whole_difference(evaluator: Evaluator) -> None:
    """Compute, each kind of collectives over each axis, and overlap make up the difference of two steps."""
    plan, other = (strategy(evaluator.problem, name) for name in ("fsdp", "megatron"))
    cost, than = evaluator.exact_cost(plan), evaluator.exact_cost(other)
    uses = [evaluator.collectives(plan), evaluator.collectives(other)]
    parts = [now - then for _, now, then in traffic(*uses, evaluator.problem.mesh.names)]
    assert [abs(part) for part in parts] == sorted(map(abs, parts), reverse=True)
    hidden = [of.most_seconds - of.step_seconds for of in (cost, than)]
    whole = cost.compute_seconds - than.compute_seconds + sum(parts) - (hidden[0] - hidden[1])
    assert whole == pytest.approx(cost.step_seconds - than.step_seconds)


def test_a_report_has_the_words_unless_the_plan_is_known() -> None:
    source = sample("mlp_tiny")[0]
    evaluator = evaluator_of(source, "v4-32")
    fsdp = strategy(evaluator.problem, "fsdp")
    words = [
        build_report(source, evaluator, found(plan, evaluator.exact_cost(plan)), "mcts", 0).plan.why
        for plan in (fsdp, fsdp[:-1])
    ]
    assert not words[0]
    assert "% slower than data-parallel, the fastest listed strategy that fits: all-gather over " in words[1]


def test_a_decision_with_another_scope_is_another_decision(evaluator: Evaluator) -> None:
    """As in `toast compare`."""
    batch, *rest = strategy(evaluator.problem, "fsdp")
    assert isinstance(batch, Shard)
    slower = known(evaluator, "fsdp", replace(COST, compute_seconds=1.0))
    partly = batch._replace(unless=next(d.group for d in rest if isinstance(d, Shard)))
    text = why(evaluator, found((partly, *rest), COST), {"fsdp": slower})
    assert text.partition("The plan adds ")[2].startswith("batch (except in ops with ")
    assert text.endswith("The plan lacks batch over data.")


@pytest.mark.parametrize(("mesh", "says"), [("v4-32", True), ("h100-8", False)])
def test_gradients_that_xla_all_reduces_all_the_same_are_named(mesh: str, says: bool) -> None:
    """The pieces of the weights of so small a program are less than a tile."""
    of = evaluator_of(sample("mlp_tiny")[0], mesh)
    fsdp = strategy(of.problem, "fsdp")
    slower = PricedStrategy("fsdp", "", fsdp, replace(of.exact_cost(fsdp), compute_seconds=1.0), of.problem.mesh)
    plan = strategy(of.problem, "data-parallel")
    text = why(of, found(plan, of.exact_cost(plan)), {"fsdp": slower})
    assert text.endswith("In fsdp, XLA all-reduces gradients of which a device keeps a shard.") == says
