"""Dual ascent against all assignments of small random problems."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from toast_cli.search.dual_ascent import Edge, ways_left


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
