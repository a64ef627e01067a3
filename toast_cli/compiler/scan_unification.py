"""Scan unification: the stacked result of a scan within a loop reuses the buffer of the array it scans over.

A decoding loop carries a cache of all layers; its body scans over the layers, reads one slice of the cache in each
iteration and stacks the new slices to the next cache. XLA writes them in place (its pass
`ScanLoopAccumulatorInputUnification`) if the outer loop yields the stack as the next value of the scanned array, and
only the scan reads that.

Enters: a program. Leaves: the carries of inner loops that need no buffer of their own. Without this pass all of them
have one.
"""

from __future__ import annotations

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Program
from toast_cli.program.ops import CARRY, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE
from toast_cli.program.rematerialised import expands_scalar

NAME = "scan-unification"


def unified_carries(program: Program, profile: CompilerProfile) -> frozenset[int]:
    """Op numbers of `toast.carry` ops that share the buffer of the outer loop's carry."""
    if NAME not in profile.passes:
        return frozenset()
    return frozenset(
        number for number, op in enumerate(program.ops) if op.name == CARRY and _is_unified(program, number)
    )


def _is_unified(program: Program, number: int) -> bool:
    op = program.ops[number]
    (stack,), loop = op.results, program.loops[op.loop]
    init = program.ops[program.producer[op.operands[0]]]
    if loop.parent < 0 or not (init.kind.source or expands_scalar(init, program)):
        return False
    inside = [use for use in program.users[stack] if loop.first <= use[0] < loop.last]
    after = [use for use in program.users[stack] if use not in inside]
    update = program.producer[op.operands[1]]
    if program.ops[update].name != DYNAMIC_UPDATE_SLICE or inside != [(update, 0)] or len(after) != 1:
        return False
    (around, position) = after[0]
    if program.ops[around].name != CARRY or position != 1 or program.ops[around].loop != loop.parent:
        return False
    (scanned,), outer = program.ops[around].results, program.loops[loop.parent]
    reads = [use for use in program.users[scanned] if outer.first <= use[0] < outer.last]
    return program.values[scanned] == program.values[stack] and all(
        loop.first <= reader < loop.last and program.ops[reader].name == DYNAMIC_SLICE and place == 0
        for reader, place in reads
    )
