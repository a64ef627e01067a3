"""What completing the sums that ops of one pattern add to takes at least, whatever all other ops do.

A total is all-reduced, or reduce-scattered where all who read it take a piece of it: then a way to split the op comes
in several, one for each sharding in which that could be. A sum of several terms is priced at no more than one
reduction, each term its part. What a loop adds up is completed in each trip, carried as it is and completed behind the
loop, or something in between: the cheapest of these. Bringing such a sum to where the loop carries it comes on top.

Enters: the sum items of a problem and a pattern's iterations. Leaves: seconds, and who reads the totals.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations, permutations
from math import prod
from typing import NamedTuple

from toast_cli.evaluate.items import Items
from toast_cli.evaluate.pricing import Pricer
from toast_cli.evaluate.sum_items import Carried, SumItem
from toast_cli.plan.decisions import NOWHERE
from toast_cli.plan.iteration import Iteration
from toast_cli.plan.partials import ALL_REDUCE, REDUCE_SCATTER, cut_by_readers
from toast_cli.plan.problem import Problem
from toast_cli.plan.sharding import Sharding, shards
from toast_cli.program.sums import SumStep

Use = tuple[int, int]  # pattern, operand position


class Brought(NamedTuple):
    """A sum that a loop adds to what it carries.

    Attributes:
        end: the pattern that makes it. into: what reads it there. terms: patterns. seconds: what it takes at least if
            an axis splits it where it is made, over which it is not partial, and does not split it where it is read.
    """

    end: int
    into: Use
    terms: tuple[int, ...]
    seconds: float


class LeastSums:
    """Least seconds of the sums of one problem. operands_of: pattern and position -> the shardings in which it may be
    read."""

    def __init__(
        self, problem: Problem, items: Items, pricer: Pricer, operands_of: Callable[[Use], Iterable[Sharding]]
    ) -> None:
        self._problem, self._pricer, self._operands_of = problem, pricer, operands_of
        self._of: dict[int, list[SumItem]] = defaultdict(list)
        self._behind: dict[Carried, list[SumItem]] = defaultdict(list)  # sums of what a loop has added up
        self._into: Counter[tuple[Carried, int]] = Counter()  # sums alike that it adds to one place
        for item in items.sums:
            for pattern in sorted({term.pattern for term in item.terms}):
                self._of[pattern].append(item)
            for carried in dict.fromkeys(item.within):
                self._behind[carried].append(item)
            if item.into is not None:
                self._into[item.into] += 1

    def options(self, number: int, iteration: Iteration) -> list[tuple[Sharding | None, float]]:
        """Seconds of completing what a pattern's ops add up: as it is, and for each sharding in which all who read the
        total could cut it. Of a sum of several terms each pays its part.
        """
        whole = saved = 0.0
        cuts: dict[Sharding, float] = {}
        over = dict.fromkeys(iteration.reduced)
        for item in self._of[number]:
            if item.into is not None:
                over |= dict.fromkeys(iteration.scattered[0])
                plain, cut = self._of_loop(number, item, item.into, iteration)
                whole, saved = whole + plain, saved + max(0.0, plain - cut)
                continue
            alone, share = self._alone(number, item)
            plain = share * self._seconds(alone, {number: iteration})
            whole += plain
            if not iteration.reduced:
                continue
            if len(item.steps) > 1:
                least = min([self._cut_seconds(alone, iteration, (axes,)) for axes in permutations(iteration.reduced)])
                saved += max(0.0, plain - share * least)
                continue
            most = 0.0
            for sharding in sorted({at for use in item.readers for at in self._operands_of(use)}):
                if cut_by_readers(iteration.reduced, (sharding,)):
                    cuts[sharding] = plain - share * self._cut_seconds(alone, iteration, sharding)
                    most = max(most, cuts[sharding])
            saved += most
        if self.is_linked(number):
            return [(None, whole), *((cut, whole - less) for cut, less in cuts.items() if less > 0.0)]
        return [(None, whole), *([((tuple(over),), whole - saved)] if saved > 0.0 else [])]

    def is_linked(self, number: int) -> bool:
        """Whether all that a pattern's ops add up is one sum of one term, which its readers can cut together."""
        sums = self._of[number]
        return len(sums) < 2 and all(len(item.steps) == 1 and item.into is None for item in sums)

    def readers(self, number: int) -> list[Use]:
        """All who read the totals, where they are linked."""
        return sorted({use for item in self._of[number] for use in item.readers})

    def uses(self, number: int) -> list[Use]:
        """All that use what a pattern's ops add up, on the way and at the end, behind the loop of what a loop adds up;
        none where it does so itself."""
        uses = (
            use
            for item in self._of[number]
            for end in ([item] if item.into is None else self._behind[item.into[0]])
            for use in (
                *end.readers,
                *((op, k) for does, op in end.steps if does != "term" for k in range(self._operands(op))),
            )
        )
        found = sorted(set(uses))
        return [] if any(pattern == number for pattern, _ in found) else found

    def brought(self) -> Iterator[Brought]:
        """What loops add up and may have to bring to what they carry, in each trip."""
        sizes = self._problem.mesh.sizes
        for item in dict.fromkeys(item for of in self._of.values() for item in of):
            if item.into is None or item.steps[-1].op < 0:
                continue
            carried, place = item.into
            everywhere = min(term.bytes for term in item.terms) / prod(sizes)
            least = min(
                self._pricer.gathered_seconds(item, (axis,), everywhere * size)
                for axis, size in enumerate(sizes)
                if size > 1
            )
            yield Brought(item.steps[-1].op, carried.first[place], tuple({t.pattern for t in item.terms}), least)

    def _operands(self, number: int) -> int:
        return len(self._problem.patterns[number].form.operands)

    def _of_loop(
        self, number: int, item: SumItem, into: tuple[Carried, int], iteration: Iteration
    ) -> tuple[float, float]:
        """Seconds of a pattern's part of what a loop adds up, and where some use behind the loop cuts it."""
        carried, _ = into
        over = (*iteration.reduced, *iteration.scattered[0])
        if not over or any(end.into is not None for end in self._behind[carried]):  # another loop adds it up further
            return 0.0, 0.0
        sizes, at = self._problem.mesh.sizes, iteration.computed[0]
        least = min(term.bytes for each in (item, *self._behind[carried]) for term in each.terms)
        part = least / shards(at, sizes)
        in_trip = sum(term.pattern == number for term in item.terms) / len(item.terms)
        added = len(carried.sums) * self._into[into]  # terms of what is left behind the loop

        def left(kind: str, axes: tuple[int, ...], size: float) -> float:
            return sum(
                end.within.count(carried) / len(end.terms) * self._pricer.completed_seconds(end, kind, axes, size)
                for end in self._behind[carried]
            ) * (in_trip / added)

        plain, cut = left(ALL_REDUCE, over, part), left(REDUCE_SCATTER, over, part)
        plain = min(plain, in_trip * self._pricer.completed_seconds(item, ALL_REDUCE, over, part))
        for count in range(1, len(over) + 1):
            for axes in combinations(over, count):
                rest, piece = tuple(a for a in over if a not in axes), part / shards((axes,), sizes)
                each = in_trip * self._pricer.completed_seconds(item, REDUCE_SCATTER, axes, part)
                plain = min(plain, each + (left(REDUCE_SCATTER, rest, piece) if rest else 0.0))
        return plain, min(plain, cut)

    def _alone(self, number: int, item: SumItem) -> tuple[SumItem, float]:
        """What completes a pattern's terms of a sum as if each were a sum by itself, and their part of it."""
        terms = [term for term in item.terms if term.pattern == number]
        least = min(item.terms, key=lambda term: term.bytes).bytes
        share = len(terms) / len(item.terms)
        alone = replace(
            item,
            steps=(SumStep("term", number),),
            readers=(),
            within=(),
            ops=(item.ops[item.terms.index(terms[0])],),
        )
        return replace(alone, terms=(replace(terms[0], bytes=least),)), share

    def _cut_seconds(self, alone: SumItem, iteration: Iteration, sharding: Sharding) -> float:
        """Seconds of completing one term where all who read the total take it in one sharding."""
        reader = Iteration((), (sharding,), (), (), (), (), ())
        return self._seconds(
            replace(alone, readers=((NOWHERE, 0),)), {alone.terms[0].pattern: iteration, NOWHERE: reader}
        )

    def _seconds(self, item: SumItem, lowered: dict[int, Iteration]) -> float:
        return sum(use.seconds for use in self._pricer.sum_collectives(item, lowered))
