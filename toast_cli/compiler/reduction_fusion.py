"""Reduction fusion: a reduction is merged into another kernel that has its operand in registers.

That is the kernel that makes the operand, if the reduction's other operands are available by then (unlike a variance
that needs the mean, or a softmax's sum that needs the largest element), or one that reads the operand together with the
reduction's result, the largest element. The reduction then reads nothing itself. Seen in programs compiled by libtpu
0.0.42.1 for v4 to v6e, where XLA calls it multi-output fusion, too. Without this pass every reduction reads its operand
from memory.

Enters: the kernels of a program. Leaves: the same kernels, with those of merged reductions marked.
"""

from __future__ import annotations

from toast_cli.compiler import library_products, normalization_fusion
from toast_cli.compiler.kernel import Kernel
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Program
from toast_cli.program.ops import REDUCE

NAME = "reduction-fusion"
FAR = 300  # ops after which one array is assumed to depend on the other


def let_reductions_ride(
    program: Program, found: list[Kernel | None], reads: dict[int, set[int]], profile: CompilerProfile
) -> None:
    """Marks the kernels of reductions that are merged into others. found: [ops] the kernels. reads: last op of a kernel
    -> values it reads from memory."""
    alone = library_products.NAME in profile.passes
    with_largest = normalization_fusion.NAME not in profile.passes
    readers: dict[int, list[int]] = {}
    for end, values in reads.items():
        for value in values:
            readers.setdefault(value, []).append(end)
    for number, values in reads.items():
        op, kernel = program.ops[number], found[number]
        if kernel is None or op.name != REDUCE or not values:
            continue
        largest = max(values, key=lambda v: (program.values[v].bytes, v))
        maker = program.ops[program.producer[largest]]
        made_here = program.producer[largest] in reads and maker.loop == op.loop and maker.name != REDUCE
        made_here = made_here and not (alone and maker.kind.matrix_unit)
        at_once = made_here and not any(_follows(program, value, largest) for value in values - {largest})
        largest_found = with_largest and op.detail == "maximum"
        if at_once or (largest_found and any(op.results[0] in reads[r] for r in readers[largest])):
            kernel.rides = True
            for side in kernel.operands:
                side.bytes = side.elements = side.largest = side.passing = side.given = 0
                side.staying = 0.0


def _follows(program: Program, value: int, first: int) -> bool:
    """Whether an array depends on another one, `first`."""
    seen: set[int] = set()
    maker, pending = program.producer[first], [value]
    while pending:
        number = program.producer[pending.pop()]
        if number == maker or len(seen) > FAR:
            return True
        if number > maker and number not in seen:
            seen.add(number)
            pending.extend(program.ops[number].operands)
    return False
