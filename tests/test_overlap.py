"""Which communication stays exposed beside computing, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from programs import PLAIN, Case, arg, case_of, round_mesh
from random_programs import cases, plans

from toast_cli.plan.decisions import Shard, parse_goal
from toast_cli.price.collectives import KINDS
from toast_cli.price.cost import Cost
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.timeline import Sent, Windows, exposed_seconds
from toast_cli.search.run import Settings, run_search

DATA, MODEL, BOTH = 1, 2, 3  # a bit for each axis
US = 1e-6
# Kernels run at the moments 1, 3, 5 for 2, 3 and 4 seconds; so do what is due at 2 k is done before kernel k.
# name, (ready, due, seconds, axes) of each collective, seconds that the cores wait
SCHEDULES: list[tuple[str, list[tuple[int, int, float, int]], float]] = [
    ("nothing is sent", [], 0.0),
    ("its reader follows at once", [(2, 2, 5.0, DATA)], 5.0),
    ("hidden by one kernel", [(0, 2, 2.0, DATA)], 0.0),
    ("longer than the kernels before its reader", [(0, 4, 6.0, DATA)], 1.0),
    ("made by the first kernel, read by the last", [(2, 4, 4.0, DATA)], 1.0),
    ("two on one link: the second waits", [(0, 2, 2.0, DATA), (0, 4, 4.0, DATA)], 1.0),
    ("two on two links", [(0, 2, 2.0, DATA), (0, 4, 4.0, MODEL)], 0.0),
    ("what is needed first goes first", [(0, 6, 5.0, DATA), (0, 2, 2.0, DATA)], 0.0),
    ("over both axes: waits for one", [(0, 2, 2.0, DATA), (0, 4, 4.0, BOTH)], 1.0),
    ("while the cores wait, other links go on", [(2, 2, 3.0, DATA), (0, 4, 7.0, MODEL)], 3.0),
    ("while the cores wait, the same link does not", [(2, 2, 3.0, DATA), (0, 4, 7.0, DATA)], 5.0),
    ("ready after its reader's moment at the end", [(6, 6, 1.0, DATA), (6, 8, 1.0, DATA)], 2.0),
]


@pytest.mark.parametrize(("sent", "expected"), [row[1:] for row in SCHEDULES], ids=[row[0] for row in SCHEDULES])
def test_exposed_seconds(sent: list[tuple[int, int, float, int]], expected: float) -> None:
    assert exposed(sent) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("sent", "at_once", "queued"),
    [
        # Both wait for nothing. The second has the kernel between the first's reader and its own: 3 of its 5 seconds.
        ([(0, 2, 2.0, DATA), (0, 4, 5.0, DATA)], 2.0, 2.0),
        ([(0, 2, 1.0, DATA), (0, 4, 4.0, DATA)], 0.0, 1.0),
        ([(0, 2, 1.0, MODEL), (0, 4, 4.0, DATA)], 0.0, 1.0),
        ([(0, 4, 1.0, DATA), (0, 4, 4.0, DATA)], 0.0, 4.0),
        ([(0, 2, 1.0, DATA), (2, 6, 7.0, DATA)], 0.0, 0.0),
    ],
)
def test_one_gather_at_a_time(sent: list[tuple[int, int, float, int]], at_once: float, queued: float) -> None:
    assert (exposed(sent), exposed(sent, queued=True)) == pytest.approx((at_once, queued))


def exposed(sent: list[tuple[int, int, float, int]], *, queued: bool = False) -> float:
    """Exposed seconds beside three kernels of 2, 3 and 4 seconds."""
    ready, due, seconds, axes = (np.array([one[k] for one in sent]) for k in range(4))
    whole = np.int64
    collectives = Sent(
        ready.astype(whole), due.astype(whole), seconds.astype(float), axes.astype(whole), np.full(len(sent), queued)
    )
    return exposed_seconds(np.array([1, 3, 5]), np.array([2.0, 3.0, 4.0]), collectives)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3), st.integers(1, 9), st.integers(1, 3)), max_size=12))
def test_collectives_that_are_surely_in_time_need_not_be_followed(rows: list[tuple[int, int, int, int]]) -> None:
    sent = [(ready, ready + length, float(seconds), axes) for ready, length, seconds, axes in rows]
    with patch("toast_cli.price.timeline._perhaps_late", lambda start, *_: np.arange(len(start))):
        every = exposed(sent)
    assert exposed(sent) == pytest.approx(every)


def two_layers(x: Any, v: Any, w: Any) -> Any:
    return (x @ v) @ w


def scanned(x: Any, v: Any, w: Any) -> Any:
    return lax.scan(lambda y, weights: ((y @ weights[0]) @ weights[1], None), x, (v, w))[0]


def scheduled(run: Any, kinds: tuple[str, ...], *shapes: Any, split: tuple[str, ...]) -> Cost:
    """The cost on four devices of a plan that splits these dimensions, where those kinds are asynchronous."""
    profile = replace(PLAIN, asynchronous=frozenset(kinds))
    case = case_of(run, *shapes, mesh=round_mesh(data=4), profile=profile)
    return case.evaluator.exact_cost(tuple(case.shard(name, "data") for name in split))


LAYERS = (arg(400, 100), arg(100, 100), arg(100, 100))


def test_a_weight_is_gathered_beside_the_layer_before() -> None:
    """3/4 of 40,000 bytes of w at 1e8 bytes/s: 300 us; each product reads and writes 3 * 40,000 bytes: 120 us."""
    cost = scheduled(two_layers, ("all-gather",), *LAYERS, split=("x.0", "w.1"))
    assert cost.communication_seconds == pytest.approx(300 * US)
    assert cost.compute_seconds == pytest.approx(240 * US, rel=1e-3)
    assert cost.step_seconds == pytest.approx(cost.compute_seconds + 180 * US, rel=1e-3)
    assert cost.least_seconds == cost.step_seconds


def test_what_a_compiler_leaves_synchronous_is_exposed() -> None:
    cost = scheduled(two_layers, ("all-reduce",), *LAYERS, split=("x.0", "w.1"))
    assert cost.step_seconds == pytest.approx(cost.most_seconds)
    assert cost.least_seconds == pytest.approx(cost.compute_seconds + 180 * US, rel=1e-3)


def test_a_trip_of_a_loop_overlaps_with_no_other() -> None:
    """In each of 3 trips v (300 us) is gathered with nothing before it, and w beside the product with v."""
    shapes = (arg(400, 100), arg(3, 100, 100), arg(3, 100, 100))
    cost = scheduled(scanned, KINDS, *shapes, split=("x.0", "v.1"))
    assert cost.communication_seconds == pytest.approx(3 * 600 * US)
    one_product = cost.compute_seconds / 6
    assert cost.exposed_seconds == pytest.approx(3 * (600 * US - one_product), rel=1e-2)


def test_an_all_reduce_between_two_layers_is_waited_for() -> None:
    """Split in what is contracted, the second product is partial; nothing is left to compute beside its all-reduce."""
    cost = scheduled(two_layers, KINDS, *LAYERS, split=("w.0",))
    assert cost.communication_seconds > 0
    assert cost.least_seconds == pytest.approx(cost.most_seconds)


MESH = AbstractMesh((4,), ("data",), (AxisType.Auto,))


def by_hand(body: Any, ins: Any, outs: Any) -> Any:
    return jax.shard_map(body, mesh=MESH, in_specs=ins, out_specs=outs, check_vma=False)


def gather(w: Any) -> Any:
    return lax.all_gather(w, "data", tiled=True)


def beside(x: Any, v: Any, w: Any) -> Any:
    return by_hand(lambda x, v, w: (x @ v) @ gather(w), (P("data"), P(), P("data")), P("data"))(x, v, w)


def layer_of_its_own(x: Any, v: Any, w: Any) -> Any:
    return by_hand(lambda x, w: x @ gather(w), (P("data"), P("data")), P("data"))(x @ v, w)


def read_later(x: Any, v: Any, w: Any) -> Any:
    gathered = by_hand(lambda w: gather(jnp.sort(w)), P("data"), P())(w)
    return (x @ v) @ gathered


def in_a_loop_of_a_region(x: Any, v: Any, w: Any) -> Any:
    def layers(x: Any, v: Any, w: Any) -> Any:
        return lax.scan(lambda x, _: ((x @ v) @ gather(w), None), x, length=3)[0]

    return by_hand(layers, (P("data"), P(), P("data")), P("data"))(x, v, w)


@pytest.mark.parametrize(
    ("run", "trips"),
    [(beside, 1), (layer_of_its_own, 1), (read_later, 1), (in_a_loop_of_a_region, 3)],
    ids=lambda what: getattr(what, "__name__", ""),
)  # fmt: skip
@pytest.mark.parametrize("kinds", [KINDS, ()], ids=["asynchronous", "synchronous"])
def test_what_is_sent_by_hand_overlaps_as_what_the_partitioner_sends(run: Any, trips: int, kinds: Any) -> None:
    """A weight is gathered for 300 us beside a product of 120 us, whether that is in the region or around it."""
    profile = replace(PLAIN, asynchronous=frozenset(kinds))
    case = case_of(run, *LAYERS, mesh=round_mesh(data=4), profile=profile)
    rows = [number for number, group in enumerate(case.problem.dimensions.groups) if group.size == 400]
    cost = case.evaluator.exact_cost(case.problem.canonical(tuple(Shard(number, 0) for number in rows)))
    assert cost.communication_seconds == pytest.approx(trips * 300 * US)
    assert cost.least_exposed_seconds == pytest.approx(trips * 180 * US, rel=1e-2)
    assert cost.step_seconds == pytest.approx(cost.least_seconds if kinds else cost.most_seconds)


@given(cases(), st.data())
@settings(max_examples=15, deadline=None)
def test_the_expected_step_lies_between_the_bounds(case: Case, data: st.DataObject) -> None:
    cost = case.evaluator.exact_cost(data.draw(plans(case.problem)))
    assert cost.least_seconds <= cost.step_seconds * (1 + 1e-9) + 1e-12
    assert cost.step_seconds <= cost.most_seconds * (1 + 1e-9) + 1e-12


def test_the_lower_bound_is_not_above_a_better_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all kinds overlapped, links could be busy with other collectives when the first reader comes."""
    case = case_of(two_layers, *LAYERS, mesh=round_mesh(data=4), profile=replace(PLAIN, asynchronous=frozenset(KINDS)))
    monkeypatch.setattr(Windows, "exposed", lambda self, placed, every=False: (2 if every else 1) * US)
    cost = case.evaluator.exact_cost((case.shard("x.0", "data"), case.shard("w.1", "data")))
    assert cost.least_seconds == cost.step_seconds == pytest.approx(cost.busy_seconds + US)


