"""An integer program over the evaluator's own prices that chooses a way for each pattern; HiGHS solves it.

It has one variable for each way, and one for each pair of shardings between which an array is resharded (as in Alpa,
arXiv:2201.12023, and XLA's former auto-sharder). An assignment never costs more than the plan that corresponds to it
(see `ways` and `pair_prices`). In: `PatternWays` and `PairPrices`. Out: a lower bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from math import inf

import numpy as np

from toast_cli.evaluate.array_items import ArrayItem
from toast_cli.plan.op_sharding import OpSharding
from toast_cli.plan.sharding import Sharding, axes_of
from toast_cli.search.pair_prices import Goal, PairPrices
from toast_cli.search.solver import lower_bound
from toast_cli.search.ways import PatternWays

MOST_VARIABLES = 400_000  # of ways and of pairs of ways
GAP = 1e-5  # relative, at which HiGHS may stop


class IntegerProgram:
    """The program for one problem. cost: [variables] seconds; the first variables are those of the ways, pattern by
    pattern, and must be integers.
    """

    def __init__(self, ways: PatternWays, prices: PairPrices) -> None:
        self._ways, self._prices = ways, prices
        self._rows: list[tuple[Mapping[int, float], float, float]] = []  # coefficients, bounds of their sum
        self.cost = [way.seconds for of in ways.of_pattern for way in of]

    def state(self, ended: Callable[[], bool] = lambda: False) -> bool:
        """Adds all constraints. Returns whether it could: there are few enough variables, and time is not up."""
        said = (self._take_ways, self._take_aliases, self._take_neighbours, self._take_brought, self._take_reshards)
        for add in said:
            add()
            if ended() or len(self.cost) > MOST_VARIABLES:
                return False
        return True

    def solve(self, seconds: float, asked: Callable[[], bool], gap: float = GAP) -> float:
        """A lower bound on the cost, in seconds of a step; 0 where there is none.

        Args:
            seconds: of wall time, at most. asked: whether the user wants it to end. gap: relative, at which it may end.
        """
        from scipy.optimize import Bounds, LinearConstraint  # heavy, and rarely needed
        from scipy.sparse import csr_array

        entries = [(row, column, value) for row, (of, _, _) in enumerate(self._rows) for column, value in of.items()]
        rows, columns, values = (np.array(part) for part in zip(*entries, strict=True))
        scale = max(self.cost)
        if scale <= 0.0:
            return 0.0
        program = {
            "c": np.array(self.cost) / scale,
            "integrality": np.arange(len(self.cost)) < len(self._ways),
            "bounds": Bounds(0.0, 1.0),
            "constraints": LinearConstraint(
                csr_array((values, (rows, columns)), shape=(len(self._rows), len(self.cost))),
                [low for _, low, _ in self._rows],
                [high for _, _, high in self._rows],
            ),
            "options": {"mip_rel_gap": gap, "time_limit": seconds},
        }
        return scale * lower_bound(program, asked)

    def _take_ways(self) -> None:
        """Constraints: each pattern takes one way; a total is reduce-scattered only in the sharding that all its
        readers take."""
        for number, ways in enumerate(self._ways.of_pattern):
            variables = self._ways.variables(number)
            self._rows.append((dict.fromkeys(variables, 1.0), 1.0, 1.0))
            for sharding in sorted({way.cut for way in ways if way.cut is not None}):
                cut = {v: -1.0 for v, way in zip(variables, ways, strict=True) if way.cut == sharding}
                if not self._ways.sums.is_linked(number):
                    self._cut_somewhere(number, sharding[0], cut)
                    continue
                for reader, position in self._ways.sums.readers(number):
                    taken = self._ways.reading(reader, position).get(sharding, ())
                    self._rows.append(({**dict.fromkeys(taken, 1.0), **cut} if reader != number else {}, 0.0, 1.0))

    def _cut_somewhere(self, number: int, axes: tuple[int, ...], cut: dict[int, float]) -> None:
        """Constraint: one of several sums, or a sum with intermediate uses, is reduce-scattered only where some use
        splits it by one of the axes."""
        uses, row = self._ways.sums.uses(number), dict(cut)
        for pattern, position in uses:
            for sharding, taken in self._ways.reading(pattern, position).items():
                if not axes_of(sharding).isdisjoint(axes):
                    row.update(dict.fromkeys(taken, 1.0))
        if uses:
            self._rows.append((row, 0.0, inf))

    def _take_aliases(self) -> None:
        """Constraint: a result that reuses an argument's buffer has the argument's sharding."""
        for argument, result in self._ways.aliased():
            made = self._ways.making(argument, 0)
            taken = self._ways.reading(result, 0)
            for sharding in {**made, **taken}:
                row = dict.fromkeys(made.get(sharding, ()), 1.0) | dict.fromkeys(taken.get(sharding, ()), -1.0)
                self._rows.append((row, 0.0, 0.0))

    def take_decisions(self, seconds: float) -> float:
        """Charges `seconds` for each pair of a group and an axis that splits it anywhere, since a plan needs a decision
        for it. Returns the charge of all pairs."""
        pairs = {pair for ways in self._ways.of_pattern for way in ways for pair in way.pairs}
        taken = {pair: self._variable(seconds) for pair in sorted(pairs)}
        for number, ways in enumerate(self._ways.of_pattern):
            variables = self._ways.variables(number)
            for pair in sorted({pair for way in ways for pair in way.pairs}):
                row = {v: -1.0 for v, way in zip(variables, ways, strict=True) if pair in way.pairs}
                self._rows.append(({taken[pair]: 1.0, **row}, 0.0, 1.0))
        return seconds * len(pairs)

    def _take_reshards(self) -> None:
        """Constraints on copies of arrays: producer and reader agree with the pair of shardings that is paid for."""
        for item in self._ways.items.arrays:
            if not item.free and len(self.cost) <= MOST_VARIABLES:
                self._reshards(item)

    def _reshards(self, item: ArrayItem) -> None:
        regions = {reader.region for reader in item.readers}
        copies: dict[tuple[Sharding, Goal], list[tuple[int, float]]] = defaultdict(list)
        for made, taken, paid in self._prices.readings(item):
            flows = {(s, t): self._variable(0.0) for s in made for t in taken}
            for s, ways in made.items():
                self._rows.append(({flows[s, t]: 1.0 for t in taken} | dict.fromkeys(ways, -1.0), 0.0, 0.0))
            for t, ways in taken.items():
                self._rows.append(({flows[s, t]: 1.0 for s in made} | dict.fromkeys(ways, -1.0), 0.0, 0.0))
            for (s, t), prices in paid.items():
                for goal, price in prices.items():
                    copies[s, goal].append((flows[s, t], price))
        for shared in copies.values():
            most = max(price for _, price in shared)
            if len(shared) == 1 and len(regions) == 1:
                self.cost[shared[0][0]] += most
                continue
            copy = self._variable(most)
            self._rows += [({copy: 1.0, flow: -price / most}, 0.0, 1.0) for flow, price in shared]

    def _take_brought(self) -> None:
        """Constraints: a loop-carried sum is resharded to the carry's sharding, unless it stays partial."""
        for brought in self._ways.sums.brought():
            paid, (reader, position) = self._variable(brought.seconds), brought.into
            for axis in range(len(self._ways.problem.mesh.sizes)):
                row: dict[int, float] = {paid: 1.0}
                for term in brought.terms:
                    for variable, it in self._op_shardings(term):
                        row[variable] = float(axis in (*it.reduced, *it.scattered[0]))
                for variable, it in self._op_shardings(reader):
                    row[variable] = row.get(variable, 0.0) + (axis in axes_of(it.operands[position]))
                for variable, it in self._op_shardings(brought.end):
                    row[variable] = row.get(variable, 0.0) - (axis in axes_of(it.shardings[0]))
                if min(row.values()) < 0.0:
                    self._rows.append((row, 0.0, inf))

    def _op_shardings(self, number: int) -> Iterator[tuple[int, OpSharding]]:
        """(variable, op sharding) of each way of a pattern."""
        for variable, way in zip(self._ways.variables(number), self._ways.of_pattern[number], strict=True):
            yield variable, way.op_sharding

    def _take_neighbours(self) -> None:
        """Halo exchanges: an array read through windows costs as much as its most expensive reader."""
        for item in self._ways.items.neighbours:
            prices = self._prices.sent(item)
            if len(item.readers) == 1:
                for variable, price in [pair for found in prices for pair in found.items()]:
                    self.cost[variable] += price
            elif prices:
                most = max(price for found in prices for price in found.values())
                sent = self._variable(most)
                for found in prices:
                    self._rows.append(({sent: 1.0} | {v: -price / most for v, price in found.items()}, 0.0, 1.0))

    def _variable(self, cost: float) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1
