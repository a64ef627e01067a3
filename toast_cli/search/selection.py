"""A lower bound on the step time of any sharding at all: an integer program over the evaluator's own prices, which
HiGHS solves.

No decisions and no groups: ops of each pattern take any way in which the mesh axes can split them, and any way in which
their partial results are scattered. One variable for each way, and one for each pair of shardings between which an
array is moved where it is read (as in Alpa, arXiv:2201.12023, and XLA's former auto-sharder). Every plan is such an
assignment, so no plan is faster than the cheapest of them. What the bound does not know: device memory, and ops of one
pattern that are split otherwise than each other (those of mirrored layers).

Four things are priced at no more than they cost, which keeps the bound valid: a sum of several partial terms as one
reduction, a copy for readers in several loops as that of the dearest, what several ops read through windows as what
the dearest of them needs, and what completes a sum that a loop adds up as the cheapest way to do that (see
`least_sums`). Enters: a `Problem`. Leaves: seconds.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from math import inf, perm
from typing import NamedTuple

import numpy as np

from toast_cli.compiler.profiles import find_profile
from toast_cli.evaluate.items import ArrayItem, WorkItem, make_items
from toast_cli.evaluate.kernel_pricing import WorkPricer
from toast_cli.evaluate.neighbour_items import NeighbourItem
from toast_cli.evaluate.pricing import Pricer
from toast_cli.plan.iteration import Iteration
from toast_cli.plan.problem import Problem
from toast_cli.plan.reshard import SLICE, Way, communicates, copy_of, route, ways_of
from toast_cli.plan.sharding import Sharding, axes_of
from toast_cli.search.dual_ascent import Edge, Floats, Integers, Payer, SharedPrice, ways_left
from toast_cli.search.every_split import every_iteration
from toast_cli.search.least_sums import LeastSums
from toast_cli.search.objective import PRICE
from toast_cli.search.solver import lower_bound

MOST_SPLITS = 20_000  # of one pattern, and
MOST_VARIABLES = 400_000  # of all, for which there is a bound
GAP = 1e-5  # relative, at which HiGHS may stop


class Bound(NamedTuple):
    """What no sharding of a program's arrays can beat; 0 where the program and the mesh are too large to say.

    Attributes:
        seconds: of a step. charged: the same where each pair of a group and a mesh axis that splits it costs what a
            decision must gain: what no plan can beat as searches compare plans. `seconds` where nothing more is known.
    """

    seconds: float = 0.0
    charged: float = 0.0


def bound(
    problem: Problem,
    seconds: float,
    ended: Callable[[], bool] = lambda: False,
    asked: Callable[[], bool] = lambda: False,
    possible: float = inf,
) -> Bound:
    """What no sharding of the program's arrays can beat.

    Args:
        seconds: of wall time for the solver, at most. ended: whether time is up before it starts. asked: whether the
            user wants it to end: then there is no bound. possible: seconds that some plan takes, with the price of its
            decisions. The bound is no larger than that, and the closer it is the sooner it is found: ways that no
            faster sharding has are left out.
    """
    axes = sum(size > 1 for size in problem.mesh.sizes)
    if any((len(p.form.sizes) + 1) ** axes * perm(axes) > MOST_SPLITS for p in problem.patterns):
        return Bound()
    start = time.monotonic()

    def left() -> float:
        return seconds - (time.monotonic() - start)

    program = _Program(problem)
    least = 0.0
    if possible < inf:
        least = program.leave_out(possible * (1.0 + GAP), lambda: ended() or left() < seconds / 2)
        if least >= possible:
            return Bound(possible, possible)
    for add in (program.take_ways, program.take_aliases, program.take_neighbours, program.take_reshards):
        add()
        if ended() or len(program.cost) > MOST_VARIABLES:
            return Bound()
    solved = program.solve(max(1.0, left()), asked)
    least = min(possible, max(least, solved))
    pinned = any(any((*pattern.operand_pins, *pattern.result_pins)) for pattern in problem.patterns)
    if possible == inf or least * (1.0 + GAP) >= possible or least <= 0.0 or pinned or left() < 0.0:
        return Bound(least, least)
    program.take_decisions(PRICE * least)
    return Bound(least, max(least, min(possible, program.solve(max(1.0, left()), asked))))


_Goal = Sharding | Way


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to split ops of one pattern. pairs: groups and the axes that split them. cut: where they add up, the
    sharding in which all who read the total take a piece of it, or the axes by which some use may; None where no one
    does.
    """

    iteration: Iteration
    pairs: frozenset[tuple[int, int]]
    cut: Sharding | None
    seconds: float


