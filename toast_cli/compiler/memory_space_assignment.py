"""Memory-space assignment: small temporaries that are read soon are in on-chip memory instead of device memory.

XLA:TPU's memory-space assignment runs after scheduling and gives on-chip memory (CMEM on v4, VMEM on others) to the
arrays that gain most by it, so long as they fit beside those that are there and do not wait too long: from the kernel
that makes an array to the last that reads it, no more time may pass than it takes to fill that memory a few times over.
Loop carries and results of the program stay in device memory. Which eligible arrays are placed is hard to predict, but
with enough of them on-chip memory is nearly full. So of the *brief* temporaries that are alive at one moment, up to
`OnChip.bytes * OnChip.filled` take no device memory.

Time is that of the program's kernels on one device over the number of devices: the same for all plans, so that brief
arrays are known before any plan is. A plan that splits less work has longer lives, but its arrays are too large as
well.

Enters: a problem, its kernels and their times, and the arrays alive. Leaves: the brief intervals, and the arrays that
remain in device memory. Without this pass all of it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from toast_cli.compiler.kernel import Kernel
from toast_cli.compiler.kernels import arithmetic
from toast_cli.compiler.liveness import Interval
from toast_cli.compiler.profile import CompilerProfile, OnChip
from toast_cli.cost.model import Alive
from toast_cli.cost.roofline import kernel_seconds
from toast_cli.hardware import Chip
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ARGUMENT, CARRY, RESULT

NAME = "memory-space-assignment"
_KEPT = frozenset({CARRY, RESULT})  # their operands are in device memory


class OnChipMemory:
    """On-chip memory of each device of a problem.

    capacity: bytes of temporaries in it at once; 0 if unknown for the chip. largest: bytes of the largest array that
    fits.
    """

    def __init__(
        self, program: Program, chip: Chip, profile: CompilerProfile, devices: int, elapsed: NDArray[np.float64]
    ) -> None:
        self._program, self._elapsed = program, elapsed
        given = profile.on_chip if NAME in profile.passes else OnChip()
        self.capacity, self.largest = float(round(given.bytes * given.filled)), given.bytes
        self._longest = given.refills * self.largest / chip.memory_bytes_per_second * devices

    def may_hold(self, value: int) -> bool:
        """Whether the value itself may be there."""
        program = self._program
        maker, readers = program.ops[program.producer[value]].name, program.users[value]
        return maker not in (ARGUMENT, CARRY) and all(program.ops[op].name not in _KEPT for op, _ in readers)

    def brief(self, interval: Interval) -> bool:
        """Whether an array with this live interval is brief enough to stay there."""
        first, last = interval
        return bool(self._elapsed[last + 1] - self._elapsed[first + 1] <= self._longest)

    def left(self, alive: Iterable[tuple[Alive, bool]]) -> Iterator[Alive]:
        """The arrays that remain in device memory at one moment; of brief ones the largest are placed on the chip
        first. alive: (array, whether it is brief)."""
        room = self.capacity
        for array, brief in sorted(alive, key=lambda pair: -pair[0].bytes):
            there = min(room, array.bytes) if brief else 0.0
            room -= there
            if there < array.bytes:
                yield replace(array, bytes=array.bytes - there)


def elapsed_seconds(
    program: Program, chip: Chip, profile: CompilerProfile, kernels: list[Kernel | None], times: list[int]
) -> NDArray[np.float64]:
    """[half steps] seconds since the start on one device; within a loop those of its first iteration, after it those of
    all.

    times: [ops] half step at which each runs.
    """
    own = np.zeros(2 * len(program.ops) + 3)
    for op, kernel, time in zip(program.ops, kernels, times, strict=True):
        if kernel is not None:
            own[time + 1] += _seconds(program, chip, profile, op, kernel)
    for loop in sorted(program.loops, key=lambda loop: loop.last - loop.first):
        own[2 * loop.last] += (max(loop.trips, 1) - 1) * own[2 * loop.first : 2 * loop.last].sum()
    return np.cumsum(own)


def _seconds(program: Program, chip: Chip, profile: CompilerProfile, op: Op, kernel: Kernel) -> float:
    """Seconds of one kernel on whole arrays, without tile padding."""
    sides, attained = (*kernel.operands, *kernel.results), profile.attained
    moved, vector, own = (
        sum(s.bytes + s.read for s in sides),
        sum(s.flops for s in sides),
        arithmetic(program, op, profile),
    )
    if op.kind.matrix_unit:
        return kernel_seconds(chip, attained, program.values[op.operands[0]].dtype, own, vector, moved)
    return kernel_seconds(chip, attained, "", 0.0, vector + own, moved)
