"""The results of the cost model for one plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from toast_cli.hardware.device_groups import groups_name
from toast_cli.plan.partitioned import Reason

BY_HAND: Final = "by hand"
INSIDE: Final = "inside"
ITSELF: Final = "itself"


@dataclass(frozen=True, slots=True)
class Attained:
    """The rates that kernels attain of a chip's published peaks; the default is an ideal chip.

    Attributes:
        matrix, vector, memory: fractions of the peak rates that large, well-shaped kernels reach. elementwise: fraction
            of memory bandwidth for kernels without a contraction; 0: `memory`.
        pass_bytes: least memory traffic counted for each element of the largest array that a vector kernel reads, in
            any memory.
        narrow_write: factor on the bytes written of an array with less than 4 bytes an element (packing). kept_bytes:
        an array up to this size that one kernel makes and others read stays in on-chip memory, and is no memory
        traffic. passed_bytes: nor is a larger array, if at most this much is written between its production and its
        last read; 0: it is.
        kernel_seconds: overhead of starting and draining one kernel.
        hand_written: fraction of the matrix unit's peak rate that hand-written attention kernels reach (Pallas, cuDNN).
        multiprocessors: number that share the tiles of a product's result, see `matrix_unit`; 0: there is one matrix
        unit. separate: nothing of the next kernel is loaded while one computes, see `roofline`.
    """

    matrix: float = 1.0
    vector: float = 1.0
    memory: float = 1.0
    elementwise: float = 0.0
    pass_bytes: float = 0.0
    narrow_write: float = 1.0
    kept_bytes: float = 0.0
    passed_bytes: float = 0.0
    kernel_seconds: float = 0.0
    hand_written: float = 1.0
    multiprocessors: int = 0
    separate: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one run of the program on one device, in seconds and bytes."""

    compute_seconds: float
    communication_seconds: float
    peak_bytes: float
    argument_bytes: float
    # [axes] seconds of the collectives that run over each, alone or with others; empty where no goal asks for it.
    axis_seconds: tuple[float, ...] = ()
    transfer_seconds: float = 0.0
    """Seconds of transfers between device and host memory, which XLA overlaps with compute."""
    # Seconds that communication adds to compute as the compiler schedules it, and if all kinds overlapped with compute;
    # None where the schedule is not simulated, see `Evaluator.cost`.
    exposed_seconds: float | None = None
    least_exposed_seconds: float | None = None

    @property
    def busy_seconds(self) -> float:
        """Compute, or the overlapped transfers if these take longer."""
        return max(self.compute_seconds, self.transfer_seconds)

    @property
    def step_seconds(self) -> float:
        """The expected step: compute plus the communication that the compiler does not overlap (`cost.overlap`).
        Where the schedule is not simulated, `most_seconds`."""
        return self.most_seconds if self.exposed_seconds is None else self.busy_seconds + self.exposed_seconds

    @property
    def most_seconds(self) -> float:
        """Compute plus all communication, neither overlapped: the upper bound."""
        return self.busy_seconds + self.communication_seconds

    @property
    def least_seconds(self) -> float:
        """The step if the compiler overlapped every kind of collective with compute: the lower bound."""
        return self.busy_seconds + (self.least_exposed_seconds or 0.0)


@dataclass(frozen=True, slots=True)
class CollectiveUse:
    """One collective of a plan, equal ones merged.

    Attributes:
        kind, axes, bytes: as the chip's compiler emits it (see `reduce_scatter`); bytes of the result on one device.
        count: runs in one run of the program, loops counted. seconds: of all of them.
        op: the op that needs or makes the array. value: the array.
        waited_for: it is on the critical path, see `early_values`.
        written: kind and bytes as the partitioner writes it, before the chip's compiler changes it.
        reason: why it is there, see `plan.partitioned`; "by hand": the user wrote it in a manual region; "inside": the
            partitioner adds it in one, along axes that are left to it; "itself": the op is it, in the program of one
            device.
        group: devices in each group where the groups are not those along whole axes, else 0; `axes` are then those that
            the groups span.
        place: location in the module of its op, for one in a manual region.
    """

    kind: str
    axes: tuple[int, ...]
    bytes: float
    count: float
    seconds: float
    op: int
    value: int
    waited_for: bool
    written: tuple[str, float]
    reason: Reason | Literal["by hand", "inside", "itself"]
    group: int = 0
    place: str = ""

    def over(self, names: tuple[str, ...]) -> list[str]:
        """The axes it runs over, by name, or the size of its device groups."""
        return [groups_name(self.group)] if self.group else [names[axis] for axis in self.axes]


@dataclass(frozen=True, slots=True)
class Alive:
    """One array alive at the peak; role is "argument", "temporary", "carry", "gathered" or "partial", or "inside": all
    that is alive in the manual region that makes it."""

    value: int
    bytes: float
    role: str


@dataclass(frozen=True, slots=True)
class KernelUse:
    """Equal kernels on one device, with all their runs.

    Attributes:
        ops: the ops they belong to. name: of each. runs: executions in one run of the program.
        flops, bytes: flops, and bytes read and written, of all runs. seconds: of all runs.
        inside: they are in the manual region that the op is.
    """

    ops: tuple[int, ...]
    name: str
    runs: float
    flops: float
    bytes: float
    seconds: float
    inside: bool = False

    @property
    def op(self) -> int:
        """The first of the ops, which stands for all."""
        return self.ops[0]
