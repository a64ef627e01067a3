"""Dual ascent against all assignments of small random problems."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from toast_cli.search.dual_ascent import DualAscent, Edge, Payer, SharedPrice


def random_problem(seed: int) -> tuple[list[np.ndarray], list[Edge]]:
    """Four nodes of two to four ways, every two of them with an edge."""
    rng = np.random.default_rng(seed)
    own = [rng.random(int(rng.integers(2, 5))) for _ in range(4)]
    edges = []
    for one in range(4):
        for other in range(one):
            rows, columns = (rng.integers(0, 2, len(own[node])) for node in (one, other))
            edges.append(Edge((one, other), (rows, columns), rng.random((2, 2)) * rng.integers(0, 3, (2, 2))))
    return own, edges


def ways_left(
    own: list[np.ndarray], edges: list[Edge], possible: float, shared: Sequence[SharedPrice] = ()
) -> tuple[list[np.ndarray], float]:
    ascent = DualAscent(own, edges, possible, shared)
    return ascent.left, ascent.run()


def seconds_of(own: list[np.ndarray], edges: list[Edge], ways: tuple[int, ...]) -> float:
    paid = sum(of[way] for of, way in zip(own, ways, strict=True))
    return paid + sum(e.seconds[tuple(c[ways[n]] for n, c in zip(e.nodes, e.classes, strict=True))] for e in edges)


@pytest.mark.parametrize("seed", range(30))
def test_every_better_assignment_is_left(seed: int) -> None:
    own, edges = random_problem(seed)
    everything = sorted((seconds_of(own, edges, ways), ways) for ways in product(*(range(len(of)) for of in own)))
    possible = everything[min(3, len(everything) - 1)][0]
    left, bound = ways_left(own, edges, possible)
    assert bound <= min(possible, everything[0][0]) + 1e-9
    for seconds, ways in everything:
        if seconds < possible - 1e-9:
            assert all(of[way] for of, way in zip(left, ways, strict=True))


def test_what_costs_too_much_together_is_out() -> None:
    """Three nodes in a row: one way of the first and one of the second are in no assignment that is good enough,
    though each is cheap by itself."""
    own = [np.array([0.0, 1.0]), np.array([0.5, 0.0, 0.0]), np.array([1.0, 0.0])]
    unlike = np.array([[0.0, 3.0], [3.0, 0.0]])
    edges = [
        Edge((0, 1), (np.array([0, 1]), np.array([0, 1, 1])), unlike),
        Edge((1, 2), (np.array([0, 1, 0]), np.array([0, 1])), unlike),
    ]
    # (0, 0, 0) takes 1.5 and (1, 1, 1) takes 1.0; all others pay 3 for an edge.
    left, bound = ways_left(own, edges, 1.2)
    assert bound == pytest.approx(1.0)
    assert left[0].tolist() == [False, True]
    assert left[1].tolist()[1:] == [True, False]
    assert left[2][1]


def test_nothing_is_left_where_nothing_is_better() -> None:
    own, edges = random_problem(0)
    assert not any(of.any() for of in ways_left(own, edges, 1e-3)[0])


@pytest.mark.parametrize("seed", range(30))
def test_what_is_paid_once_is_charged_to_who_cannot_do_without(seed: int) -> None:
    """One node makes what three read; a copy is paid for once, however many read it. Bounds stay below the cheapest
    assignment, and are tight where the first reader needs the copy in any case."""
    rng = np.random.default_rng(seed)
    own = [np.zeros(1), np.zeros(1), *(np.array([rng.random() * rng.integers(0, 2), rng.random()]) for _ in range(2))]
    edges, payers = [], []
    for reader in (1, 2, 3):
        ways = len(own[reader])
        charged = np.array([[0.0, 1.0 / 3.0][-ways:]])  # the last way needs the copy
        edges.append(Edge((0, reader), (np.array([0]), np.arange(ways)), charged))
        payers.append(Payer(reader - 1, 0, np.array([ways - 1]), 1.0 / 3.0))
    least = 1.0 + own[2].min() + own[3].min()
    _, bound = ways_left(own, edges, 10.0, shared=[SharedPrice(1.0, tuple(payers))])
    assert bound <= least + 1e-9
    apart, _ = ways_left(own, edges, least + 1e-3, shared=[])
    left, found = ways_left(own, edges, least + 1e-3, shared=[SharedPrice(1.0, tuple(payers))])
    assert found <= least + 1e-3
    assert all(kept[int(of.argmin())] for kept, of in zip(left, own, strict=True))
    assert sum(map(np.sum, left)) <= sum(map(np.sum, apart))


def test_a_shared_price_is_charged_whole() -> None:
    """The first reader needs the copy, the second does not."""
    own = [np.zeros(1), np.zeros(1), np.array([0.0, 0.1])]
    edges = [
        Edge((0, 1), (np.array([0]), np.array([0])), np.array([[0.5]])),
        Edge((0, 2), (np.array([0]), np.array([0, 1])), np.array([[0.0, 0.5]])),
    ]
    payers = (Payer(0, 0, np.array([0]), 0.5), Payer(1, 0, np.array([1]), 0.5))
    assert ways_left(own, edges, 2.0)[1] == pytest.approx(0.5)
    assert ways_left(own, edges, 2.0, shared=[SharedPrice(1.0, payers)])[1] == pytest.approx(1.0)
