"""What a report promises, as plain data: its collectives and constraints, which other steps make or compare with XLA's
compiled program."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class CollectiveFacts:
    """A collective as the chip's compiler emits it; `written_kind`, `written_bytes` as the partitioner writes it, if
    that differs. by_hand: the program states it in a manual region; it exists under every plan."""

    kind: str  # all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute
    axes: list[str]  # or ["groups of 2"], where the devices that communicate are not those along axes
    bytes: int  # of the result, per device, one run
    count: float  # loops counted; a collective in one of n branches counts 1/n
    seconds: float  # all of them
    location: str
    written_kind: str = ""
    written_bytes: int = 0
    by_hand: bool = False

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
