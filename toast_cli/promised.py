"""What a report promises, as plain data: the part of it that is compared with XLA's compiled program."""

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
