"""Least seconds to complete the sums of one pattern's ops, whatever all other ops do.

A total is all-reduced, or reduce-scattered if all its readers take a shard of it; a split of the op then becomes
several ways, one for each possible sharding. A sum of several terms is priced at no more than one reduction, of which
each term pays its part. A loop-carried sum is completed in each trip, after the loop, or partly in each: the cheapest
of these. Resharding such a sum to the carry's sharding comes on top.

In: the sum items of a problem and a pattern's op shardings. Out: seconds, and the readers of the totals.
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
from toast_cli.plan.decisions import NONE
from toast_cli.plan.op_sharding import OpSharding
from toast_cli.plan.partials import ALL_REDUCE, REDUCE_SCATTER, cut_by_readers
from toast_cli.plan.problem import Problem
from toast_cli.plan.sharding import Sharding, shards
from toast_cli.program.sums import SumStep

Use = tuple[int, int]  # pattern, operand position


class Brought(NamedTuple):
    """A sum that a loop adds to its carry, and may have to reshard.

    Attributes:
        end: the pattern that makes it. into: the use that adds it. terms: patterns. seconds: least time of the reshard,
            if an axis over which it is not partial splits it where it is made and not where it is read.
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
        self._behind: dict[Carried, list[SumItem]] = defaultdict(list)  # sums that read a loop-carried sum
        self._into: Counter[tuple[Carried, int]] = Counter()  # equal sums added to one loop-carried sum
        for item in items.sums:
            for pattern in sorted({term.pattern for term in item.terms}):
                self._of[pattern].append(item)
            for carried in dict.fromkeys(item.within):
                self._behind[carried].append(item)
            if item.into is not None:
                self._into[item.into] += 1

    def options(self, number: int, op_sharding: OpSharding) -> list[tuple[Sharding | None, float]]:
        """(None, seconds) to complete a pattern's sums uncut, and (sharding, seconds) for each sharding to which all
        readers could have the total reduce-scattered. Each term of a sum pays its part.
        """
        whole = saved = 0.0
        cuts: dict[Sharding, float] = {}
        over = dict.fromkeys(op_sharding.reduced)
        for item in self._of[number]:
            if item.into is not None:
                over |= dict.fromkeys(op_sharding.scattered[0])
                plain, cut = self._of_loop(number, item, item.into, op_sharding)
                whole, saved = whole + plain, saved + max(0.0, plain - cut)
                continue
            alone, share = self._alone(number, item)
            plain = share * self._seconds(alone, {number: op_sharding})
            whole += plain
            if not op_sharding.reduced:
                continue
            if len(item.steps) > 1:
                least = min(
                    [self._cut_seconds(alone, op_sharding, (axes,)) for axes in permutations(op_sharding.reduced)]
                )
                saved += max(0.0, plain - share * least)
                continue
            most = 0.0
            for sharding in sorted({at for use in item.readers for at in self._operands_of(use)}):
                if cut_by_readers(op_sharding.reduced, (sharding,)):
                    cuts[sharding] = plain - share * self._cut_seconds(alone, op_sharding, sharding)
                    most = max(most, cuts[sharding])
            saved += most
        if self.is_linked(number):
            return [(None, whole), *((cut, whole - less) for cut, less in cuts.items() if less > 0.0)]
        return [(None, whole), *([((tuple(over),), whole - saved)] if saved > 0.0 else [])]

    def is_linked(self, number: int) -> bool:
        """Whether a pattern has a single sum of one term, whose readers can have it reduce-scattered together."""
        sums = self._of[number]
        return len(sums) < 2 and all(len(item.steps) == 1 and item.into is None for item in sums)

    def readers(self, number: int) -> list[Use]:
        """All readers of the totals, if these are linked (see `is_linked`)."""
        return sorted({use for item in self._of[number] for use in item.readers})

    def uses(self, number: int) -> list[Use]:
        """All uses of a pattern's sums, intermediate and final, after the loop for loop-carried sums; empty if the
        pattern itself is among them."""
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
        """The loop-carried sums that may have to be resharded in each trip."""
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
        self, number: int, item: SumItem, into: tuple[Carried, int], op_sharding: OpSharding
    ) -> tuple[float, float]:
        """(seconds of a pattern's part of a loop-carried sum, the same if some use after the loop reduce-scatters
        it)."""
        carried, _ = into
        over = (*op_sharding.reduced, *op_sharding.scattered[0])
        if not over or any(end.into is not None for end in self._behind[carried]):  # an outer loop carries it on
            return 0.0, 0.0
        sizes, at = self._problem.mesh.sizes, op_sharding.computed[0]
        least = min(term.bytes for each in (item, *self._behind[carried]) for term in each.terms)
        part = least / shards(at, sizes)
        in_trip = sum(term.pattern == number for term in item.terms) / len(item.terms)
        added = len(carried.sums) * self._into[into]  # terms of the deferred reduction

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
        """(a sum item with one of a pattern's terms only, the fraction of the sum's terms that are the pattern's)."""
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

    def _cut_seconds(self, alone: SumItem, op_sharding: OpSharding, sharding: Sharding) -> float:
        """Seconds to complete one term if all readers take the total in this sharding."""
        reader = OpSharding((), (sharding,), (), (), (), (), ())
        return self._seconds(replace(alone, readers=((NONE, 0),)), {alone.terms[0].pattern: op_sharding, NONE: reader})

    def _seconds(self, item: SumItem, lowered: dict[int, OpSharding]) -> float:
        return sum(use.seconds for use in self._pricer.sum_collectives(item, lowered))
