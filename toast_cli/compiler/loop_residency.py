"""Loop residency: arrays that every iteration of a loop reads whole stay in on-chip memory throughout the loop.

XLA:TPU's memory-space assignment brings weights that a loop reads, and what it carries from one iteration to the next
(states, gradients being added up), into on-chip memory before the loop and leaves them there: a recurrence over time
reads its weights from device memory once and not at every step. It converts f32 weights that only products read to
bf16 before the loop. Sliced arrays (the weights of one layer, one step of a sequence) only pass through. Seen in scans
over time compiled by libtpu 0.0.42.1 for v4, v5e and v6e, whose loops carry such arrays in memory space 1 (3 on v4).
Reading there takes time, too (`OnChip.speed`). If a loop has more such arrays than fit, none counts as staying:
decoding loops over large models read their weights from device memory. Without this pass every loop does.

Enters: a program, and the bytes of its arrays. Leaves: for each loop the arrays that it keeps, and their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from toast_cli.compiler import product_operands
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import CARRY

NAME = "loop-residency"
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
    """The arrays that loops keep on the chip. sizes: [values] bytes in memory."""
    parts: dict[tuple[int, int], float] = {}
    totals = [0.0] * len(program.loops)
    if NAME in profile.passes and profile.on_chip.speed:
        narrow = profile.product_bits / 32 if product_operands.NAME in profile.passes else 1.0
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
    found = set()
    for user, position in program.users[value]:
        op = program.ops[user]
        if op.loop == OUTSIDE or op.name == CARRY:
            continue
        if op.loop != maker.loop or maker.name == CARRY:
            if position == 0 and op.kind.updates:
                return set()
            if position or not op.kind.takes_part:
                found.add(op.loop)
    return found


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
