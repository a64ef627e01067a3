"""What a plan promised: what `toast verify` and the like hold XLA to. `toast_cli.report.promises` reads it from a
stored report."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PromisedCollective:
    """As the chip's compiler emits it; `written_kind`, `written_bytes` as the partitioner writes it, where that
    differs."""

    kind: str  # all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute
    axes: list[str]
    bytes: int  # of the result, per device, one run
    count: float  # loops counted; a collective in one of n branches counts 1/n
    seconds: float  # all of them
    location: str
    written_kind: str = ""
    written_bytes: int = 0
    by_hand: bool = False  # the program does it itself

    def as_written(self) -> PromisedCollective:
        """What the partitioner writes, before the chip's compiler reworks it."""
        if not self.written_kind:
            return self
        return replace(self, kind=self.written_kind, bytes=self.written_bytes, written_kind="", written_bytes=0)


@dataclass(frozen=True)
class Promises:
    """axes: the mesh, name -> size. Bytes per device. fits: whether the plan was said to stay within `limit_bytes`.
    machine: name of the mesh specification that was planned for; empty where it is not known. host_bytes: in the host's
    memory. fit: whether it fits, "yes", "unsure" or "no"."""

    axes: dict[str, int]
    collectives: list[PromisedCollective]
    peak_bytes: int
    argument_bytes: int
    limit_bytes: int
    fits: bool
    machine: str = ""
    host_bytes: int = 0
    fit: str = "yes"
