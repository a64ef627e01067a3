"""Loops last: what stands after a loop, does not need it and frees more than it writes runs before it.

XLA's schedulers do not keep the order of the program; of several schedules XLA takes the one that needs least memory.
The gradient of an output projection is the last to read the gradient of the logits, the sums over logits that a
training step reports are the last to read those. In programs that were HLO text (MaxText's training steps) they stand
after the backward loop over the layers, which would keep both meanwhile. In schedules of libtpu 0.0.42.1 for scanned
decoders the gradient comes first in 9 of 9, whatever the layers save. Without this pass everything runs where the
program has it.

Enters: a program and which values are written. Leaves: what runs as soon as what it reads is there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Program
from toast_cli.program.ops import ARGUMENT, REDUCE

NAME = "loops-last"


def before_loops(
    program: Program, stored: list[bool], waits: list[tuple[int, int]], profile: CompilerProfile
) -> set[int]:
    """Ops after a loop, independent of it, that free more than they write.

    waits: [values] the last two ops that end a kernel which reads each.
    """
    ends = sorted((loop.last, loop.first) for loop in program.loops if loop.parent < 0)
    if not ends or NAME not in profile.passes:
        return set()
    behind = [0] * len(program.values)  # the end of the last loop that each depends on
    over: dict[int, tuple[int, int]] = {}  # op -> the first loop that it stands after and does not depend on
    for number, op in enumerate(program.ops):
        latest = max((behind[v] for v in op.operands), default=0)
        if op.loop >= 0:
            latest = ends[bisect_right(ends, number, key=itemgetter(0))][0]
        elif op.results and op.kind.matrix_unit | (op.name == REDUCE):
            passed = bisect_left(ends, latest, key=itemgetter(1))
            if passed < len(ends) and ends[passed][0] <= number:
                over[number] = ends[passed]
        for value in op.results:
            behind[value] = latest
    gains = dict.fromkeys(over, 0)
    for value, (reader, other) in enumerate(waits):
        made = program.producer[value]
        if not stored[value] or reader not in over or program.ops[made].name == ARGUMENT:
            continue
        if made < over[reader][1] and (other in over or other < over[reader][1]):
            gains[reader] += program.values[value].bytes
    sizes = [value.bytes for value in program.values]
    return {op for op, gain in gains.items() if gain > sum(sizes[v] for v in program.ops[op].results)}
