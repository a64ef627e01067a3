"""Contributions of buckets to a plan's cost, with a memo by item: many rows of a bucket are equal for most of its
items.

In: a bucket, and the op shardings of its patterns. Out: its `Share`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from toast_cli.cost.model import CollectiveUse
from toast_cli.evaluate.array_items import ArrayItem
from toast_cli.evaluate.array_kernels import ArrayKernels
from toast_cli.evaluate.buckets import Bucket, Share, Vector, quanta
from toast_cli.evaluate.buffers import Buffers, Kind
from toast_cli.evaluate.items import WorkItem
from toast_cli.evaluate.kernel_pricing import WorkPricer
from toast_cli.evaluate.neighbour_items import NeighbourItem
from toast_cli.evaluate.pricing import Lowered, Pricer
from toast_cli.evaluate.sum_items import SumItem
from toast_cli.evaluate.timeline import Timeline
from toast_cli.plan.loop_reads import LOOP_EDGES
from toast_cli.plan.op_sharding import OpSharding
from toast_cli.plan.sharding import Sharding

MemoryShares = tuple[tuple[Vector, float], ...]  # pairs of ([moments] number of arrays alive, bytes of one)
NO_MEMORY = 0
# Seconds of communication, and of its part that the compiler overlaps with compute.
Sent = tuple[float, float]
# Contribution of one array item: seconds of compute, communication, bytes of arguments, number of its `MemoryShares`.
ArrayShare = tuple[float, Sent, float, int]
UNSENT: Sent = (0.0, 0.0)
NOTHING: ArrayShare = (0.0, UNSENT, 0.0, NO_MEMORY)


class ShareMemo:
    """Shares of the buckets of one problem. Keys hold the numbers that an `OpShardingMemo` gives op shardings.

    asynchronous: kinds of collectives that the compiler overlaps with compute.
    """

    def __init__(
        self,
        pricer: Pricer,
        work: WorkPricer,
        arrays: ArrayKernels,
        holdings: Buffers,
        timeline: Timeline,
        asynchronous: Collection[str],
    ) -> None:
        self._pricer, self._work, self._arrays, self._holdings = pricer, work, arrays, holdings
        self._timeline = timeline
        self._asynchronous = asynchronous
        self._of_work: dict[tuple[int, int], tuple[float, Sent]] = {}
        self._of_sums: dict[tuple[int | Sharding, ...], Sent] = {}
        self._of_neighbours: dict[tuple[int, ...], tuple[float, Sent]] = {}
        self._of_arrays: dict[tuple[int | Sharding, ...], ArrayShare] = {}
        self._presence: dict[tuple[int, Kind, bool], Vector] = {}
        self._memories: list[MemoryShares] = [()]
        self._number: dict[tuple[int, tuple[tuple[Kind, float], ...]], int] = {}

    def forget(self) -> None:
        """Clears everything that depends on the selected moments."""
        for memo in (self._of_arrays, self._presence, self._number):
            memo.clear()
        del self._memories[1:]

    def share(self, bucket: Bucket, lowered: Lowered) -> Share:
        """The bucket's share under these op shardings."""
        compute = transfers = arguments = 0.0
        sent: list[Sent] = []
        for work in bucket.work:
            computing, of_work = self._work_share(work, lowered[work.pattern])
            compute += computing
            sent.append(of_work)
            transfers += self._work.transfer_seconds(work, lowered[work.pattern])
        sent += [self._sum_seconds(added, lowered) for added in bucket.sums]
        for read in bucket.neighbours:
            cutting, exchanged = self._neighbour_share(read, lowered)
            compute += cutting
            sent.append(exchanged)
        held = []
        for item in bucket.arrays:
            share = self._array_share(item, lowered)
            if share is not NOTHING:
                compute += share[0]
                sent.append(share[1])
                arguments += share[2]
                held.append(share[3])
        return Share(
            quanta(compute),
            quanta(sum([seconds for seconds, _ in sent])),
            quanta(sum([seconds for _, seconds in sent])),
            quanta(transfers),
            round(arguments),
            self._alive(bucket, tuple(held)),
        )

    def _sent(self, uses: Iterable[CollectiveUse]) -> Sent:
        every = overlapping = 0.0
        for use in uses:
            every += use.seconds
            if use.kind in self._asynchronous:
                overlapping += use.seconds
        return every, overlapping

    def _alive(self, bucket: Bucket, held: tuple[int, ...]) -> Vector:
        """[moments] bytes of a bucket's arrays; held: number of each one's `MemoryShares`."""
        found = bucket.alive.get(held)
        if found is None:
            found = self._timeline.nothing()
            for memory in held:
                for count, size in self._memories[memory]:
                    found += count * size
            bucket.alive[held] = np.rint(found, out=found)
        return found

    def _work_share(self, work: WorkItem, op_sharding: OpSharding) -> tuple[float, Sent]:
        """Seconds of compute and communication of one item."""
        key = (work.op, op_sharding.number)
        found = self._of_work.get(key)
        if found is None:
            communication = self._sent(self._pricer.work_collectives(work, op_sharding))
            found = self._of_work[key] = (self._work.seconds(work, op_sharding), communication)
        return found

    def _sum_seconds(self, item: SumItem, lowered: Lowered) -> Sent:
        partial, reduced = item.of_loops, False
        for term in () if item.of_loops else item.terms:
            op_sharding = lowered[term.pattern]
            reduced = reduced or bool(op_sharding.reduced)
            partial = partial or reduced or bool(op_sharding.scattered[0])
        if not partial:
            return UNSENT
        key: list[int | Sharding] = [item.ops[0]]
        key += [lowered[pattern].number for pattern in item.decisive]
        if reduced:  # the readers' shardings then matter
            key += [lowered[pattern].operands[position] for pattern, position in item.readers]
        known = tuple(key)
        found = self._of_sums.get(known)
        if found is None:
            found = self._of_sums[known] = self._sent(self._pricer.sum_collectives(item, lowered))
        return found

    def _neighbour_share(self, item: NeighbourItem, lowered: Lowered) -> tuple[float, Sent]:
        """Seconds of compute and communication of one item's halo exchange."""
        key = (item.op, item.value, *[lowered[pattern].number for pattern, _ in item.readers])
        found = self._of_neighbours.get(key)
        if found is None:
            sent = list(self._pricer.neighbour_collectives(item, lowered))
            cutting = sum([use.seconds for use in self._arrays.exchange_uses(sent)])
            found = self._of_neighbours[key] = (cutting, self._sent(sent))
        return found

    def _array_share(self, item: ArrayItem, lowered: Lowered) -> ArrayShare:
        op_sharding = lowered[item.pattern]
        made = op_sharding.shardings[item.result]
        shardings = [lowered[reader.pattern].operands[reader.position] for reader in item.readers]
        # For partial results the whole op sharding matters, not only the final sharding.
        partial = op_sharding.reduced or op_sharding.scattered[item.result]
        inside = item.region >= 0
        if not (item.stored or partial or inside or item.row_copies) and shardings.count(made) == len(shardings):
            return NOTHING  # nobody stores or moves it
        key: tuple[int | Sharding, ...] = (
            item.values[0],
            op_sharding.number if partial or inside else made,
            *shardings,
        )
        if item.at_edges:
            key = (*key, lowered[LOOP_EDGES].number)
        found = self._of_arrays.get(key)
        if found is None:
            copies = self._pricer.copies(item, lowered)
            seconds = self._sent(self._pricer.array_collectives(item, made, copies)) if copies else UNSENT
            rest = self._holdings.resting(item) * self._pricer.local(item.bytes, made)
            memory = self._memory(item, tuple(self._holdings.held(item, op_sharding, copies)))
            making = sum([use.seconds for use in self._arrays.uses(item, made, shardings, copies)])
            found = (making, seconds, rest, memory) if copies or rest or memory or making else NOTHING
            self._of_arrays[key] = found
        return found

    def _memory(self, item: ArrayItem, held: tuple[tuple[Kind, float], ...]) -> int:
        """Number of the `MemoryShares` of one item with buffers of these kinds and bytes."""
        if not held:
            return NO_MEMORY
        key = item.values[0], held
        number = self._number.get(key)
        if number is None:
            number = self._number[key] = len(self._memories)
            self._memories.append(tuple([(self._presence_of(item, kind, size), size) for kind, size in held]))
        return number

    def _presence_of(self, item: ArrayItem, kind: Kind, size: float) -> Vector:
        """[entries of the timeline] how many of the item's buffers of that kind and size are alive."""
        key = (item.values[0], kind, size <= self._holdings.on_chip.largest)
        presence = self._presence.get(key)
        if presence is None:
            brief = self._holdings.brief(item, kind, size)
            presence = self._presence[key] = self._timeline.presence(self._holdings.intervals(item, kind), brief)
        return presence
