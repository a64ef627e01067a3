"""Prices of pairs of ways of two patterns: copies of arrays that one makes and the other reads, reduce-scatters of
totals, reused buffers, and halo exchanges.

Five prices are lower bounds: a sum of several partial terms costs one reduction; a copy for readers in several loops
that of the most expensive one; loop-invariant arrays are gathered before loops, where a plan may do so; an array read
through windows by several ops costs the most expensive exchange; and a loop-carried sum is completed in the cheapest
way (see `least_sums`). In: `PatternWays`. Out: seconds for pairs of ways; and, given a time that some plan
takes, a dual ascent.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np

from toast_cli.evaluate.array_items import ArrayItem
from toast_cli.evaluate.neighbour_items import NeighbourItem
from toast_cli.plan.reshard import SLICE, RoutedStep, Way, communicates, copy_of, route, ways_of
from toast_cli.plan.sharding import Sharding, axes_of
from toast_cli.search.dual_ascent import DualAscent, Edge, Floats, Integers, Payer, SharedPrice
from toast_cli.search.ways import PatternWays

Goal = Sharding | Way
# For an array and one of its readers: sharding -> ways that make it, sharding -> ways that read it, and the price of
# each copy for each pair of shardings.
Reading = tuple[
    dict[Sharding, list[int]],
    dict[Sharding, list[int]],
    dict[tuple[Sharding, Sharding], dict[Goal, float]],
]
_Moved = dict[tuple[Sharding, Sharding], list[float]]  # (source, target) -> seconds of each move
_Once = tuple[int, Sharding, Goal]  # array item, sharding as made, purpose of the copy


class _Pair(NamedTuple):
    """Classes of ways of two patterns, and the charge of each pair of classes.

    Attributes:
        makers, readers: [classes] variables. seconds: [classes, classes]. once: prices shared with other pairs and paid
            only once: the row, the columns, this pair's share and the least price.
    """

    makers: list[list[int]]
    readers: list[list[int]]
    seconds: Floats
    once: Mapping[_Once, tuple[int, Integers, float, float]]


class _Route(NamedTuple):
    """The reshard of an array between two shardings: its steps, and the `Way` of each."""

    steps: tuple[RoutedStep, ...]
    ways: list[Way]


class PairPrices:
    """Seconds for pairs of ways."""

    def __init__(self, ways: PatternWays) -> None:
        self._ways = ways
        # By the properties of arrays and readers that determine the seconds of a move.
        self._moved: dict[object, _Moved] = defaultdict(dict)
        self._routes: dict[object, _Route] = {}  # by shape and both shardings

    def ascent(self, possible: float) -> DualAscent:
        """The dual ascent over all remaining ways, with one node per pattern, before its first pass."""
        own = [np.array([way.seconds for way in ways]) for ways in self._ways.of_pattern]
        edges: list[Edge] = []
        payers: dict[_Once, list[Payer]] = defaultdict(list)
        prices: dict[_Once, float] = {}
        for makers, readers, seconds, once in self._pairs():
            one, other = (self._ways.classes(classes) for classes in (makers, readers))
            if one[0] == other[0]:
                own[one[0]] += seconds[one[1], other[1]]
                continue
            for copy, (row, columns, share, price) in once.items():
                payers[copy].append(Payer(len(edges), row, columns, share))
                prices[copy] = min(price, prices.get(copy, inf))
            edges.append(Edge((one[0], other[0]), (one[1], other[1]), seconds))
        shared = [SharedPrice(prices[copy], tuple(of)) for copy, of in payers.items() if len(of) > 1]
        for item in self._ways.items.neighbours:
            sent = self.sent(item)
            for found in sent:
                for variable, price in found.items():
                    number, way = self._ways.place(variable)
                    own[number][way] += price / len(sent)
        return DualAscent(own, edges, possible, shared)

    def readings(self, item: ArrayItem) -> Iterable[Reading]:
        """For each reader that may need a copy of the array, the price of each pair of shardings."""
        made = self._ways.making(item.pattern, item.result)
        read = [self._ways.reading(reader.pattern, reader.position) for reader in item.readers]
        goals = {s: self._goals(item, s, sorted({t for taken in read for t in taken})) for s in made}
        alike = [replace(reader, pattern=0, position=0) for reader in item.readers]
        same = item.shape, item.bytes, len(item.values)
        known: dict[tuple[int, Sharding, Sharding], dict[Goal, float]] = {}
        for place, taken in enumerate(read):
            first = alike.index(alike[place])  # a reader with the same price
            moved = self._moved[(*same, item.can_be_ahead(first), alike[first])]
            paid: dict[tuple[Sharding, Sharding], dict[Goal, float]] = {}
            for s, t in product(made, taken):
                prices = known.get((first, s, t))
                if prices is None:
                    prices = known[first, s, t] = defaultdict(float)
                    seconds = self._move_seconds(item, s, t, first, moved)
                    for goal, price in zip(goals[s][t], seconds, strict=False):
                        if price:
                            prices[goal] += price
                paid[s, t] = prices
            if any(paid.values()):
                yield made, taken, paid

    def sent(self, item: NeighbourItem) -> list[dict[int, float]]:
        """Variable -> seconds of the halo exchange, for each reader that may need one."""
        prices: list[dict[int, float]] = []
        pricer = self._ways.pricer
        for reader in item.readers:
            alone, pattern = replace(item, readers=(reader,)), reader[0]
            found = {
                variable: sum(use.seconds for use in pricer.neighbour_collectives(alone, {pattern: way.op_sharding}))
                for variable, way in zip(self._ways.variables(pattern), self._ways.of_pattern[pattern], strict=True)
            }
            prices.append({variable: price for variable, price in found.items() if price})
        return [found for found in prices if found]

    def _pairs(self) -> Iterable[_Pair]:
        """The charges between ways of two patterns, none above its true cost."""
        for number, item in enumerate(self._ways.items.arrays):
            readings = [] if item.free else list(self.readings(item))
            users = Counter(
                copy
                for _, _, paid in readings
                for copy in {(s, goal) for (s, _), prices in paid.items() for goal in prices}
            )
            for made, taken, paid in readings:
                seconds = np.zeros((len(made), len(taken)))
                shared: dict[_Once, list[tuple[int, int, float]]] = defaultdict(list)
                for (row, s), (column, t) in product(enumerate(made), enumerate(taken)):
                    for goal, price in paid[s, t].items():
                        seconds[row, column] += price / users[s, goal]
                        if users[s, goal] > 1:
                            shared[number, s, goal].append((row, column, price))
                once = {
                    copy: (of[0][0], np.array([c for _, c, _ in of]), 1.0 / users[copy[1:]], min(p for _, _, p in of))
                    for copy, of in shared.items()
                }
                yield _Pair(list(made.values()), list(taken.values()), seconds, once)
        yield from self._cut_pairs()
        for argument, result in self._ways.aliased():
            made = self._ways.making(argument, 0)
            taken = self._ways.reading(result, 0)
            unlike = [[0.0 if s == t else inf for t in taken] for s in made]
            yield _Pair(list(made.values()), list(taken.values()), np.array(unlike), {})

    def _cut_pairs(self) -> Iterable[_Pair]:
        """Infinite charges for pairs in which a total is reduce-scattered but its readers, or its only use, do not take
        it so."""
        for number, ways in enumerate(self._ways.of_pattern):
            cuts = [way.cut for way in ways]
            if not any(cuts):
                continue
            variables = [[variable] for variable in self._ways.variables(number)]
            if self._ways.sums.is_linked(number):
                for reader, position in self._ways.sums.readers(number):
                    taken = self._ways.reading(reader, position)
                    if reader != number:
                        unlike = [[0.0 if cut in (None, t) else inf for t in taken] for cut in cuts]
                        yield _Pair(variables, list(taken.values()), np.array(unlike), {})
                continue
            uses = self._ways.sums.uses(number)
            if len(uses) == 1:
                taken = self._ways.reading(uses[0][0], uses[0][1])
                apart = [
                    [inf if cut is not None and axes_of(t).isdisjoint(cut[0]) else 0.0 for t in taken] for cut in cuts
                ]
                yield _Pair(variables, list(taken.values()), np.array(apart), {})

    def _goals(self, item: ArrayItem, made: Sharding, wanted: list[Sharding]) -> dict[Sharding, list[Goal]]:
        """Sharding that readers need -> goal of each move to it: the common way where other reshards begin with the
        same steps, then the sharding itself."""
        routes = {at: self._route(item, made, at) for at in wanted}
        begun = Counter(way for to in routes.values() for way in to.ways)
        return {
            at: [
                way if begun[way] > 1 else at
                for way, (step, _) in zip(to.ways, to.steps, strict=True)
                if step.kind != SLICE
            ]
            for at, to in routes.items()
        }

    def _route(self, item: ArrayItem, made: Sharding, taken: Sharding) -> _Route:
        key = item.shape, made, taken
        found = self._routes.get(key)
        if found is None:
            steps = route(made, taken, self._ways.problem.mesh.sizes, item.shape)
            found = self._routes[key] = _Route(steps, ways_of(steps))
        return found

    def _move_seconds(self, item: ArrayItem, made: Sharding, taken: Sharding, place: int, moved: _Moved) -> list[float]:
        """Seconds of each move of the copy for one reader of the item's arrays. moved: memo for such arrays and
        readers."""
        found = moved.get((made, taken))
        if found is None:
            steps = self._route(item, made, taken).steps
            copies = [copy_of(taken, [place], steps, item.can_be_ahead(place))] if communicates(steps) else []
            uses = self._ways.pricer.array_collectives(item, made, copies)
            found = moved[made, taken] = [use.seconds for use in uses]
        return found
