"""Writes StableHLO that Shardy partitions as planned.

Enters: a `Source` and a `PartitionedProgram`. Leaves: the bytes of a StableHLO file. XLA keeps shardings on arguments,
results and constraints, and drops those on other operations (docs/explanation/emitting.md), so constraints carry all
intermediate shardings.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from toast_cli.emit.constraints import Constraint, constraints_of
from toast_cli.emit.kernel_lines import kernel_lines
from toast_cli.emit.marks import Marks, argument_marks, pinned_marks
from toast_cli.emit.minimal import choose_marks
from toast_cli.emit.misread import in_regions
from toast_cli.emit.recheck import check_note
from toast_cli.emit.shardy import write_shardy
from toast_cli.emit.transposed import reduced_behind_transposes
from toast_cli.errors import UsageError
from toast_cli.frontend.nameless import regions_on
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding
from toast_cli.xla import ir

ANNOTATE = ("minimal", "full", "arguments")


@dataclass(frozen=True)
class Written:
    """A file's content, the constraints in it, and notes on deviations from the plan."""

    content: bytes
    constraints: tuple[Constraint, ...] = ()
    notes: tuple[str, ...] = ()


def emit_shardy(
    source: Source, lowered: PartitionedProgram, *, binary: bool = False, annotate: str = "minimal"
) -> bytes:
    """The program as StableHLO text (or MLIR bytecode) that partitions as in `lowered`.

    Args:
        annotate: "minimal" has the fewest constraints found under which Shardy's propagation reproduces the plan,
            "full" one on every value, "arguments" none: only arguments and results have shardings.

    Raises `UsageError` for another value.
    """
    with on_mesh(source, lowered), in_regions(source, lowered) as (source, lowered):
        lowered = reduced_behind_transposes(source, lowered)
        return write_shardy(source, lowered, shardy_marks(source, lowered, annotate), binary=binary)


def write_checked(
    source: Source, lowered: PartitionedProgram, *, binary: bool = False, annotate: str = "minimal"
) -> Written:
    """The output of `emit_shardy`, read again and checked, with its constraints."""
    kernels = kernel_lines(source, lowered)
    with on_mesh(source, lowered), in_regions(source, lowered) as (source, lowered):
        lowered = reduced_behind_transposes(source, lowered)
        marks, note, values = choose(source, lowered, annotate)
        content = write_shardy(source, lowered, marks, binary=binary)
        notes = (note, check_note(source, lowered, marks, content, settled=bool(values)))
        found = (*kernels, *constraints_of(source, lowered, marks))
        return Written(content, found, tuple(filter(None, notes)))


def on_mesh(source: Source, lowered: PartitionedProgram) -> AbstractContextManager[None]:
    """While the block runs, the program's manual regions on unnamed meshes name axes of this mesh."""
    return regions_on(source.module, lowered.axis_names, lowered.axis_sizes)


def shardy_marks(source: Source, lowered: PartitionedProgram, annotate: str = "minimal") -> Marks:
    """The marks to write. If few constraints do not suffice, every value has one."""
    return choose(source, lowered, annotate)[0]


def choose(source: Source, lowered: PartitionedProgram, annotate: str) -> tuple[Marks, str, dict[int, Sharding]]:
    """The marks; a note if they are not those requested; and the propagated shardings, if known."""
    if annotate == "full":
        return pinned_marks(source, lowered), "", {}
    if annotate == "arguments":
        return argument_marks(source, lowered), "", {}
    if annotate != "minimal":
        raise UsageError(f"unknown value {annotate!r}", where="--annotate", hint=f"choose from {', '.join(ANNOTATE)}")
    try:
        choice = choose_marks(source, lowered)
    except ir.MLIRError:  # a program that Shardy's passes refuse; XLA may still take it
        note = "Shardy's propagation refuses the program, so every value is constrained"
        return pinned_marks(source, lowered), note, {}
    if choice.unsettled:
        return pinned_marks(source, lowered), "no few constraints reproduce the plan, so every value is constrained", {}
    return choice.marks, "", choice.values