def six_layers(x: Any, *weights: Any) -> Any:
    for weight in weights:
        x = x @ weight
    return x


def test_the_search_takes_communication_that_overlaps() -> None:
    """Not all weights fit on one device. A pair of layers takes an all-reduce of 3/2 * 38,400 bytes (576 us), for which
    all wait, or all-gathers of 3/4 * 2 * 40,000 bytes (600 us), which run beside the layers before."""
    layers = (arg(96, 100), *[arg(100, 100)] * 6)
    mesh = replace(round_mesh(data=4), limit_bytes=262_080)
    case = case_of(six_layers, *layers, mesh=mesh, profile=replace(PLAIN, asynchronous=frozenset(KINDS)))
    kept = run_search(Evaluator(case.problem, profile=PLAIN), Settings(evaluations=500))
    found = run_search(case.evaluator, Settings(evaluations=500))
    assert kept.fits and found.fits
    assert found.cost.most_seconds > kept.cost.most_seconds
    assert found.cost.step_seconds < 0.75 * case.evaluator.exact_cost(kept.plan).step_seconds


def test_plans_that_nothing_can_make_the_best_are_not_simulated() -> None:
    case = case_of(two_layers, *LAYERS, mesh=round_mesh(data=4), profile=replace(PLAIN, asynchronous=frozenset(KINDS)))
    plan = (case.shard("x.0", "data"), case.shard("w.1", "data"))
    cost = case.evaluator.cost(plan)
    assert cost.exposed_seconds is not None and case.evaluator.cost(plan, cost.busy_seconds / 2).exposed_seconds is None


