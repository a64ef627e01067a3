"""Reduction combining: reductions of one kind that nothing waits for become one collective and share its latency.

XLA merges collectives of one kind and group, none of which needs another's result, into one of about
`CompilerProfile.combined_bytes`: XLA:TPU (libtpu 0.0.42.1) made one of 20 all-reduces of 128 KiB, and one of 12 of 4
MiB. It does not merge across the iterations of a loop. Without this pass each reduction pays the whole latency.

Enters: a profile. Leaves: into collectives of how many bytes late reductions go.
"""

from __future__ import annotations

from toast_cli.compiler.profile import CompilerProfile

NAME = "reduction-combining"


def combined_bytes(profile: CompilerProfile) -> float:
    """Bytes of the collective that small reductions become part of; 0 where each stays alone."""
    return profile.combined_bytes if NAME in profile.passes else 0.0
