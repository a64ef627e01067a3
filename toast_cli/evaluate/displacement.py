"""What a plan costs more where some values lie elsewhere than planned.

Each of them is brought to its other sharding as soon as it is made, and from there to where ops read it; the ops
themselves iterate as the plan says. Enters: a problem with its items and pricer, and under a plan what each pattern
iterates over. Leaves: seconds of compute and communication, and the memory held less and more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from toast_cli.evaluate.array_items import ArrayItem, all_readers, are_at_edges, making_of
from toast_cli.evaluate.buffers import Buffers, CountedBuffers
from toast_cli.evaluate.items import Items
from toast_cli.evaluate.kernel_pricing import WorkPricer
from toast_cli.evaluate.pricing import Pricer
from toast_cli.evaluate.timeline import Spans, Timeline
from toast_cli.plan.iteration import Iteration
from toast_cli.plan.loop_reads import LOOP_EDGES, LOOP_READS
from toast_cli.plan.problem import Problem
from toast_cli.plan.sharding import Sharding


@dataclass(frozen=True)
class Displaced:
    """compute, communication: seconds more (negative: less). less, more: memory that is not held any more, and that is
    held instead."""

    compute: float
    communication: float
    less: Spans
    more: Spans


class Displacement:
    """Answers for one problem."""

    def __init__(self, problem: Problem, items: Items, pricer: Pricer, kernels: WorkPricer, timeline: Timeline) -> None:
        self._problem, self._items, self._timeline = problem, items, timeline
        self._pricer, self._kernels = pricer, kernels
        # Copies are remembered by the places of their readers: here of all of them, elsewhere of those that can differ.
        self._buffers = Buffers(problem, items, pricer)

    def displaced(self, elsewhere: Mapping[int, Sharding], iteration_of: Callable[[int], Iteration]) -> Displaced:
        """What becomes of a plan. elsewhere: value -> where it lies instead. iteration_of: by pattern."""
        compute, communication, less, more = 0.0, 0.0, CountedBuffers(), CountedBuffers()
        for item in self._items.arrays:
            together: dict[Sharding, list[int]] = defaultdict(list)
            for value in item.values:
                if value in elsewhere:
                    together[elsewhere[value]].append(value)
            for there, values in together.items():
                readers = all_readers(self._problem, self._items.compilation.needs, values[0])
                making = making_of(self._problem, self._items.compilation, values[0], readers)
                at_edges = LOOP_READS in self._problem.roles and are_at_edges(readers)
                moved = replace(
                    item, values=tuple(values), readers=readers, at_edges=at_edges, making=making, as_made=False
                )
                made = iteration_of(item.pattern)
                shardings = tuple([there if k == item.result else at for k, at in enumerate(made.shardings)])
                communication += self._pricer.bringing_seconds(moved, made.shardings[item.result], there)
                before = self._hold(moved, made, iteration_of, less)
                after = self._hold(moved, replace(made, shardings=shardings), iteration_of, more)
                compute, communication = compute + after[0] - before[0], communication + after[1] - before[1]
        return Displaced(compute, communication, less.spans(self._timeline), more.spans(self._timeline))

    def _hold(
        self, item: ArrayItem, made: Iteration, iteration_of: Callable[[int], Iteration], found: CountedBuffers
    ) -> tuple[float, float]:
        """Adds what the item's arrays hold; (compute, communication) seconds of making them whole, where that is
        needed, and of bringing them to their readers."""
        patterns = [reader.pattern for reader in item.readers]
        lowered = {p: iteration_of(p) for p in (*patterns, *([LOOP_EDGES] if item.at_edges else []))}
        sharding = made.shardings[item.result]
        copies = self._pricer.copies_from(item, sharding, lowered)
        for kind, size in self._buffers.held(item, made, copies):
            found.add(self._buffers, item, kind, size)
        read = [lowered[reader.pattern].operands[reader.position] for reader in item.readers]
        compute = sum([use.seconds for use in self._kernels.unsliced_uses(item, sharding, read)])
        return compute, sum([use.seconds for use in self._pricer.array_collectives(item, sharding, copies)])