def test_a_bound_on_step_time_is_kept_by_what_overlaps() -> None:
    """Not all weights fit, and of what does no plan keeps the bound unless communication overlaps."""
    layers = (arg(96, 100), *[arg(100, 100)] * 6)
    mesh = replace(round_mesh(data=4), limit_bytes=262_080)
    case = case_of(six_layers, *layers, mesh=mesh, profile=replace(PLAIN, asynchronous=frozenset(KINDS)))
    problem = replace(case.problem, goal=parse_goal((), ("step_time<=750us",)))
    found = run_search(Evaluator(problem, profile=case.evaluator.profile), Settings(evaluations=500))
    assert found.fits and found.cost.step_seconds <= 750 * US < found.cost.most_seconds


def test_overlapped_communication_takes_a_part_of_the_compute_units() -> None:
    """A quarter of the 120 us that are hidden of 300 us."""
    shapes, split = LAYERS, ("x.0", "w.1")
    profile = replace(PLAIN, asynchronous=frozenset({"all-gather"}), communicating=0.25)
    case = case_of(two_layers, *shapes, mesh=round_mesh(data=4), profile=profile)
    cost = case.evaluator.exact_cost(tuple(case.shard(name, "data") for name in split))
    assert cost.step_seconds == pytest.approx(cost.compute_seconds + 180 * US + 30 * US, rel=1e-3)
