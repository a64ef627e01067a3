"""Prices manual regions (`shard_map`) on each device, by the same rules as everything else.

A region is a program of its own on local shapes: its kernels and its memory are those of that program, and it has the
collectives that the user wrote under every plan. Along mesh axes that a region leaves to the partitioner, its body is
split as its operands and results are, by a plan for that program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod

from toast_cli.dimensions import analyse
from toast_cli.hardware.model import Mesh, axes_of_groups, crossed_axes
from toast_cli.plan.decisions import Plan, Shard
from toast_cli.plan.loops import LOOP_EDGES, edges, held_over
from toast_cli.plan.problem import Problem, make_problem
from toast_cli.plan.sharding import FactorAxes, OpPattern, Sharding, shards
from toast_cli.price.arrays import ArrayKernels
from toast_cli.price.buffers import Buffers
from toast_cli.price.collectives import collective_seconds
from toast_cli.price.cost import BY_HAND, INSIDE, CollectiveUse
from toast_cli.price.items import Items, make_items
from toast_cli.price.kernel_pricing import RegionPrice, RegionPrices, WorkPricer
from toast_cli.price.memo import Bucket
from toast_cli.price.pricing import Lowered, Pricer
from toast_cli.price.profile import CompilerProfile
from toast_cli.price.timeline import InRegion, Timeline, Windows
from toast_cli.program.model import ManualCollective, ManualRegion, Op
from toast_cli.program.ops import RAGGED_ALL_TO_ALL

# XLA:GPU sends a ragged all-to-all between GPUs of one host by a kernel of its own, in which one block of 128 threads
# does each update (`--xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel=false` leaves it to NCCL). The rate of
# one is fitted to one layer on 8 H100 (marin-community/marin#3633, 2 experts a token, 2 devices share the experts);
# `python -m benchmarks.experts` compares the others.
BLOCK_BYTES_PER_SECOND = 2.7e9
INPUT_OFFSETS = 2  # the operand that says where each update starts
MOST_GPUS_OF_A_HOST = 8  # NVLink domains of 72 GPUs span hosts, which presets do not state


def region_prices(problem: Problem, profile: CompilerProfile) -> RegionPrices:
    """The prices of all manual regions of a problem."""
    regions: dict[object, _Region] = {}  # layers have equal regions
    prices = {}
    for number, op in enumerate(problem.program.ops):
        if op.region is not None:
            pattern = problem.patterns[problem.op_pattern[number]]
            key = _meaning(op.region), pattern.form, pattern.closed
            if key not in regions:
                regions[key] = _Region(op.region, pattern, problem.mesh, profile)
            # Its collectives are reported for an array at its boundary.
            prices[number] = partial(regions[key].price, number, (*op.results, *op.operands, -1)[0])
    return RegionPrices(prices, max([region.windows.end for region in regions.values()], default=0))


def regions_of(items: Items | Bucket, lowered: Lowered, prices: RegionPrices) -> list[tuple[int, InRegion]]:
    """The manual regions among some items, with what is in them."""
    return [
        (item.op, prices.price[item.region](lowered[item.pattern].factor_axes).inside)
        for item in items.work
        if item.region >= 0
    ]


class _Region:
    """Equal regions of a problem."""

    def __init__(self, region: ManualRegion, pattern: OpPattern, mesh: Mesh, profile: CompilerProfile) -> None:
        self._region, self._mesh = region, mesh
        # The partitioner splits nothing over manual axes.
        axes = [replace(axis, size=1, links=()) if k in pattern.closed else axis for k, axis in enumerate(mesh.axes)]
        self._problem = make_problem(region.body, analyse(region.body), replace(mesh, axes=tuple(axes)))
        self._within = region_prices(replace(self._problem, mesh=mesh), profile)
        self._items = make_items(self._problem, profile)
        self._pricer = Pricer(self._problem, self._items, self._within)
        self._work = WorkPricer(self._problem, profile, self._within)
        self._in_blocks = "ragged-blocks" in profile.passes
        self.windows = Windows(self._problem, self._items.compilation, self._within.moments)
        self._arrays = ArrayKernels(self._problem, profile)
        self._groups = _groups(self._problem, pattern)
        self._prices: dict[Plan, RegionPrice] = {}
        self._prices_at: dict[tuple[int, FactorAxes], RegionPrice] = {}

    def price(self, op: int, value: int, split: FactorAxes) -> RegionPrice:
        """The price of one run at an op when these axes split its factors; collectives are reported for that value."""
        if (op, split) not in self._prices_at:
            plan = self._plan(split)
            if plan not in self._prices:
                self._prices[plan] = self._price(plan)
            self._prices_at[op, split] = self._prices[plan].reported_for(op, value)
        return self._prices_at[op, split]

    def _plan(self, split: FactorAxes) -> Plan:
        """The plan for the body in which these axes split its factors."""
        groups = self._problem.dimensions.groups
        return tuple(
            [
                Shard(group, axis, (0,) * len(groups[group].resolutions))
                for group, axes in zip(self._groups, split, strict=True)
                for axis in axes
                if group >= 0
            ]
        )

    def _price(self, plan: Plan) -> RegionPrice:
        problem, items, pricer = self._problem, self._items, self._pricer
        lowered = {pattern: problem.op_sharding(pattern, plan) for pattern in range(len(problem.patterns))}
        lowered[LOOP_EDGES] = edges(problem.mesh.sizes, held_over(problem.roles, plan))
        kernels = [use for work in items.work for use in self._work.uses(work, lowered[work.pattern])]
        for array in items.arrays:
            kernels += self._arrays.uses(array, *pricer.shardings_of(array, lowered), pricer.copies(array, lowered))
        sent = [
            use
            for number, exchange in self._region.exchanges.items()
            for use in self._exchanged(number, exchange, lowered)
        ]
        sent += pricer.collectives(items, lowered)
        held = _peak(items, Buffers(problem, items, pricer), pricer, lowered) - self._boundary_bytes(lowered)
        inside = self.windows.in_region(kernels, sent, regions_of(items, lowered, self._within))
        named = [replace(use, reason=INSIDE) if use.reason != BY_HAND else use for use in sent]
        return RegionPrice(tuple(kernels), tuple(named), max(0.0, held), inside)

    def _exchanged(self, number: int, exchange: ManualCollective, lowered: Lowered) -> Iterator[CollectiveUse]:
        """One collective for each array that an op exchanges."""
        body, sizes = self._region.body, self._mesh.sizes
        op, shardings = body.ops[number], lowered[self._problem.op_pattern[number]].computed
        groups = exchange.groups or (tuple(range(self._mesh.devices)),)
        axes = crossed_axes(groups, sizes)
        alone = 0 if exchange.pairs or axes_of_groups(groups, sizes) is not None else max(map(len, groups))
        for value, sharding in zip(op.results, shardings, strict=True) if axes else ():
            size = body.values[value].bytes / shards(sharding, self._problem.mesh.sizes)
            # A reduce-scatter in smaller groups sums up less.
            part = alone / prod(sizes[axis] for axis in axes) if alone and exchange.kind == "reduce-scatter" else 1.0
            seconds = collective_seconds(self._mesh, exchange.kind, size * part, axes)
            seconds = max(seconds, self._ragged_seconds(op, size, axes))
            yield CollectiveUse(
                exchange.kind,
                axes,
                size,
                op.trips,
                op.trips * seconds,
                number,
                value,
                waited_for=True,
                written=(exchange.kind, size),
                reason=BY_HAND,
                group=alone,
                place=exchange.place,
            )

    def _ragged_seconds(self, op: Op, size: float, axes: tuple[int, ...]) -> float:
        """Seconds that blocks of threads take for a ragged all-to-all of `size` bytes, see `BLOCK_BYTES_PER_SECOND`."""
        links = [link for axis in axes for link in self._mesh.axes[axis].links]
        in_host = prod(link.size for link in links) <= MOST_GPUS_OF_A_HOST
        in_host = in_host and all(link.kind == "switch" for link in links)
        if op.detail != RAGGED_ALL_TO_ALL or not self._in_blocks or not in_host:
            return 0.0
        return size / (self._region.body.values[op.operands[INPUT_OFFSETS]].elements * BLOCK_BYTES_PER_SECOND)

    def _boundary_bytes(self, lowered: Lowered) -> float:
        """Bytes of operands and results, which the surrounding program counts."""
        body, sizes = self._region.body, self._problem.mesh.sizes
        values = {argument.value for argument in body.arguments} | {result.value for result in body.results}
        return sum(body.values[value].bytes / shards(self._made(value, lowered), sizes) for value in values)

    def _made(self, value: int, lowered: Lowered) -> Sharding:
        """The sharding in which a value is made."""
        body = self._region.body
        maker = body.producer[value]
        return lowered[self._problem.op_pattern[maker]].shardings[body.ops[maker].results.index(value)]


def _groups(problem: Problem, pattern: OpPattern) -> list[int]:
    """[factors of the region] the corresponding group of its body; -1 for none."""
    body, dimensions, groups = problem.program, problem.dimensions, [-1] * len(pattern.form.sizes)
    arrays = [argument.value for argument in body.arguments] + [result.value for result in body.results]
    for value, outside in zip(arrays, (*pattern.form.operands, *pattern.form.results), strict=True):
        maker = body.producer[value]
        inside = dimensions.forms[maker].results[body.ops[maker].results.index(value)]
        for factors, within in zip(outside, inside, strict=True):
            if factors and within and groups[factors[0]] < 0:
                groups[factors[0]] = dimensions.class_group[dimensions.factor_classes[maker][within[0]]]
    return groups


def _meaning(region: ManualRegion) -> tuple[object, ...]:
    """Key of regions with equal prices."""
    body, exchanged = region.body, region.exchanges.items()
    within = tuple([_meaning(op.region) for op in body.ops if op.region is not None])
    return body.ops, body.values, tuple([(op, exchange.kind, exchange.groups) for op, exchange in exchanged]), within


def _peak(items: Items, holdings: Buffers, pricer: Pricer, lowered: Lowered) -> float:
    """Bytes alive at the peak, operands and results of the region included."""
    timeline = Timeline(items.lives, holdings.on_chip.capacity)
    held = [
        holdings.spans(timeline, item, *buffer)
        for item in items.arrays
        if item.costs
        for buffer in holdings.held(item, lowered[item.pattern], pricer.copies(item, lowered))
    ]
    return float(timeline.profile(held).max(initial=0.0))
