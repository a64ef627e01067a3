"""Reduction combining: reductions of one kind that do not need one another become one collective and share its latency.

XLA merges collectives of one kind, type and group, none of which needs another's result, into one of about
`CompilerProfile.combined_bytes`, within one computation (not across a loop's iterations). Outside of loops all that
nothing waits for become one: XLA:TPU (libtpu 0.0.42.1) made one of 20 all-reduces of 128 KiB, and one of 12 of 4 MiB.
Other all-reduces are combined if they are on one level: both sums of a batch normalisation, with those of a residual
block's shortcut; the gradients of a layer in a loop over layers. Reductions over the same dimensions are on one level
if the longest paths to them have equally many reductions, counting late ones separately; XLA may find more independent
ones. Of a ResNet's 105 all-reduces under data parallelism on v5e-16 XLA:TPU makes 27. Reduce-scatters that something
waits for, or in loops, stay alone: those of a GRU's three gates, whose units are split, do. Without this pass each
reduction pays the whole latency.

Enters: a program, the reduced dimensions of its ops, and a profile. Leaves: the fraction of a collective's latency that
a reduction pays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Program
from toast_cli.program.regions import loop_at

NAME = "reduction-combining"

# What an op reduces over, its loop and branches, whether nothing waits for it, number of reductions before it.
_Place = tuple[Hashable | None, int, tuple[int, ...], bool, int]


def shares(
    program: Program, over: Sequence[Hashable | None], late: Sequence[bool], profile: CompilerProfile
) -> list[float]:
    """[ops] share of each reduction in the collective it is combined into, ignoring size limits; 1 if it is not
    combined, 0 if it is combined with all that nothing waits for.

    Args:
        over: [ops] what an op reduces over, and how; None if it does not reduce. late: [ops] whether nothing waits for
            it.
    """
    if NAME not in profile.passes:
        return [1.0] * len(program.ops)
    producer = program.producer
    before = [0] * len(program.ops)  # [ops] reductions of the same lateness on the longest path to it, itself included
    places: dict[int, _Place] = {}
    for number, op in enumerate(program.ops):
        longest, last, one = 0, late[number], over[number]
        for value in op.operands:
            maker = producer[value]  # may be a later op, for a carry; counts as 0 then
            if before[maker] > longest and late[maker] == last:
                longest = before[maker]
        before[number] = longest if one is None else longest + 1
        if one is not None:
            places[number] = one, loop_at(program, number, 0), op.branches, last, before[number]
    level = Counter(places.values())
    # Loop-carried sums are reduced after their loops, although the carry itself reduces nothing.
    at_end = [last and loop_at(program, number, 0) < 0 for number, last in enumerate(late)]
    return [0.0 if at_end[n] else 1.0 / level[places[n]] if n in places else 1.0 for n in range(len(program.ops))]


def latency_part(kind: str, size: float, share: float, profile: CompilerProfile) -> float:
    """Fraction of a collective's latency that a reduction of `size` bytes pays, given its share in the combined
    collective, whose size is limited.

    Args:
        kind: of the collective. share: see `shares`.
    """
    if NAME not in profile.passes or (share and kind != "all-reduce"):
        return 1.0
    return min(1.0, max(share, size / profile.combined_bytes))
