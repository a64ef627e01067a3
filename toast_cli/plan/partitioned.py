"""A plan lowered: `PartitionedProgram` has the shardings of every op, value and use, and the collectives; `Promises`
is what a report says of them, which other steps compare with XLA's compiled program.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from toast_cli.plan.loops import DeferredReduction
from toast_cli.plan.sharding import OpSharding, Sharding, in_mesh_order, refines, scattered_in, split_further

# Why a collective is there: a partial sum, a use or a pin that needs another sharding, a halo exchange, or an op that
# one device runs for all.
Reason = Literal["partial", "reshard", "pin", "neighbours", "one device"]
# Position of a collective relative to `loop`, the innermost loop around its op: in each trip, or once before or after
# the loop.
Edge = Literal["inside", "before", "behind"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a partitioned program.

    Attributes:
        kind: all-reduce, reduce-scatter, all-gather, all-to-all or collective-permute. axes: of the mesh.
        value: the array it communicates. op: the one that makes or needs it.
        before, after: the value's sharding on either side; None where readers that see it through a view determine it.
        local_bytes: of its result on each device. runs: in one run of the program. loop, edge: where it runs; -1
            outside loops.
        reason: why it is there. uses: (op, operand position) of the uses it serves; none where it serves all.
    """

    kind: str
    axes: tuple[int, ...]
    value: int
    op: int
    before: Sharding | None
    after: Sharding | None
    local_bytes: float
    runs: float
    loop: int
    edge: Edge
    reason: Reason
    uses: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class PartitionedProgram:
    """One program under one plan.

    Attributes:
        axis_names, axis_sizes: of the mesh, in order; shardings name axes by number.
        shardings: [values] the sharding of each value after its op and the op's reduction. computed: the sharding in
        which the op itself computes a value, where that differs from `shardings` (the value is partial there, and a
        reduce-scatter takes it to `shardings`).
        required: (op number, operand position) -> the sharding that use needs, where that differs from the value's: a
            reshard sits on this edge.
        at_once: values in `computed` that are reduce-scattered over all their axes at once: sums, and results of ops
            that are no contractions.
        convolved: values in `computed` that a convolution makes.
        paths: value in `computed` -> the shardings it goes through, where that is known; see `path`.
        op_shardings: [ops] sharding of each. partial: value -> mesh axes over which its op leaves it partial (each
            device holds a term of it); complete values are missing.
        added: value -> the value at the end of its sum: it stays partial, and is reduced there. Terms of sums that the
            compiler reduces once by itself, though each is written to be reduced (see `program.values.scatters_into`),
            are not among them.
        carried: op number of a loop's carry -> its deferred reduction, see `plan.loops`. `computed` has its
            sharding in the loop, `shardings` the one after the reduction behind the loop.
        summed: values that stay partial on the way to such a carry.
        by_partitioner: values in `computed` that XLA's partitioner takes to `shardings` by itself (see
            `partials.found_by_partitioner`).
        held: axes over which loop-invariant arrays are gathered before loops, see `plan.loops`.
        collectives: all of them, as the partitioner writes them, in program order.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    shardings: list[Sharding]
    computed: dict[int, Sharding]
    required: dict[tuple[int, int], Sharding]
    at_once: frozenset[int] = frozenset()
    convolved: frozenset[int] = frozenset()
    paths: dict[int, tuple[Sharding, ...]] = field(default_factory=dict)
    op_shardings: tuple[OpSharding, ...] = ()
    partial: dict[int, tuple[int, ...]] = field(default_factory=dict)
    added: dict[int, int] = field(default_factory=dict)
    carried: dict[int, DeferredReduction] = field(default_factory=dict)
    summed: frozenset[int] = frozenset()
    by_partitioner: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    collectives: tuple[Collective, ...] = ()

    def path(self, value: int) -> tuple[Sharding, ...]:
        """Shardings a value goes through, from the one it is computed in to its final one.

        A contraction's reduce-scatter over several axes takes one step where they split one dimension (see
        `partials.in_one_step`), else in two, in the order in which they split each dimension, and never through the
        whole array: over the whole mesh at once XLA:TPU writes an all-reduce and a slice, in two steps it writes
        reduce-scatters (see `scattered_in`). A sum of partial values stays whole until its end, so that there is one
        reduction and not one a term; and so does the gradient of a look-up: half split, XLA may find it cheaper to
        gather all updates. A convolution whose result is scattered over three axes or more is constrained to the
        sharding it is computed in: with a finer constraint, XLA gathers its operands along the batch (over two axes,
        XLA:TPU then reduces over both at once). So is a contraction whose next sharding has axes out of mesh order.
        """
        if value in self.paths:
            return self.paths[value]
        if value not in self.computed:
            return (self.shardings[value],)
        before, after = self.computed[value], self.shardings[value]
        if value in self.at_once or not refines(after, before):
            return (before, after)
        over = [axes[len(have) :] for have, axes in zip(before, after, strict=True)]
        steps = [before]
        for axes in scattered_in(over, self.axis_sizes):
            steps.append(split_further(steps[-1], after, axes))
        constrained = value in self.convolved and sum(map(len, over)) > 2
        return tuple(steps[1:] if len(steps) > 2 and not constrained and in_mesh_order(steps[1]) else steps)


# ---------------------------------------------------------------- promises
# What a report promises, as plain data: its collectives and constraints, which other steps make or compare with XLA's
# compiled program.


@dataclass(frozen=True)
class CollectiveFacts:
    """A collective as the chip's compiler emits it; `written_kind`, `written_bytes` as the partitioner writes it, if
    that differs. by_hand: the program states it in a manual region; it exists under every plan. module: the innermost
    one around all ops that it serves, as in `LineFacts`; empty if the program names none. in_library: its location is
    in an installed package."""

    kind: str  # all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute
    axes: list[str]  # or ["groups of 2"], where the devices that communicate are not those along axes
    bytes: int  # of the result, per device, one run
    count: float  # loops counted; a collective in one of n branches counts 1/n
    seconds: float  # all of them
    location: str
    written_kind: str = ""
    written_bytes: int = 0
    by_hand: bool = False
    module: str = ""
    in_library: bool = False

    def as_written(self) -> CollectiveFacts:
        """The collective as the partitioner writes it, before the chip's compiler reworks it."""
        if not self.written_kind:
            return self
        return replace(self, kind=self.written_kind, bytes=self.written_bytes, written_kind="", written_bytes=0)


