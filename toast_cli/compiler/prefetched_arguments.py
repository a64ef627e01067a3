"""Prefetched arguments: what fits on the chip is copied there ahead of the kernels that read it, and results after
those that make them.

XLA:TPU's memory-space assignment copies arguments into on-chip memory beside earlier kernels, and results from there
beside later ones, as far as they fit. An optimiser's update then takes that memory's rate: on v5e 33 to 42 cycles for
1,024 elements of Adam's seven arrays, and 61 to 72 where they lie in device memory. All arguments are taken to be split
as the one at hand; `OnChip.ahead` of that memory is for them, so that the smaller the program, the more of it is there.
Seen outside of loops, in training steps of a dozen small networks and recurrences compiled by libtpu 0.0.42.1 for v5e.
(The compiler's cycles leave such copies out, so where nothing but updates runs a
step takes longer.) Without this pass arguments and results are traffic.

Enters: a profile, and how many bytes all arguments take. Leaves: which part of them is there on one device.
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
