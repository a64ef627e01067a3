"""The best of all shardings of a small program, found without plans: no decisions, no groups, no tactics, no search.

Every op by itself takes any way in which the mesh axes can split it, and any way in which its partial results can be
scattered. What such an assignment costs is what the cost model says of it. The cheapest assignment is the solution of
an integer program, which HiGHS solves: one variable for each way to split each op, and for each pair of shardings
between which an array may have to be resharded (as Alpa's inter-operator pass and XLA's former auto-sharder put it).
In: a `Problem`. Out: `Best`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations, product
from math import prod
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from toast_cli.dimensions.model import FactorKind, Form
from toast_cli.plan.axis_assignment import without_split_space
from toast_cli.plan.loops import LOOP_EDGES, edges
from toast_cli.plan.partials import cut_by_readers
from toast_cli.plan.problem import Problem
from toast_cli.plan.reshard import SLICE, Copy, Way, route, steps_ahead, ways_of
from toast_cli.plan.sharding import OpSharding, Sharding, lay_out
from toast_cli.price.arrays import ArrayItem
from toast_cli.price.items import Items, NeighbourItem, NeighbourReader, SumItem, WorkItem, make_items
from toast_cli.price.kernel_pricing import WorkPricer
from toast_cli.price.pricing import Pricer
from toast_cli.price.profiles import find_profile
from toast_cli.program.values import SumStep

NONE = -1
GAP = 1e-4  # relative, at which HiGHS may stop


@dataclass(frozen=True)
class Best:
    """seconds: of the cheapest assignment found; it can be had. least: seconds that no assignment can beat.
    op_shardings:
    [ops] the assignment.
    """

    seconds: float
    least: float
    op_shardings: dict[int, OpSharding] = field(repr=False)


class _Free(Problem):
    """A problem each of whose ops decides for itself."""

    @cached_property
    def chosen_by(self) -> tuple[tuple[object, ...], ...]:
        return tuple((number,) for number in range(len(self.patterns)))


def best_of_all(problem: Problem, seconds: float = 60.0) -> Best:
    """The best assignment. Memory is no matter. seconds: for HiGHS."""
    return _Selection(problem).solve(seconds)


def every_split(form: Form, sizes: tuple[int, ...]) -> list[tuple[tuple[int, ...], ...]]:
    """All ways in which mesh axes can split an op: [factors] axes. Shards divide, and a minor factor is split where its
    majors are fully split.
    """
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    found: dict[tuple[tuple[int, ...], ...], None] = {}
    for order in permutations(axes):
        for places in product((NONE, *range(len(form.sizes))), repeat=len(order)):
            split = tuple(
                tuple(a for a, s in zip(order, places, strict=True) if s == k) for k in range(len(form.sizes))
            )
            if split not in found and _is_legal(form, [prod(sizes[a] for a in axes) for axes in split]):
                found[split] = None
    return list(found)


def _is_legal(form: Form, shards: list[int]) -> bool:
    for factor, count in enumerate(shards):
        if count == 1:
            continue
        if form.kinds[factor] is FactorKind.BLOCKED or any(extent % count for extent in form.extents[factor]):
            return False
        if any(shards[major] != form.sizes[major] for major in form.majors[factor]):
            return False
    return True


def _can_be_ahead(item: ArrayItem, place: int) -> bool:
    """Whether under some plan the copy for the reader at `place` is made completely ahead of loops."""
    reader = item.readers[place]
    return reader.whole_ahead or (item.at_edges and reader.whole_if_ahead is False)


def every_op_sharding(problem: Problem, number: int) -> list[OpSharding]:
    """All that an op of a pattern could iterate over, each once."""
    pattern, sizes = problem.patterns[number], problem.mesh.sizes
    form = pattern.form
    found: dict[OpSharding, None] = {}
    for split in every_split(form, sizes):
        if pattern.space is not None and without_split_space(pattern.space, split, sizes) != split:
            continue  # XLA gives wrong numbers
        partial = [
            a for kind, axes in zip(form.kinds, split, strict=True) if kind is FactorKind.REDUCTION for a in axes
        ]
        targets = (
            [(NONE, *(factor for factors in dims for factor in factors)) for dims in form.results] if partial else []
        )
        for wanted in product(*(tuple(product(factors, repeat=len(partial))) for factors in targets)):
            if all(
                _can_be_scattered(form, split, partial, dims, w, sizes)
                for dims, w in zip(form.results, wanted, strict=False)
            ):
                found[lay_out(pattern, (split, wanted))] = None
    return list(found)


def _can_be_scattered(
    form: Form,
    split: tuple[tuple[int, ...], ...],
    partial: list[int],
    dims: Any,
    wanted: tuple[int, ...],
    sizes: tuple[int, ...],
) -> bool:
    shards = [prod(sizes[a] for a in axes) for axes in split]
    for axis, factor in zip(partial, wanted, strict=True):
        if factor != NONE:
            shards[factor] *= sizes[axis]
    for factors in dims:
        for place, factor in enumerate(factors):
            if factor in wanted and any(extent % shards[factor] for extent in form.extents[factor]):
                return False
            if factor in wanted and any(shards[major] != form.sizes[major] for major in factors[:place]):
                return False
    return True


@dataclass(frozen=True, slots=True)
class _Way:
    """One variable: an op sharding; cut: where it adds up, the sharding that all its readers take a piece of the
    total in, or None.
    """

    op_sharding: OpSharding
    cut: Sharding | None
    seconds: float


class _Selection:
    def __init__(self, problem: Problem) -> None:
        count = len(problem.op_pattern)
        fields = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
        patterns = tuple(replace(problem.patterns[p]) for p in problem.op_pattern)
        self.problem = _Free(**(fields | {"patterns": patterns, "op_pattern": tuple(range(count))}))
        profile = find_profile(self.problem.mesh.chip)
        self.items: Items = make_items(self.problem, profile)
        self.pricer, self.work = (
            Pricer(self.problem, self.items, {}),
            WorkPricer(self.problem, profile, {}),
        )
        self.work_of: dict[int, list[WorkItem]] = defaultdict(list)
        self.sums_of: dict[int, list[SumItem]] = defaultdict(list)
        for work in self.items.work:
            self.work_of[work.pattern].append(work)
        for added in self.items.sums:
            for term in added.terms:
                self.sums_of[term.pattern].append(added)
        self.every = [every_op_sharding(self.problem, op) for op in range(count)]
        self.ways = [self._ways(op) for op in range(count)]
        self.first = np.cumsum([0, *map(len, self.ways)])
        self.cost: list[float] = [way.seconds for ways in self.ways for way in ways]
        self.rows: list[tuple[dict[int, float], float, float]] = []

    def _ways(self, op: int) -> list[_Way]:
        """The ways to split an op, of those that look alike from outside the cheapest."""
        best: dict[object, _Way] = {}
        for op_sharding in self.every[op]:
            own = sum(
                self.work.seconds(w, op_sharding)
                + sum(use.seconds for use in self.pricer.work_collectives(w, op_sharding))
                for w in self.work_of[op]
            )
            for cut, seconds in self._sums(op, op_sharding):
                way = _Way(op_sharding, cut, own + seconds)
                key = (op_sharding.operands, op_sharding.computed, op_sharding.shardings, cut)
                if key not in best or way.seconds < best[key].seconds:
                    best[key] = way
        return list(best.values())

    def _sums(self, op: int, op_sharding: OpSharding) -> list[tuple[Sharding | None, float]]:
        """Seconds of completing what an op adds up, for each sharding in which its readers could all cut it."""
        found: list[tuple[Sharding | None, float]] = [(None, 0.0)]
        for added in self.sums_of[op]:
            alone = replace(
                added, terms=(next(t for t in added.terms if t.pattern == op),), steps=(SumStep("term", op),), ops=(op,)
            )
            share = 1.0 / len(added.terms)  # reduced together they cost as much as one of them

            def seconds(item: SumItem, lowered: dict[int, OpSharding], share: float = share) -> float:
                return share * sum(use.seconds for use in self.pricer.sum_collectives(item, lowered))

            found = [(None, seconds(replace(alone, readers=()), {op: op_sharding}))]
            wanted = {way.operands[k] for reader, k in added.readers for way in self.every[reader]}
            for sharding in sorted(wanted) if op_sharding.reduced else ():
                operands = {reader: _reading(k, sharding) for reader, k in added.readers}
                if len(operands) == len(added.readers) and cut_by_readers(op_sharding.reduced, (sharding,)):
                    found.append((sharding, seconds(alone, {**operands, op: op_sharding})))
        return found

    def solve(self, seconds: float) -> Best:
        for op, ways in enumerate(self.ways):
            self._row({int(self.first[op]) + k: 1.0 for k in range(len(ways))}, 1.0, 1.0)
            self._cuts(op)
        self._aliases()
        for read in self.items.neighbours:
            self._neighbours(read)
        for item in self.items.arrays:
            self._reshards(item)
        rows = [(n, k, v) for n, (row, _, _) in enumerate(self.rows) for k, v in row.items()]
        numbers, columns, values = (np.array(part) for part in zip(*rows, strict=True))
        matrix = csr_array((values, (numbers, columns)), shape=(len(self.rows), len(self.cost)))
        scale = max(self.cost) or 1.0
        chosen = int(self.first[-1])
        found = milp(
            np.array(self.cost) / scale,
            integrality=np.concatenate([np.ones(chosen), np.zeros(len(self.cost) - chosen)]),
            bounds=Bounds(0.0, 1.0),
            constraints=LinearConstraint(matrix, [low for _, low, _ in self.rows], [high for _, _, high in self.rows]),
            options={"time_limit": seconds, "mip_rel_gap": GAP},
        )
        assert found.x is not None, found.message
        picked = {
            op: ways[int(np.argmax(found.x[self.first[op] : self.first[op + 1]]))].op_sharding
            for op, ways in enumerate(self.ways)
        }
        return Best(self.seconds(picked), float(found.mip_dual_bound) * scale, picked)

    def seconds(self, picked: dict[int, OpSharding]) -> float:
        """What the cost model says of an assignment, where all that loops only read is gathered before them."""
        total, sizes = 0.0, self.problem.mesh.sizes
        picked = {**picked, LOOP_EDGES: edges(sizes, range(len(sizes)))}
        for work in self.items.work:
            total += self.work.seconds(work, picked[work.pattern])
            total += sum(use.seconds for use in self.pricer.work_collectives(work, picked[work.pattern]))
        for added in self.items.sums:
            total += sum(use.seconds for use in self.pricer.sum_collectives(added, picked))
        for read in self.items.neighbours:
            total += sum(use.seconds for use in self.pricer.neighbour_collectives(read, picked))
        for item in self.items.arrays:
            made = picked[item.pattern].shardings[item.result]
            uses = self.pricer.array_collectives(item, made, self.pricer.copies(item, picked))
            total += sum(use.seconds for use in uses)
        return total

    def _row(self, row: dict[int, float], low: float, high: float) -> None:
        self.rows.append((row, low, high))

    def _cuts(self, op: int) -> None:
        """A total is cut only as all its readers take it."""
        for added in self.sums_of[op]:
            for sharding in {way.cut for way in self.ways[op]} - {None}:
                cut = {int(self.first[op]) + k: -1.0 for k, way in enumerate(self.ways[op]) if way.cut == sharding}
                for reader, position in added.readers:
                    taken = {
                        int(self.first[reader]) + k: 1.0
                        for k, way in enumerate(self.ways[reader])
                        if way.op_sharding.operands[position] == sharding
                    }
                    self._row({**taken, **cut}, 0.0, 1.0)

    def _aliases(self) -> None:
        """A result that takes over an argument's buffer rests as the argument does."""
        program = self.problem.program
        first = len(program.ops) - len(program.results)
        for number, argument in enumerate(program.arguments):
            if argument.aliased_result >= 0:
                result = first + argument.aliased_result
                made = self._by(number, lambda it: it.shardings[0])
                taken = self._by(result, lambda it: it.operands[0])
                for sharding in {*made, *taken}:
                    row = dict.fromkeys(made.get(sharding, ()), 1.0) | dict.fromkeys(taken.get(sharding, ()), -1.0)
                    self._row(row, 0.0, 0.0)

    def _by(self, op: int, sharding_of: Any) -> dict[Sharding, list[int]]:
        found: dict[Sharding, list[int]] = defaultdict(list)
        for k, way in enumerate(self.ways[op]):
            found[sharding_of(way.op_sharding)].append(int(self.first[op]) + k)
        return found

    def _reshards(self, item: ArrayItem) -> None:
        """Variables for an array's copies: which, and what makes it, agree with what reads it."""
        if item.free:
            return
        made = self._by(item.pattern, lambda it: it.shardings[item.result])
        # Where it is made, the way to a collective, and the loop it is in -> who pays for it.
        copies: dict[tuple[Sharding, Way, int], list[tuple[int, float]]] = defaultdict(list)
        for place, reader in enumerate(item.readers):
            taken = self._by(reader.pattern, lambda it, at=reader.position: it.operands[at])
            prices = {(s, t): self._move_seconds(item, s, t, place) for s in made for t in taken}
            if not any(prices.values()):
                continue
            flows = {pair: self._variable(0.0) for pair in prices}
            for s, ways in made.items():
                self._row({flows[s, t]: 1.0 for t in taken} | dict.fromkeys(ways, -1.0), 0.0, 0.0)
            for t, ways in taken.items():
                self._row({flows[s, t]: 1.0 for s in made} | dict.fromkeys(ways, -1.0), 0.0, 0.0)
            for (s, t), moves in prices.items():
                steps = route(s, t, self.problem.mesh.sizes, item.shape)
                ahead = steps_ahead(steps, whole_ahead=_can_be_ahead(item, place))
                for way, price in moves.items():
                    region = reader.ahead_region if way[0] < ahead else reader.region
                    copies[s, way, region].append((flows[s, t], price))
        for shared in copies.values():
            if len(shared) == 1:
                ((flow, price),) = shared
                self.cost[flow] += price
                continue
            most = max(price for _, price in shared)
            copy = self._variable(most)  # one for all readers in a loop
            for flow, price in shared:
                self._row({copy: 1.0, flow: -price / most}, 0.0, 1.0)

    def _move_seconds(self, item: ArrayItem, made: Sharding, taken: Sharding, place: int) -> dict[Way, float]:
        """The way to each collective -> its seconds."""
        steps = route(made, taken, self.problem.mesh.sizes, item.shape)
        ways = [way for way, (step, _) in zip(ways_of(steps), steps, strict=True) if step.kind != SLICE]
        ahead = steps_ahead(steps, whole_ahead=_can_be_ahead(item, place))
        copies = [Copy(taken, (place,), steps, ahead)] if ways else []
        uses = self.pricer.array_collectives(item, made, copies)
        return {way: use.seconds for way, use in zip(ways, uses, strict=True)}

    def _neighbours(self, item: NeighbourItem) -> None:
        """As much as the dearest reader needs, at least."""
        prices = [self._sent_seconds(item, reader) for reader in item.readers]
        most = max(price for of_reader in prices for price in of_reader.values())
        if most:
            sent = self._variable(most)
            for of_reader in prices:
                self._row({sent: 1.0} | {way: -price / most for way, price in of_reader.items()}, 0.0, 1.0)

    def _sent_seconds(self, item: NeighbourItem, reader: NeighbourReader) -> dict[int, float]:
        """Way of one reader -> what it alone needs."""
        alone, op = replace(item, readers=(reader,)), reader[0]
        return {
            int(self.first[op]) + k: sum(
                use.seconds for use in self.pricer.neighbour_collectives(alone, {op: way.op_sharding})
            )
            for k, way in enumerate(self.ways[op])
        }

    def _variable(self, cost: float) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1


def _reading(position: int, sharding: Sharding) -> OpSharding:
    """An op sharding of which only one operand is known."""
    return OpSharding((), ((),) * position + (sharding,), (), (), (), (), ())
