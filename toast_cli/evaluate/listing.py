"""Lists what a plan is made of: its kernels and collectives with their seconds, and the arrays alive at each moment.

In: a `Problem`. Out: for a plan, `KernelUse`s, `CollectiveUse`s and bytes alive, for the evaluator, which adds them up,
and for reports.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate

from toast_cli.compiler.gpu_libraries import temporary_growth
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.compiler.profiles import find_profile
from toast_cli.cost.corrections import NO_CORRECTIONS, Corrections
from toast_cli.cost.model import Alive, CollectiveUse, KernelUse
from toast_cli.evaluate.array_items import ArrayItem
from toast_cli.evaluate.array_kernels import ArrayKernels
from toast_cli.evaluate.buckets import Bucket, Vector, make_buckets
from toast_cli.evaluate.buffers import Buffers, CountedBuffers, Kind
from toast_cli.evaluate.items import Items, make_items
from toast_cli.evaluate.kernel_pricing import WorkPricer
from toast_cli.evaluate.manual_regions import kernels_of, region_prices
from toast_cli.evaluate.op_sharding_memo import OpShardingMemo, RowNumbers
from toast_cli.evaluate.pricing import Lowered, Pricer
from toast_cli.evaluate.timeline import Spans, Timeline
from toast_cli.plan.decisions import Plan
from toast_cli.plan.problem import Problem


class Listing:
    """Kernels, collectives and arrays of one problem's plans. Arguments: see `Evaluator`."""

    def __init__(
        self,
        problem: Problem,
        like: Listing | None = None,
        corrections: Corrections = NO_CORRECTIONS,
        profile: CompilerProfile | None = None,
    ) -> None:
        self.problem = problem
        self._corrections = corrections
        self.profile = profile or find_profile(problem.mesh.chip)
        known = like.items.compilation if like and like.serves(problem) and like.profile == self.profile else None
        self.items: Items = make_items(problem, self.profile, known)
        self._growth = temporary_growth(problem.program, self.items.stored, self.profile)
        self._regions = region_prices(problem, self.profile, corrections)
        self._pricer = Pricer(problem, self.items, corrections, self._regions)
        self._work = WorkPricer(problem, self.profile, self._regions)
        self._arrays = ArrayKernels(problem, self.profile)
        self._holdings = Buffers(problem, self.items, self._pricer)
        self.timeline = Timeline(self.items.lives, self._holdings.on_chip.capacity)
        self._rows = OpShardingMemo(problem)
        self._buckets = make_buckets(self.items, self._rows)

    def serves(self, problem: Problem) -> bool:
        """Whether another problem has the same program and the same chip."""
        return self.problem.program is problem.program and self.problem.mesh.chip == problem.mesh.chip

    def kernels(self, plan: Plan) -> list[KernelUse]:
        """Work and time of every kernel of `plan`, equal ones merged, the longest first."""
        rows = self._rows_of(plan)
        found = [use for bucket in self._buckets for use in self._bucket_kernels(bucket, rows)]
        return sorted(found, key=lambda use: -use.seconds)

    def collectives(self, plan: Plan) -> list[CollectiveUse]:
        """Every collective of `plan`, equal ones of one item merged, the most expensive first."""
        rows = self._rows_of(plan)
        found = [use for bucket in self._buckets for use in self._bucket_collectives(bucket, rows)]
        return sorted(found, key=lambda use: -use.seconds)

    def host_bytes(self, plan: Plan) -> float:
        """Peak bytes of one device's arrays in host memory."""
        changes: dict[int, float] = defaultdict(float)
        for item, lowered in self._lowered_arrays(plan):
            size, intervals = self._holdings.on_host(item, lowered[item.pattern])
            for first, last in intervals:
                changes[first] += size
                changes[last + 1] -= size
        return max(accumulate(changes[moment] for moment in sorted(changes)), default=0.0)

    def memory_profile(self, plan: Plan) -> Vector:
        """[timeline.candidates] bytes alive at every moment at which memory can peak."""
        rows = self._rows_of(plan)
        return self.timeline.profile([self._bucket_spans(bucket, rows) for bucket in self._buckets])

    def memory_by(self, plan: Plan, group: Callable[[int, str], str]) -> dict[str, Vector]:
        """Group -> [timeline.candidates] bytes alive, with the growth of temporaries by the chip's compiler.

        Args:
            group: maps a value's number and role (see `Alive`) to its group.
        """
        found: dict[str, CountedBuffers] = defaultdict(CountedBuffers)
        for item, lowered in self._lowered_arrays(plan):
            for kind, size in self._held(item, lowered):
                role = self._holdings.role(item, kind)
                grown = size if role == "argument" else self._growth * size
                members: dict[str, list[int]] = defaultdict(list)
                for value in item.values:
                    members[group(value, role)].append(value)
                for name, values in members.items():
                    found[name].add(self._holdings, replace(item, values=tuple(values)), kind, grown)
        return self.timeline.shared({name: held.spans(self.timeline) for name, held in found.items() if held.intervals})

    def alive_at_peak(self, plan: Plan) -> tuple[int, list[Alive]]:
        """Op number at which memory peaks under `plan`, and the arrays alive there, largest first."""
        profile = self.memory_profile(plan)
        moment = int(self.timeline.candidates[int(profile.argmax())]) if len(profile) else 0
        return moment // 2, self._alive_then(plan, moment)

    def alive_at(self, plan: Plan, op: int) -> list[Alive]:
        """The arrays alive under `plan` when an op runs, largest first."""
        return self._alive_then(plan, self.items.lives.times[op])

    def _alive_then(self, plan: Plan, moment: int) -> list[Alive]:
        found: list[tuple[Alive, bool]] = []
        for item, lowered in self._lowered_arrays(plan):
            found.extend(self._alive(item, lowered, moment))
        return sorted(self._holdings.on_chip.left(found), key=lambda a: -a.bytes)

    def _alive(self, item: ArrayItem, lowered: Lowered, moment: int) -> Iterator[tuple[Alive, bool]]:
        """(array alive at that moment, whether it may be in on-chip memory then)."""
        for kind, size in self._held(item, lowered):
            small = size <= self._holdings.on_chip.largest
            for value in item.values:
                there = [i for i in self._holdings.of_value(item, kind, value) if i[0] <= moment <= i[1]]
                if there:
                    brief = small and all(self._holdings.is_brief(kind, value, i) for i in there)
                    yield Alive(value, size, self._holdings.role(item, kind)), brief

    def _bucket_kernels(self, bucket: Bucket, rows: RowNumbers) -> Iterator[KernelUse]:
        return kernels_of(bucket, self._lower(bucket, rows), self._pricer, self._work, self._arrays)

    def _bucket_collectives(self, bucket: Bucket, rows: RowNumbers) -> Iterator[CollectiveUse]:
        return self._pricer.collectives(bucket, self._lower(bucket, rows))

    def _bucket_spans(self, bucket: Bucket, rows: list[int]) -> Spans:
        """Live intervals and bytes of a bucket's arrays; memoises the last rows."""
        key = bucket.key(rows)
        if bucket.held is None or bucket.held[0] != key:
            lowered = self._lower(bucket, rows)
            held = CountedBuffers()
            for item in bucket.arrays:
                for kind, size in self._held(item, lowered):
                    held.add(self._holdings, item, kind, size)
            bucket.held = key, held.spans(self.timeline)
        return bucket.held[1]

    def _held(self, item: ArrayItem, lowered: Lowered) -> Iterator[tuple[Kind, float]]:
        return self._holdings.held(item, lowered[item.pattern], self._pricer.copies(item, lowered))

    def _lowered_arrays(self, plan: Plan) -> Iterator[tuple[ArrayItem, Lowered]]:
        rows = self._rows_of(plan)
        for bucket in self._buckets:
            lowered = self._lower(bucket, rows)
            for item in bucket.arrays:
                yield item, lowered

    def _lower(self, bucket: Bucket, rows: RowNumbers) -> Lowered:
        views = self._rows.views
        return {pattern: views[view].rows[rows[view]][place] for pattern, view, place in bucket.places}

    def _rows_of(self, plan: Plan) -> list[int]:
        steps = self._rows.steps(plan)
        return [self._rows.row(view, steps) for view in self._rows.views]
