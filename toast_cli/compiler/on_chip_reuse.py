"""On-chip reuse: small or brief arrays pass from one kernel to others without traffic to device memory.

A part of the on-chip memory (128 MiB of CMEM or VMEM on TPUs) passes arrays from one kernel to the next. A temporary of
up to `Attained.kept_bytes` on one device is no memory traffic; arguments, carries and results always are. On v5e larger
ones are none either if at most `Attained.passed_bytes` are written between the array's production and its last read,
itself included: the scores of an attention between two products, of 48 MiB. (In the slices of v4, v5p and v6e that were
compiled such arrays do pass through device memory.) Fitted to the cycles of whole programs that libtpu 0.0.42.1
compiled (`python benchmarks/calibrate.py`). Without this pass all reads and writes of kernels are traffic.

Enters: a program, its stored values, and a profile. Leaves: the largest array that stays on the chip, and the bytes
that each array counts for that.
"""

from __future__ import annotations

from itertools import accumulate

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Program
from toast_cli.program.ops import ARGUMENT

NAME = "on-chip-reuse"
NOTHING = -1.0  # less than any array has


def kept_bytes(profile: CompilerProfile) -> float:
    """Bytes of the largest array that stays on the chip between kernels."""
    return profile.attained.kept_bytes if NAME in profile.passes else NOTHING


def widths(program: Program, stored: list[bool], sizes: list[float], profile: CompilerProfile) -> list[float]:
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
