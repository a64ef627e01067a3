"""StableHLO that partitions as planned under Shardy.

Enters: a `Source` and a `LoweredPlan`. Leaves: the bytes of a StableHLO file. XLA keeps shardings on arguments, results and constraints, and
drops those on other operations (docs/emitting.md), so constraints carry everything in between.
"""

from __future__ import annotations

from toast_cli.emit.marks import Marks, argument_marks, pinned_marks
from toast_cli.emit.minimal import choose_marks
from toast_cli.emit.settle import settled
from toast_cli.emit.shardy import write_shardy
from toast_cli.errors import UsageError
from toast_cli.frontend.source import Source
from toast_cli.plan.lowered import LoweredPlan
from toast_cli.xla import ir

ANNOTATE = ("minimal", "full", "arguments")


def emit_shardy(source: Source, lowered: LoweredPlan, *, binary: bool = False, annotate: str = "minimal") -> bytes:
    """The program as StableHLO text (or MLIR bytecode) that partitions as `lowered` says.

    Args:
        annotate: "minimal" has the fewest constraints found under which Shardy's propagation reproduces the plan, "full" one
            on every value, "arguments" none: shardings on arguments and results, and the rest is up to the compiler.

    Raises `UsageError` for another value.
    """
    lowered = settled(source.program, lowered)
    return write_shardy(source, lowered, shardy_marks(source, lowered, annotate), binary=binary)


def shardy_marks(source: Source, lowered: LoweredPlan, annotate: str = "minimal") -> Marks:
    """The places that carry a sharding. Where few do not suffice, every value has one."""
    if annotate == "full":
        return pinned_marks(source, lowered)
    if annotate == "arguments":
        return argument_marks(source, lowered)
    if annotate != "minimal":
        raise UsageError(f"unknown value {annotate!r}", where="--annotate", hint=f"choose from {', '.join(ANNOTATE)}")
    try:
        choice = choose_marks(source, lowered)
    except ir.MLIRError:  # a program that Shardy's passes refuse; XLA may still take it
        return pinned_marks(source, lowered)
    return pinned_marks(source, lowered) if choice.unsettled else choice.marks