@dataclass(frozen=True)
class ConstraintFacts:
    """One constraint in the written program, beside the shardings of arguments and results.

    Attributes:
        place: "definition" (the value has this sharding from its definition on), "use" (these uses need it), or
            "kernel" (a hand-written kernel runs on shards, as `line` states in JAX).
        location: source location of the operation that makes the value, or that uses it. type: of the value.
        name: path of the argument that the value is; empty for others. uses: how many uses one constraint serves.
        line: `x = jax.lax.with_sharding_constraint(x, P("data", None))`. explicit: what to write in its place
            on a mesh of explicit axes: `x = jax.sharding.reshard(x, P("data", None))`, or for the product that makes
            the value `out_sharding=P("data", None)`; empty for kernels.
    """

    place: str
    location: str
    type: str
    name: str
    uses: int
    line: str
    explicit: str = ""


@dataclass(frozen=True)
class Promises:
    """axes: the mesh, name -> size. Bytes per device. fits: True if the plan was predicted to stay within
    `limit_bytes`. machine: name of the mesh specification of the plan; empty if unknown. host_bytes: in the host's
    memory. fit: "yes", "unsure" or "no"."""

    axes: dict[str, int]
    collectives: list[CollectiveFacts]
    peak_bytes: int
    argument_bytes: int
    limit_bytes: int
    fits: bool
    machine: str = ""
    host_bytes: int = 0
    fit: str = "yes"
