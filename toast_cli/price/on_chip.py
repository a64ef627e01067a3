"""On-chip memory: arrays that XLA:TPU keeps in CMEM or VMEM.

Seen in programs and in dumps of memory-space assignment of libtpu 0.0.42.1 for v4, v5e, v5p and v6e.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from toast_cli.hardware import Chip, Mesh
from toast_cli.hardware.topology import divisors
from toast_cli.price.cost import Alive, kernel_seconds
from toast_cli.price.kernel import Kernel, arithmetic
from toast_cli.price.layouts import tile_of
from toast_cli.price.liveness import Interval
from toast_cli.price.profile import CompilerProfile, OnChip
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ARGUMENT, CARRY, RESULT

_KEPT = frozenset({CARRY, RESULT})  # their operands are in device memory


class OnChipMemory:
    """On-chip memory of each device of a problem.

    XLA:TPU's memory-space assignment runs after scheduling and gives on-chip memory to the arrays that gain most by it,
    so long as they fit beside those that are there and do not wait too long: from the kernel that makes an array to the
    last that reads it, no more time may pass than it takes to fill that memory a few times over. Loop carries and
    results of the program stay in device memory. Which eligible arrays are placed is hard to predict, but with enough
    of them on-chip memory is nearly full. So of the *brief* temporaries that are alive at one moment, up to
    `OnChip.bytes * OnChip.filled` take no device memory. Time is that of the program's kernels on one device over the
    number of devices, so that brief arrays are known before any plan is.

    capacity: bytes of temporaries in it at once; 0 if unknown for the chip. largest: bytes of the largest array that
    fits.
    """

    def __init__(self, program: Program, mesh: Mesh, profile: CompilerProfile, elapsed: NDArray[np.float64]) -> None:
        self._program, self._elapsed = program, elapsed.tolist()
        given = profile.on_chip if "memory-space-assignment" in profile.passes else OnChip()
        self.capacity, self.largest = float(round(given.bytes * given.filled)), given.bytes
        self._longest = given.refills * self.largest / mesh.chip.memory_bytes_per_second * mesh.devices

    def may_hold(self, value: int) -> bool:
        """Whether the value itself may be there."""
        program = self._program
        maker, readers = program.ops[program.producer[value]].name, program.users[value]
        return maker not in (ARGUMENT, CARRY) and all(program.ops[op].name not in _KEPT for op, _ in readers)

    def brief(self, interval: Interval) -> bool:
        """Whether an array with this live interval is brief enough to stay there."""
        first, last = interval
        elapsed: list[float] = self._elapsed
        return elapsed[last + 1] - elapsed[first + 1] <= self._longest

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
    """[ticks] seconds since the start on one device; within a loop those of its first iteration, after it those of
    all.

    times: [ops] tick at which each runs.
    """
    own = np.zeros(2 * len(program.ops) + 3)
    for op, kernel, time in zip(program.ops, kernels, times, strict=True):
        if kernel is not None:
            own[time + 1] += _seconds(program, chip, profile, op, kernel)
    for loop in sorted(program.loops, key=lambda loop: loop.last - loop.first):
        own[2 * loop.last] += (max(loop.trips, 1) - 1) * own[2 * loop.first : 2 * loop.last].sum()
    return np.cumsum(own)


def drop_early_fetches(
    kernels: list[Kernel | None], times: list[int], elapsed: NDArray[np.float64], chip: Chip
) -> None:
    """Resets `KernelSide.fetched` where too little time passes before a kernel for fetching what it reads.

    Outside loops XLA:TPU copies arguments into on-chip memory while earlier kernels run, whole or in pieces, also those
    that an update changes in place. The products that read them there do not wait for device memory. Copies take its
    full rate, which kernels do not reach, and a step that is bound by memory, such as a decode step, takes as long as
    all copies. Seen in decode steps of dense decoders compiled by libtpu 0.0.42.1 for v5e and v6e (`python -m
    benchmarks.decoding`). In loops over layers nothing is fetched ahead.

    Args:
        kernels: [ops] of whole arrays. times: [ops] tick at which each runs. elapsed: [ticks] see `elapsed_seconds`.
    """
    for kernel, time in zip(kernels, times, strict=True):
        for side in kernel.operands if kernel else ():
            if side.fetched > elapsed[time] * chip.memory_bytes_per_second:
                side.fetched = 0


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


_NOTHING = -1.0  # less than any array has


def kept_bytes(profile: CompilerProfile) -> float:
    """Bytes of the largest array that stays on the chip between kernels.

    A temporary of up to `Attained.kept_bytes` on one device is no memory traffic; arguments, carries and results always
    are. On v5e larger ones are none either if at most `Attained.passed_bytes` are written between the array's
    production and its last read, itself included: the scores of an attention between two products, of 48 MiB. Fitted to
    the cycles of whole programs (`python benchmarks/calibrate.py`).
    """
    return profile.attained.kept_bytes if "on-chip-reuse" in profile.passes else _NOTHING


def reuse_widths(program: Program, stored: list[bool], sizes: list[float], profile: CompilerProfile) -> list[float]:
    """[values] bytes that count against `kept_bytes` for each whole array. sizes: [values] bytes in memory."""
    passed, kept = profile.attained.passed_bytes, profile.attained.kept_bytes
    if not passed:
        return sizes
    written = (
        0.0 if op.name == ARGUMENT else sum([sizes[value] for value in op.results if stored[value]])
        for op in program.ops
    )
    before = list(accumulate(written, initial=0.0))
    lasts = ([user for user, _ in users[-1:]] for users in program.users)
    flows = (
        before[max([maker, *last]) + 1] - before[maker] for maker, last in zip(program.producer, lasts, strict=True)
    )
    return [min(size, flow * kept / passed) for size, flow in zip(sizes, flows, strict=True)]


OUTSIDE = -1


@dataclass(frozen=True)
class LoopResidency:
    """Which arrays stay on the chip while loops run.

    Attributes:
        parts: (value, loop) -> fraction of its bytes that is there, for each array a loop keeps.
        totals: [loops] bytes of all of them, of whole arrays.
    """

    parts: dict[tuple[int, int], float]
    totals: list[float]

    def of_read(self, value: int, reader: Op) -> tuple[float, float]:
        """(fraction of an array's bytes that a use reads from on-chip memory, bytes of all arrays there); zeros if it
        is not there."""
        part = self.parts.get((value, reader.loop), 0.0)
        return (part, self.totals[reader.loop]) if part else (0.0, 0.0)

    def of_yield(self, program: Program, value: int) -> tuple[float, float]:
        """The same for a loop's yield."""
        for user, position in program.users[value]:
            op = program.ops[user]
            if op.name == CARRY and position == 1:
                return self.of_read(op.results[0], op)
        return 0.0, 0.0


def loop_residency(
    program: Program, stored: list[bool], sizes: list[float], free: tuple[bool, ...], profile: CompilerProfile
) -> LoopResidency:
    """The arrays that loops keep on the chip. sizes: [values] bytes in memory.

    XLA:TPU brings weights that a loop reads, and what it carries from one iteration to the next (states, gradients
    being added up), into on-chip memory before the loop and leaves them there; f32 weights that only products read are
    converted to bf16 before. Sliced arrays (the weights of one layer, one step of a sequence) only pass through.
    Reading there takes time, too (`OnChip.speed`). If a loop has more such arrays than fit, none counts as staying:
    decoding loops over large models read their weights from device memory. Seen in scans over time for v4, v5e and v6e.
    """
    parts: dict[tuple[int, int], float] = {}
    totals = [0.0] * len(program.loops)
    if "loop-residency" in profile.passes and profile.on_chip.speed:
        narrow = profile.product_bits / 32 if "product-operands" in profile.passes else 1.0
        for value, kept in enumerate(stored):
            if kept and not free[value]:
                for loop in _keeping(program, value):
                    part = narrow if _only_multiplied(program, value, loop) else 1.0
                    parts[value, loop] = part
                    totals[loop] += part * sizes[value]
    return LoopResidency(parts, totals)


def _keeping(program: Program, value: int) -> set[int]:
    """Loops that read the whole array in each iteration, where it is loop-invariant or carried."""
    maker = program.ops[program.producer[value]]
    loops = set()
    for user, position in program.users[value]:
        op = program.ops[user]
        if op.loop == OUTSIDE or op.name == CARRY:
            continue
        if op.loop != maker.loop or maker.name == CARRY:
            if position == 0 and op.kind.updates:
                return set()
            if position or not op.kind.takes_part:
                loops.add(op.loop)
    return loops


def _only_multiplied(program: Program, value: int, loop: int) -> bool:
    """Whether only contractions read a loop-invariant f32 array in a loop, perhaps rearranged."""
    maker = program.ops[program.producer[value]]
    if program.values[value].dtype != "f32" or maker.name == CARRY:
        return False
    waiting = [value]
    while waiting:
        for user, _ in program.users[waiting.pop()]:
            op = program.ops[user]
            if op.loop != loop:
                continue
            if op.kind.rearranges:
                waiting.extend(op.results)
            elif not op.kind.matrix_unit:
                return False
    return True


BUFFERED = 3  # windows that a kernel holds in its own memory at once


def has_small_windows(profile: CompilerProfile, rows: float, columns: float, bits: int) -> bool:
    """Whether a product that accumulates into [rows, columns] elements of `bits` bits is compiled with small windows.

    The gradient of a recurrence's weights is read and written in every step of the loop. XLA:TPU divides it into the
    fewest equal windows of whole tiles, of at most `OnChip.window_bytes`. Three of them must fit into a kernel's
    scratch memory; otherwise XLA recompiles the kernel with small windows (`retry_count` in its text), which are six
    times slower, as slow as elementwise work on the same bytes. So 1024 x 4096 and 2048 x 8192 elements are added to at
    5.5 TB/s on v5e, and 1536 x 4096 at 0.9. 100 of 103 shapes compiled for v5e follow this rule (`python -m
    benchmarks.singles` has some); v4 and v5p have no such effect, and on v6e windows cost less.
    """
    most, own = profile.on_chip.window_bytes, profile.on_chip.own_bytes
    if "accumulator-windows" not in profile.passes or not most:
        return False
    tile = tile_of(profile)
    tiles = ceil(rows / tile[0]), ceil(columns / tile[1])
    size = tiles[0] * tiles[1] * tile[0] * tile[1] * bits / 8
    return size > own and BUFFERED * size / _fewest_pieces(tiles, size / most) > own


def _fewest_pieces(tiles: tuple[int, int], least: float) -> float:
    """The least number of equal pieces, at least `least`, into which the tiles divide."""
    counts = (rows * columns for rows in divisors(tiles[0]) for columns in divisors(tiles[1]))
    return min((count for count in counts if count >= least), default=inf)
