"""What ways of two patterns to split their ops cost together: copies of arrays that the one makes and the other reads,
cuts of totals, buffers that are taken over, and what neighbours send.

Five things are priced at no more than they cost: a sum of several partial terms as one reduction, a copy for readers in
several loops as that of the dearest, what loops only read as gathered before them, where a plan may say so, what
several ops read through windows as what the dearest of them needs, and what completes a sum that a loop adds up as the
cheapest way to do that (see `least_sums`). Enters: `PatternWays`. Leaves: seconds for pairs of them; and, with a bound
on what a plan takes, a dual ascent, or fewer ways.
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
from toast_cli.plan.reshard import SLICE, ReshardHop, Way, communicates, copy_of, route, ways_of
from toast_cli.plan.sharding import Sharding, axes_of
from toast_cli.search.dual_ascent import DualAscent, Edge, Floats, Integers, Payer, SharedPrice
from toast_cli.search.ways import PatternWays

Goal = Sharding | Way
# Of an array and one that reads it: the ways that make it by sharding, those that read it, and what each pair pays for
# which copy.
Reading = tuple[
    dict[Sharding, list[int]],
    dict[Sharding, list[int]],
    dict[tuple[Sharding, Sharding], dict[Goal, float]],
]
_Moved = dict[tuple[Sharding, Sharding], list[float]]  # between two shardings what each move takes
_Once = tuple[int, Sharding, Goal]  # number of an array item, where it is made, and what a copy of it is for


class _Pair(NamedTuple):
    """Classes of ways of one pattern and of another one, and what each pair of classes is charged.

    Attributes:
        makers, readers: [classes] variables. seconds: [classes, classes]. once: what other pairs pay too, and no more
            than one of them has to: the row, the columns, this pair's share and the least price.
    """

    makers: list[list[int]]
    readers: list[list[int]]
    seconds: Floats
    once: Mapping[_Once, tuple[int, Integers, float, float]]


class _Route(NamedTuple):
    """How an array gets from one sharding to another: its hops, and the way that each of them goes on."""

    hops: tuple[ReshardHop, ...]
    ways: list[Way]


class PairPrices:
    """Seconds for pairs of ways."""

    def __init__(self, ways: PatternWays) -> None:
        self._ways = ways
        # By what tells arrays and readers apart of which a move takes longer than of others.
        self._moved: dict[object, _Moved] = defaultdict(dict)
        self._routes: dict[object, _Route] = {}  # by shape and both shardings

    def ascent(self, possible: float) -> DualAscent:
        """What bounds all assignments of the ways that there are, with a node for each pattern, before its first
        pass."""
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
        """For each reader that may need a copy of the array what each pair of shardings costs."""
        made = self._ways.making(item.pattern, item.result)
        read = [self._ways.reading(reader.pattern, reader.position) for reader in item.readers]
        goals = {s: self._goals(item, s, sorted({t for taken in read for t in taken})) for s in made}
        alike = [replace(reader, pattern=0, position=0) for reader in item.readers]
        same = item.shape, item.bytes, len(item.values)
        known: dict[tuple[int, Sharding, Sharding], dict[Goal, float]] = {}
        for place, taken in enumerate(read):
            first = alike.index(alike[place])  # who pays the same
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
        """Seconds of what neighbours send for each reader to which they may send something, by variable."""
        prices: list[dict[int, float]] = []
        pricer = self._ways.pricer
        for reader in item.readers:
            alone, pattern = replace(item, readers=(reader,)), reader[0]
            found = {
                variable: sum(use.seconds for use in pricer.neighbour_collectives(alone, {pattern: way.iteration}))
                for variable, way in zip(self._ways.variables(pattern), self._ways.of_pattern[pattern], strict=True)
            }
            prices.append({variable: price for variable, price in found.items() if price})
        return [found for found in prices if found]

    def _pairs(self) -> Iterable[_Pair]:
        """What no more is charged for than it costs, between ways of one pattern and of another one."""
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
        """Totals are cut only where their readers, or the one use, do."""
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
        """Sharding that readers want -> what each of the moves to it is for: the way so far where ways to others begin
        like it, and then the sharding itself."""
        routes = {at: self._route(item, made, at) for at in wanted}
        begun = Counter(way for to in routes.values() for way in to.ways)
        return {
            at: [
                way if begun[way] > 1 else at
                for way, (step, _) in zip(to.ways, to.hops, strict=True)
                if step.kind != SLICE
            ]
            for at, to in routes.items()
        }

    def _route(self, item: ArrayItem, made: Sharding, taken: Sharding) -> _Route:
        key = item.shape, made, taken
        found = self._routes.get(key)
        if found is None:
            hops = route(made, taken, self._ways.problem.mesh.sizes, item.shape)
            found = self._routes[key] = _Route(hops, ways_of(hops))
        return found

    def _move_seconds(self, item: ArrayItem, made: Sharding, taken: Sharding, place: int, moved: _Moved) -> list[float]:
        """Of each move to one reader's copy of the item's arrays. moved: what is known of such arrays and readers."""
        found = moved.get((made, taken))
        if found is None:
            hops = self._route(item, made, taken).hops
            copies = [copy_of(taken, [place], hops, item.can_be_ahead(place))] if communicates(hops) else []
            uses = self._ways.pricer.array_collectives(item, made, copies)
            found = moved[made, taken] = [use.seconds for use in uses]
        return found
