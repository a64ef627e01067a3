"""Ops that one device runs for all: host callbacks, and random numbers of `stablehlo.rng`.

XLA's partitioner runs such an op on one device, uses zeros on the others, and all-reduces the result. For random
numbers it does so in each group of devices that hold the same shard. (`HandleSingleDevice`, `HandleRng` of XLA's
partitioner.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from toast_cli.plan.halo import Exchange
from toast_cli.plan.op_sharding import OpSharding
from toast_cli.plan.partials import ALL_REDUCE
from toast_cli.plan.sharding import axes_of, shards
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ADD, RNG


def not_reduced(program: Program) -> frozenset[int]:
    """Results of such ops that need no all-reduce of their own: they have no readers, or they are only added to others
    and XLA reduces the sum (see `partials`)."""
    found: set[int] = set()
    added: dict[int, int] = {}  # a sum with one reader -> the term whose all-reduce is counted for it
    for op in program.ops:
        if op.one_device:
            found.update(value for value in op.results if not program.users[value])
            terms = {value: value for value in op.results}
        elif op.name == ADD and all(value in added for value in op.operands):
            left, right = (added[value] for value in op.operands)
            found.add(right)
            terms = {op.results[0]: left}
        else:
            continue
        for value, term in terms.items():
            uses = [program.ops[user] for user, _ in program.users[value]]
            if len(uses) == 1 and (uses[0].loop, uses[0].branches) == (op.loop, op.branches):
                added[value] = term
    return frozenset(found)


def spread(
    op: Op, whole_bytes: Sequence[int], op_sharding: OpSharding, sizes: tuple[int, ...]
) -> Iterator[tuple[int, Exchange]]:
    """The all-reduces of an op's results, each with the number of its result. whole_bytes: [results], 0 for those in
    `not_reduced`."""
    if not op.one_device and op.name != RNG:
        return
    for k, whole in enumerate(whole_bytes):
        at = op_sharding.computed[k]
        axes = tuple(axis for axis, size in enumerate(sizes) if size > 1 and axis not in axes_of(at))
        if axes and whole:
            yield k, Exchange(ALL_REDUCE, axes, whole / shards(at, sizes))
