"""Which reductions XLA finds without being told how.

Enters: a `Source`, a `PartitionedProgram` and a value that is computed in one sharding and goes on in another. Leaves: whether the last sharding says enough.
"""

from __future__ import annotations

from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import in_mesh_order
from toast_cli.program.ops import DOT_GENERAL


def scatters(source: Source, lowered: PartitionedProgram, value: int) -> bool:
    """Whether XLA gets from the sharding a value is computed in to its own by itself, with a reduce-scatter.

    It does for products over one axis that keep the whole mesh busy and go on split along a dimension that was whole, where the axes of each
    dimension are in the mesh's order; else it may find odder ways, such as an all-reduce, a gather of everything and a slice. A reduction needs its
    pin for another
    reason: what it reads is mostly elementwise, and without one the sharding of the result may spread over all of that. Whether it does
    hangs on the order in which propagation sees the operations, which is not XLA's.
    """
    program = source.program
    number = program.producer[value]
    op = program.ops[number]
    if op.name != DOT_GENERAL:
        return False
    computed, sharding = lowered.computed[value], lowered.shardings[value]
    finer = all(b[: len(a)] == a for a, b in zip(computed, sharding, strict=True))
    operands = [lowered.required.get((number, k), lowered.shardings[v]) for k, v in enumerate(op.operands)]
    busy = {axis for at in (computed, *operands) for axes in at for axis in axes}
    idle = any(size > 1 and axis not in busy for axis, size in enumerate(lowered.axis_sizes))
    fresh = all(not a for a, b in zip(computed, sharding, strict=True) if a != b)
    spread = sum(len(b) - len(a) for a, b in zip(computed, sharding, strict=True))
    return finer and fresh and not idle and spread == 1 and in_mesh_order(sharding)
