"""Enumerates all ways to split the ops of each pattern, for a lower bound on the step time of any sharding.

Of ways that other patterns cannot distinguish only the cheapest is kept. Each way is a variable of the integer program
(see `exact`), numbered pattern by pattern. In: a `Problem`. Out: its ways, and the seconds of each by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import compress

import numpy as np

from toast_cli.compiler.profiles import find_profile
from toast_cli.cost.corrections import NO_CORRECTIONS
from toast_cli.evaluate.items import WorkItem, make_items
from toast_cli.evaluate.kernel_pricing import WorkPricer
from toast_cli.evaluate.manual_regions import region_prices
from toast_cli.evaluate.pricing import Pricer
from toast_cli.plan.op_sharding import OpSharding
from toast_cli.plan.problem import Problem
from toast_cli.plan.sharding import Sharding
from toast_cli.program.roles import carried_results
from toast_cli.search.dual_ascent import Integers
from toast_cli.search.every_split import every_op_sharding
from toast_cli.search.least_sums import LeastSums, Use


@dataclass(frozen=True, slots=True)
class PatternWay:
    """A way to split ops of one pattern. pairs: groups and the axes that split them. cut: for a sum, the sharding to
    which all readers have the total reduce-scattered, or the axes by which some use may; None if there is none.
    """

    op_sharding: OpSharding
    pairs: frozenset[tuple[int, int]]
    cut: Sharding | None
    seconds: float


class _Free(Problem):
    """A problem in which all patterns choose independently, so that every reshard between them is priced."""

    @cached_property
    def chosen_by(self) -> tuple[tuple[object, ...], ...]:
        return tuple((number,) for number in range(len(self.patterns)))


class PatternWays:
    """The ways of all patterns.

    Attributes:
        problem: one in which patterns choose independently. items, pricer, kernels, sums: of it.
        of_pattern: [patterns] ways.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem = _Free(**{field.name: getattr(problem, field.name) for field in fields(problem)})
        profile = find_profile(problem.mesh.chip)
        self.items = make_items(problem, profile)
        regions = region_prices(problem, profile)
        self.pricer = Pricer(problem, self.items, NO_CORRECTIONS, regions)
        self.kernels = WorkPricer(problem, profile, regions)
        self._work: dict[int, list[WorkItem]] = defaultdict(list)
        for work in self.items.work:
            self._work[work.pattern].append(work)
        self._windowed = frozenset().union(*(read.patterns for read in self.items.neighbours))
        self.sums = LeastSums(problem, self.items, self.pricer, self._operands_of)
        self._every = [every_op_sharding(pattern, problem.mesh.sizes) for pattern in problem.patterns]
        self.of_pattern = [self._made(number) for number in range(len(problem.patterns))]
        self._number()

    def __len__(self) -> int:
        """The number of ways of all patterns."""
        return self._first[-1]

    def variables(self, number: int) -> range:
        """Variables of a pattern's ways."""
        return range(self._first[number], self._first[number + 1])

    def place(self, variable: int) -> tuple[int, int]:
        """(pattern of this way, its number among the pattern's ways)."""
        number = bisect_right(self._first, variable) - 1
        return number, variable - self._first[number]

    def by_sharding(self, number: int, sharding_of: Callable[[OpSharding], Sharding]) -> dict[Sharding, list[int]]:
        """Variables of a pattern's ways by one sharding of each."""
        found: dict[Sharding, list[int]] = defaultdict(list)
        for variable, way in zip(self.variables(number), self.of_pattern[number], strict=True):
            found[sharding_of(way.op_sharding)].append(variable)
        return found

    def reading(self, number: int, position: int) -> dict[Sharding, list[int]]:
        """Variables of a pattern's ways by the sharding in which they read an operand."""
        return self.by_sharding(number, lambda op_sharding: op_sharding.operands[position])

    def making(self, number: int, result: int) -> dict[Sharding, list[int]]:
        """Variables of a pattern's ways by the sharding in which they make a result."""
        return self.by_sharding(number, lambda op_sharding: op_sharding.shardings[result])

    def classes(self, classes: list[list[int]]) -> tuple[int, Integers]:
        """(pattern of these variables, [ways] class of each)."""
        number, _ = self.place(classes[0][0])
        found = np.zeros(len(self.of_pattern[number]), dtype=np.int64)
        for place, variables in enumerate(classes):
            found[np.array(variables) - self._first[number]] = place
        return number, found

    def keep(self, kept: Iterable[Iterable[bool]]) -> None:
        """Removes all other ways. kept: [patterns] [ways]."""
        self.of_pattern = [list(compress(ways, of)) for ways, of in zip(self.of_pattern, kept, strict=True)]
        self._number()

    def aliased(self) -> list[tuple[int, int]]:
        """(pattern of an argument, pattern of the result that reuses its buffer)."""
        problem, program = self.problem, self.problem.program
        first = len(program.ops) - len(program.results)
        pairs = {
            (problem.op_pattern[number], problem.op_pattern[first + result])
            for number, result in enumerate(carried_results(program))
            if result >= 0
        }
        return sorted(pairs)

    def _number(self) -> None:
        self._first = [int(n) for n in np.cumsum([0, *map(len, self.of_pattern)])]

    def _made(self, number: int) -> list[PatternWay]:
        """The ways to split ops of a pattern; of ways that other patterns cannot distinguish, only the cheapest."""
        best: dict[object, PatternWay] = {}
        for op_sharding in self._every[number]:
            own = sum(
                self.kernels.seconds(work, op_sharding)
                + sum(use.seconds for use in self.pricer.work_collectives(work, op_sharding))
                for work in self._work[number]
            )
            computed = op_sharding.computed if number in self._windowed else ()  # halo exchanges depend on it
            groups = self.problem.patterns[number].groups
            split = zip(groups, op_sharding.factor_axes, strict=True)
            pairs = frozenset((group, axis) for group, axes in split for axis in axes)
            for cut, seconds in self.sums.options(number, op_sharding):
                key = (op_sharding.operands, computed, op_sharding.shardings, pairs, cut)
                if key not in best or own + seconds < best[key].seconds:
                    best[key] = PatternWay(op_sharding, pairs, cut, own + seconds)
        return list(best.values())

    def _operands_of(self, use: Use) -> set[Sharding]:
        pattern, position = use
        return {op_sharding.operands[position] for op_sharding in self._every[pattern]}
