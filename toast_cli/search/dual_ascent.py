"""Dual ascent: bounds assignments with pairwise costs, and excludes the ways that no better assignment has.

Each node takes one way, at a price; edges charge pairs of ways. Messages move charges from edges to nodes and back
without changing the cost of any assignment, so the sum of all least charges is a lower bound on every assignment,
whatever the messages are. Passes over the nodes in order and back raise that bound (TRW-S, Kolmogorov 2006). A price
that several edges share and that is paid once is charged to them in parts, and parts move from edges with slack to
those without, which raises the bound as well. A way with which the bound exceeds a cost known to be possible is in no
better assignment (as reduced costs fix variables of integer programs).

In: nodes, edges and shared prices. Out: the ways that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

PASSES = 300  # over all nodes, at most
EACH = 10  # passes between two removals of ways
STALLED = 1e-5  # relative gain of the bound in that many passes below which they end
LEAST_MOVED = 1e-12  # times `possible`: smaller charges count as zero
FORBIDDEN = 1e3  # times `possible`: the charge of forbidden pairs

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(slots=True)
class Edge:
    """The charges of pairs of ways of two nodes.

    Attributes:
        nodes: the two, different ones. classes: for each of them, [ways] the row or column of `seconds` that applies.
        seconds: [rows, columns].
    """

    nodes: tuple[int, int]
    classes: tuple[Integers, Integers]
    seconds: Floats
    messages: tuple[Floats, Floats] = field(init=False)  # charged to each node, by row and by column

    def __post_init__(self) -> None:
        self.messages = (np.zeros(self.seconds.shape[0]), np.zeros(self.seconds.shape[1]))

    def kept(self) -> Floats:
        """[rows, columns] charges that remain on the edge."""
        return self.seconds - self.messages[0][:, None] - self.messages[1][None, :]


@dataclass(slots=True)
class Payer:
    """Pairs of ways that pay a shared price: those in `row` and any of `columns` of edge number `edge`.

    share: of the price, 0 to 1.
    """

    edge: int
    row: int
    columns: Integers
    share: float


@dataclass(frozen=True, slots=True)
class SharedPrice:
    """A price that is paid once, whichever payers incur it. The payers' edges charge their shares of `seconds` already;
    the shares sum to at most 1."""

    seconds: float
    payers: tuple[Payer, ...]


class DualAscent:
    """A bound on all assignments that grows with each pass, and the ways that it leaves.

    Attributes:
        left: [nodes][ways] whether an assignment with that way may take less than `possible`; all false where none may.
            bound: lower bound on every assignment, `possible` at most.
    """

    def __init__(
        self, seconds: Sequence[Floats], edges: Sequence[Edge], possible: float, shared: Sequence[SharedPrice] = ()
    ) -> None:
        """seconds: [nodes][ways] own price of each."""
        self._wide = FORBIDDEN * possible
        self._possible, self.bound, self._passes = possible, -inf, 0
        self._own = [np.minimum(of, self._wide) for of in seconds]
        self._edges = [Edge(edge.nodes, edge.classes, np.minimum(edge.seconds, self._wide)) for edge in edges]
        self._shared = [SharedPrice(of.seconds, tuple([replace(payer) for payer in of.payers])) for of in shared]
        self._ends: list[list[tuple[int, int]]] = [[] for _ in seconds]  # [nodes] (edge, end of it)
        for number, edge in enumerate(self._edges):
            for end, node in enumerate(edge.nodes):
                self._ends[node].append((number, end))
        self.left = [np.ones(len(of), dtype=bool) for of in seconds]

    def run(self, passes: int = PASSES, ended: Callable[[], bool] = lambda: False) -> float:
        """Runs up to `passes` passes over all nodes, until the bound hardly rises or `ended` says that time is up.
        Returns the bound."""
        before = -inf
        for number in range(1, passes + 1):
            self._pass_on(forward=self._passes % 2 == 0)
            self._passes += 1
            if number % EACH == 0:
                now = self._remove()
                self.bound = max(self.bound, min(now, self._possible))
                if ended() or now >= self._possible or now - before < STALLED * self._possible:
                    break
                before = now
                self._share_anew(LEAST_MOVED * self._possible)
        return self.bound

    def _pass_on(self, *, forward: bool) -> None:
        """One pass: each node in order collects the charges of edges from earlier nodes, and passes the excess of each
        way over its cheapest on to edges to later nodes. Backward, the order is reversed."""
        order = range(len(self._own))
        for node in order if forward else reversed(order):
            ends = [(self._edges[number], end) for number, end in self._ends[node]]
            behind = [(edge.nodes[1 - end] > node) == forward for edge, end in ends]
            for (edge, end), later in zip(ends, behind, strict=True):
                if not later:
                    edge.messages[end][:] += edge.kept().min(axis=1 - end)
            charged = self._charged(node)
            more = (charged - charged.min()) / max(1, sum(behind), len(behind) - sum(behind))
            for (edge, end), later in zip(ends, behind, strict=True):
                if later:
                    least = np.full(edge.seconds.shape[end], self._wide)
                    np.minimum.at(least, edge.classes[end], more)
                    edge.messages[end][:] -= least

    def _remove(self) -> float:
        """Removes ways that no better assignment has. Returns the bound on all assignments that are left."""
        kept = [edge.kept() for edge in self._edges]
        charged = [self._charged(node) for node in range(len(self._own))]
        bound = sum(float(of.min()) for of in (*kept, *charged))
        for node, of in enumerate(charged):
            more = of - of.min()
            for number, end in self._ends[node]:
                row = kept[number].min(axis=1 - end) - kept[number].min()
                more = more + row[self._edges[number].classes[end]]
            self.left[node] &= bound + more < self._possible
            self._own[node][~self.left[node]] = self._wide
        return bound

    def _share_anew(self, least: float) -> None:
        """Moves parts of shared prices from payers with slack to those without.

        The least charge of a giving edge does not change, that of a taking edge does not fall.
        """
        kept = [edge.kept() for edge in self._edges]
        lowest = [float(of.min()) for of in kept]
        for price in self._shared:
            slack = [float(kept[p.edge][p.row, p.columns].min()) - lowest[p.edge] for p in price.payers]
            takers = [p for p, of in zip(price.payers, slack, strict=True) if of <= least]
            given = [
                min(p.share, of / price.seconds) if of > least else 0.0
                for p, of in zip(price.payers, slack, strict=True)
            ]
            if not takers or not any(given):
                continue
            for payer, gives, of in zip(price.payers, given, slack, strict=True):
                moved = -gives if of > least else sum(given) / len(takers)
                if moved:
                    payer.share += moved
                    self._edges[payer.edge].seconds[payer.row, payer.columns] += moved * price.seconds
                    kept[payer.edge][payer.row, payer.columns] += moved * price.seconds

    def _charged(self, node: int) -> Floats:
        """[ways] of a node: its own price and what edges charge it."""
        total = self._own[node].copy()
        for number, end in self._ends[node]:
            edge = self._edges[number]
            total += edge.messages[end][edge.classes[end]]
        return total
