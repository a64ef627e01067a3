"""What one device makes for all: results of host callbacks, and random numbers of `stablehlo.rng`.

XLA's partitioner runs such an op on one device, has zeros on the others, and all-reduces the result. Random numbers are
made so by each group of devices that are to have the same. (`HandleSingleDevice`, `HandleRng` of XLA's partitioner.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from toast_cli.plan.halo import Exchange
from toast_cli.plan.iteration import Iteration
from toast_cli.plan.partials import ALL_REDUCE
from toast_cli.plan.sharding import axes_of, shards
from toast_cli.program.model import Op
from toast_cli.program.ops import RNG


def spread(
    op: Op, whole_bytes: Sequence[int], iteration: Iteration, sizes: tuple[int, ...]
) -> Iterator[tuple[int, Exchange]]:
    """The all-reduces of an op's results, each with the number of its result. whole_bytes: [results]."""
    if not op.one_device and op.name != RNG:
        return
    for k, whole in enumerate(whole_bytes):
        at = iteration.computed[k]
        axes = tuple(axis for axis, size in enumerate(sizes) if size > 1 and axis not in axes_of(at))
        if axes and whole:
            yield k, Exchange(ALL_REDUCE, axes, whole / shards(at, sizes))
