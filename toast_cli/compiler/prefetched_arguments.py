"""Prefetched arguments: arguments that fit on the chip are copied there ahead of their readers, and results are copied
back after their producers.

XLA:TPU's memory-space assignment copies arguments into on-chip memory during earlier kernels, and results from there
during later ones, as far as they fit. An optimiser's update then takes that memory's rate: on v5e 33 to 42 cycles for
1,024 elements of Adam's seven arrays, and 61 to 72 if they are in device memory. All arguments are assumed to be split
like the one at hand; they share `OnChip.ahead` of that memory, so that a larger fraction of a smaller program fits.
Seen outside of loops, in training steps of a dozen small networks and recurrences compiled by libtpu 0.0.42.1 for v5e.
(The compiler's cycles leave such copies out, so where nothing but updates runs a
step takes longer.) Without this pass arguments and results are traffic.

Enters: a profile, and the bytes of all arguments. Leaves: the fraction of them that is on the chip.
"""

from __future__ import annotations

from toast_cli.compiler.profile import CompilerProfile

NAME = "prefetched-arguments"


def part_ahead(profile: CompilerProfile, argument_bytes: int) -> float:
    """Fraction of arguments and results that is in on-chip memory if they are unsplit; with n shards n times that, up
    to 1. argument_bytes: of all arguments, whole."""
    if NAME not in profile.passes or not profile.on_chip.vector_speed:
        return 0.0
    return profile.on_chip.ahead * profile.on_chip.bytes / max(argument_bytes, 1)
