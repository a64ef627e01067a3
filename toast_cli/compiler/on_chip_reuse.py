"""On-chip reuse: what one kernel makes and others read does not pass through device memory while it is small.

A part of the on-chip memory (128 MiB of CMEM or VMEM on TPUs) passes arrays from one kernel to the next. Up to
`Attained.kept_bytes` on one device an array that the program makes and does not keep is no memory traffic; arguments,
carries and results always are. Fitted to the cycles of whole programs that libtpu 0.0.42.1 compiled (`python
benchmarks/calibrate.py`). Without this pass all that kernels read and write is traffic.

Enters: a profile. Leaves: up to how many bytes an array stays on the chip.
"""

from __future__ import annotations

from toast_cli.compiler.profile import CompilerProfile

NAME = "on-chip-reuse"
NOTHING = -1.0  # less than any array has


def kept_bytes(profile: CompilerProfile) -> float:
    """Bytes of the largest array that stays on the chip between kernels."""
    return profile.attained.kept_bytes if NAME in profile.passes else NOTHING