# Of an array and one that reads it: the ways that make it by sharding, those that read it, and what each pair pays for
# which copy.
_Reading = tuple[
    dict[Sharding, list[int]],
    dict[Sharding, list[int]],
    dict[tuple[Sharding, Sharding], dict[_Goal, float]],
]


_Once = tuple[int, Sharding, _Goal]  # number of an array item, where it is made, and what a copy of it is for


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


class _Free(Problem):
    """A problem in which no two patterns have to choose alike, so that all that lies between them is priced."""

    @cached_property
    def chosen_by(self) -> tuple[tuple[object, ...], ...]:
        return tuple((number,) for number in range(len(self.patterns)))


class _Program:
    """The integer program. cost: [variables]; the first are those of the ways, pattern after pattern, and must be
    whole numbers.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem = _Free(**{field.name: getattr(problem, field.name) for field in fields(problem)})
        profile = find_profile(problem.mesh.chip)
        self._items = make_items(problem, profile)
        self._pricer, self._kernels = Pricer(problem, self._items), WorkPricer(problem, profile)
        self._work: dict[int, list[WorkItem]] = defaultdict(list)
        for work in self._items.work:
            self._work[work.pattern].append(work)
        self._windowed = frozenset().union(*(read.patterns for read in self._items.neighbours))
        self._every = [every_iteration(p, problem.mesh.sizes) for p in problem.patterns]
        self._sums = LeastSums(problem, self._items, self._pricer, self._operands_of)
        self._ways = [self._ways_of(number) for number in range(len(problem.patterns))]
        self._rows: list[tuple[Mapping[int, float], float, float]] = []  # coefficients, and between what their sum lies
        self._moved: dict[object, list[float]] = {}  # see `_move_seconds`
        self._number()

    def _number(self) -> None:
        self._first = [int(n) for n in np.cumsum([0, *map(len, self._ways)])]
        self.cost = [way.seconds for ways in self._ways for way in ways]

    def leave_out(self, possible: float, ended: Callable[[], bool]) -> float:
        """Leaves out ways that no sharding has which is faster than `possible` seconds; to be called first.

        Returns seconds that none beats; `possible` where none may be faster.
        """
        own = [np.array([way.seconds for way in ways]) for ways in self._ways]
        edges: list[Edge] = []
        payers: dict[_Once, list[Payer]] = defaultdict(list)
        prices: dict[_Once, float] = {}
        for makers, readers, seconds, once in self._pairs():
            one, other = (self._classes(classes) for classes in (makers, readers))
            if one[0] == other[0]:
                own[one[0]] += seconds[one[1], other[1]]
                continue
            for copy, (row, columns, share, price) in once.items():
                payers[copy].append(Payer(len(edges), row, columns, share))
                prices[copy] = min(price, prices.get(copy, inf))
            edges.append(Edge((one[0], other[0]), (one[1], other[1]), seconds))
        shared = [SharedPrice(prices[copy], tuple(of)) for copy, of in payers.items() if len(of) > 1]
        for item in self._items.neighbours:
            sent = self._sent(item)
            for found in sent:
                for variable, price in found.items():
                    number = bisect_right(self._first, variable) - 1
                    own[number][variable - self._first[number]] += price / len(sent)
        left, least = ways_left(own, edges, possible, ended, shared)
        self._ways = [
            [way for way, kept in zip(ways, of, strict=True) if kept] for ways, of in zip(self._ways, left, strict=True)
        ]
        self._number()
        return min(possible, least) if all(self._ways) else possible

    def _pairs(self) -> Iterable[_Pair]:
        """What no more is charged for than it costs, between ways of one pattern and of another one."""
        for number, item in enumerate(self._items.arrays):
            readings = [] if item.free else list(self._readings(item))
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
        for argument, result in self._aliased():
            made = self._by_sharding(argument, lambda it: it.shardings[0])
            taken = self._by_sharding(result, _operand(0))
            unlike = [[0.0 if s == t else inf for t in taken] for s in made]
            yield _Pair(list(made.values()), list(taken.values()), np.array(unlike), {})

    def _cut_pairs(self) -> Iterable[_Pair]:
        """Totals are cut only where their readers, or the one use, do."""
        for number, ways in enumerate(self._ways):
            cuts = [way.cut for way in ways]
            if not any(cuts):
                continue
            variables = [[variable] for variable in self._of(number)]
            if self._sums.is_linked(number):
                for reader, position in self._sums.readers(number):
                    taken = self._by_sharding(reader, _operand(position))
                    if reader != number:
                        unlike = [[0.0 if cut in (None, t) else inf for t in taken] for cut in cuts]
                        yield _Pair(variables, list(taken.values()), np.array(unlike), {})
                continue
            uses = self._sums.uses(number)
            if len(uses) == 1:
                taken = self._by_sharding(uses[0][0], _operand(uses[0][1]))
                apart = [
                    [inf if cut is not None and axes_of(t).isdisjoint(cut[0]) else 0.0 for t in taken] for cut in cuts
                ]
                yield _Pair(variables, list(taken.values()), np.array(apart), {})

    def _classes(self, classes: list[list[int]]) -> tuple[int, Integers]:
        """The pattern whose ways these variables are, and [ways] the class of each."""
        number = bisect_right(self._first, classes[0][0]) - 1
        found = np.zeros(len(self._ways[number]), dtype=np.int64)
        for place, variables in enumerate(classes):
            found[np.array(variables) - self._first[number]] = place
        return number, found

    def solve(self, seconds: float, asked: Callable[[], bool]) -> float:
        """The bound: that of the solver, when it ends or its time is up; 0 where the user asks it to end before."""
        from scipy.optimize import Bounds, LinearConstraint  # heavy, and few runs ask for a proof
        from scipy.sparse import csr_array

        entries = [(row, column, value) for row, (of, _, _) in enumerate(self._rows) for column, value in of.items()]
        rows, columns, values = (np.array(part) for part in zip(*entries, strict=True))
        scale, whole = max(self.cost), self._first[-1]
        if scale <= 0.0:
            return 0.0
        program = {
            "c": np.array(self.cost) / scale,
            "integrality": np.arange(len(self.cost)) < whole,
            "bounds": Bounds(0.0, 1.0),
            "constraints": LinearConstraint(
                csr_array((values, (rows, columns)), shape=(len(self._rows), len(self.cost))),
                [low for _, low, _ in self._rows],
                [high for _, _, high in self._rows],
            ),
            "options": {"time_limit": seconds, "mip_rel_gap": GAP},
        }
        return scale * lower_bound(program, asked)

    def take_ways(self) -> None:
        """Each pattern is split in one way; a total is cut only as all who read it take it."""
        for number, ways in enumerate(self._ways):
            self._rows.append((dict.fromkeys(self._of(number), 1.0), 1.0, 1.0))
            for sharding in sorted({way.cut for way in ways if way.cut is not None}):
                cut = {self._first[number] + k: -1.0 for k, way in enumerate(ways) if way.cut == sharding}
                if not self._sums.is_linked(number):
                    self._cut_somewhere(number, sharding[0], cut)
                    continue
                for reader, position in self._sums.readers(number):
                    taken = self._by_sharding(reader, _operand(position)).get(sharding, ())
                    self._rows.append(({**dict.fromkeys(taken, 1.0), **cut} if reader != number else {}, 0.0, 1.0))

    def _cut_somewhere(self, number: int, axes: tuple[int, ...], cut: dict[int, float]) -> None:
        """Of several sums, or sums on whose way there are uses, one is cut only where some use has it split by one of
        the axes."""
        uses, row = self._sums.uses(number), dict(cut)
        for pattern, position in uses:
            for sharding, variables in self._by_sharding(pattern, _operand(position)).items():
                if not axes_of(sharding).isdisjoint(axes):
                    row.update(dict.fromkeys(variables, 1.0))
        if uses:
            self._rows.append((row, 0.0, inf))

    def take_aliases(self) -> None:
        """A result that takes over an argument's buffer rests as the argument does."""
        for argument, result in self._aliased():
            made = self._by_sharding(argument, lambda it: it.shardings[0])
            taken = self._by_sharding(result, _operand(0))
            for sharding in {**made, **taken}:
                row = dict.fromkeys(made.get(sharding, ()), 1.0) | dict.fromkeys(taken.get(sharding, ()), -1.0)
                self._rows.append((row, 0.0, 0.0))

    def _aliased(self) -> list[tuple[int, int]]:
        """Patterns of arguments, and of the results that take over their buffers."""
        problem, program = self._problem, self._problem.program
        first = len(program.ops) - len(program.results)
        pairs = {
            (problem.op_pattern[number], problem.op_pattern[first + argument.aliased_result])
            for number, argument in enumerate(program.arguments)
            if argument.aliased_result >= 0
        }
        return sorted(pairs)

    def take_decisions(self, seconds: float) -> None:
        """Each pair of a group and an axis that splits it anywhere costs so much: no plan has it without a decision."""
        pairs = {pair for ways in self._ways for way in ways for pair in way.pairs}
        taken = {pair: self._variable(seconds) for pair in sorted(pairs)}
        for number, ways in enumerate(self._ways):
            for pair in sorted({pair for way in ways for pair in way.pairs}):
                row = {self._first[number] + k: -1.0 for k, way in enumerate(ways) if pair in way.pairs}
                self._rows.append(({taken[pair]: 1.0, **row}, 0.0, 1.0))

    def take_reshards(self) -> None:
        """Copies of arrays: what makes one and what reads it agree with the pair of shardings that is paid for."""
        for item in self._items.arrays:
            if not item.free and len(self.cost) <= MOST_VARIABLES:
                self._reshards(item)

    def _reshards(self, item: ArrayItem) -> None:
        regions = {reader.region for reader in item.readers}
        copies: dict[tuple[Sharding, _Goal], list[tuple[int, float]]] = defaultdict(list)
        for made, taken, paid in self._readings(item):
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

    def _readings(self, item: ArrayItem) -> Iterable[_Reading]:
        """For each reader that may need a copy of the array what each pair of shardings costs."""
        made = self._by_sharding(item.pattern, lambda it: it.shardings[item.result])
        wanted = sorted({t for r in item.readers for t in self._by_sharding(r.pattern, _operand(r.position))})
        goals = {s: self._goals(item, s, wanted) for s in made}
        for place, reader in enumerate(item.readers):
            taken = self._by_sharding(reader.pattern, _operand(reader.position))
            paid: dict[tuple[Sharding, Sharding], dict[_Goal, float]] = {}
            for s in made:
                for t in taken:
                    prices: dict[_Goal, float] = defaultdict(float)
                    for goal, price in zip(goals[s][t], self._move_seconds(item, s, t, place), strict=False):
                        prices[goal] += price
                    paid[s, t] = {goal: price for goal, price in prices.items() if price}
            if any(paid.values()):
                yield made, taken, paid

    def _goals(self, item: ArrayItem, made: Sharding, wanted: list[Sharding]) -> dict[Sharding, list[_Goal]]:
        """Sharding that readers want -> what each of the moves to it is for: the way so far where ways to others begin
        like it, and then the sharding itself."""
        routes = {at: route(made, at, self._problem.mesh.sizes, item.shape) for at in wanted}
        ways = {at: ways_of(hops) for at, hops in routes.items()}
        begun = Counter(way for of in ways.values() for way in of)
        return {
            at: [
                way if begun[way] > 1 else at
                for way, (step, _) in zip(ways[at], routes[at], strict=True)
                if step.kind != SLICE
            ]
            for at in wanted
        }

    def _move_seconds(self, item: ArrayItem, made: Sharding, taken: Sharding, place: int) -> list[float]:
        """Of each move to one reader's copy of the item's arrays."""
        key = item.pattern, item.values, made, taken, place
        found = self._moved.get(key)
        if found is None:
            way = route(made, taken, self._problem.mesh.sizes, item.shape)
            copies = [copy_of(taken, [place], way, item.readers[place].pieces)] if communicates(way) else []
            found = self._moved[key] = [use.seconds for use in self._pricer.array_collectives(item, made, copies)]
        return found

    def take_neighbours(self) -> None:
        """What is read through windows: as much as the dearest of its readers needs."""
        for item in self._items.neighbours:
            prices = self._sent(item)
            if len(item.readers) == 1:
                for variable, price in [pair for found in prices for pair in found.items()]:
                    self.cost[variable] += price
            elif prices:
                most = max(price for found in prices for price in found.values())
                sent = self._variable(most)
                for found in prices:
                    self._rows.append(({sent: 1.0} | {v: -price / most for v, price in found.items()}, 0.0, 1.0))

    def _sent(self, item: NeighbourItem) -> list[dict[int, float]]:
        """Seconds of what neighbours send for each reader to which they may send something, by variable."""
        prices: list[dict[int, float]] = []
        for reader in item.readers:
            alone = replace(item, readers=(reader,))
            found = {
                variable: sum(u.seconds for u in self._pricer.neighbour_collectives(alone, {reader[0]: way.iteration}))
                for variable, way in zip(self._of(reader[0]), self._ways[reader[0]], strict=True)
            }
            prices.append({variable: price for variable, price in found.items() if price})
        return [found for found in prices if found]

    def _ways_of(self, number: int) -> list[_Way]:
        """The ways to split ops of a pattern; of those that are alike to all other patterns the cheapest."""
        best: dict[object, _Way] = {}
        for iteration in self._every[number]:
            own = sum(
                self._kernels.seconds(work, iteration)
                + sum(use.seconds for use in self._pricer.work_collectives(work, iteration))
                for work in self._work[number]
            )
            computed = iteration.computed if number in self._windowed else ()  # what neighbours send hangs on it
            groups = self._problem.patterns[number].groups
            split = zip(groups, iteration.slot_axes, strict=True)
            pairs = frozenset((group, axis) for group, axes in split for axis in axes)
            for cut, seconds in self._sums.options(number, iteration):
                key = (iteration.operands, computed, iteration.shardings, pairs, cut)
                if key not in best or own + seconds < best[key].seconds:
                    best[key] = _Way(iteration, pairs, cut, own + seconds)
        return list(best.values())

    def _operands_of(self, use: tuple[int, int]) -> set[Sharding]:
        pattern, position = use
        return {iteration.operands[position] for iteration in self._every[pattern]}

    def _of(self, number: int) -> range:
        """Variables of a pattern's ways."""
        return range(self._first[number], self._first[number + 1])

    def _by_sharding(self, number: int, sharding_of: Callable[[Iteration], Sharding]) -> dict[Sharding, list[int]]:
        found: dict[Sharding, list[int]] = defaultdict(list)
        for variable, way in zip(self._of(number), self._ways[number], strict=True):
            found[sharding_of(way.iteration)].append(variable)
        return found

    def _variable(self, cost: float) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1


def _operand(position: int) -> Callable[[Iteration], Sharding]:
    return lambda iteration: iteration.operands[position]
