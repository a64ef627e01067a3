"""Writes the partitioned program: a `Source` and a `PartitionedProgram` go in, the bytes of a file come out.

`emit.stablehlo` writes StableHLO with Shardy's shardings and reads it again, `emit.hlo` has XLA convert that to HLO
text with GSPMD's, and `emit.specs` writes PartitionSpecs as JSON and Python. `emit.minimal` chooses where few shardings
suffice, `emit.annotations` lists one for every value, and `emit.shardy` adds them to the module and removes them again.
`emit.misread` puts ops that annotations cannot split as planned into manual regions, whose bodies `emit.regions`
writes. `emit.stablehlo` lists the constraints and kernels for people.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toast_cli import xla
from toast_cli.base.errors import UsageError
from toast_cli.emit.hlo import emit_hlo as emit_hlo
from toast_cli.emit.misread import misread_note
from toast_cli.emit.specs import emit_specs
from toast_cli.emit.stablehlo import Written as Written
from toast_cli.emit.stablehlo import emit_python, write_checked
from toast_cli.frontend.attributes import refuse_unpartitionable
from toast_cli.frontend.convert import refuse_left_out
from toast_cli.frontend.places import place_text
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.program.ops import RAGGED_DOT

# The formats besides StableHLO.
_OTHERS: dict[str, Callable[[Source, PartitionedProgram], bytes]] = {
    "hlo": emit_hlo,
    "specs": emit_specs,
    "python": emit_python,
}
FORMATS = ("stablehlo", "bytecode", *_OTHERS)

# These formats hold only shardings, not the program.
SHARDINGS_ONLY = ("specs", "python")


def write(source: Source, lowered: PartitionedProgram, format: str, annotate: str = "minimal") -> Written:
    """The program in one of `FORMATS`; StableHLO is read again and checked, and is returned with its constraints.

    Args:
        annotate: what carries a sharding in StableHLO: "minimal", the fewest values found under which Shardy's
            propagation reproduces the plan; "full", every value; "arguments", only arguments and results.

    Raises `UsageError` for another format or another value, and for programs that a format cannot hold.
    """
    if format not in FORMATS:
        raise UsageError(f"unknown format {format!r}", where="--format", hint=f"choose from {', '.join(FORMATS)}")
    _refuse_unwritable(source, format)
    if format not in _OTHERS:
        return write_checked(source, lowered, binary=format == "bytecode", annotate=annotate)
    note = misread_note(source, lowered) if format in SHARDINGS_ONLY else ""
    if format == "hlo" and xla.walk_ops(source.module, RAGGED_DOT):
        note = "products of ragged groups are written out, each group with all rows: in HLO XLA has no others"
    return Written(_OTHERS[format](source, lowered), notes=(f"{note}; --format stablehlo avoids it",) if note else ())


def _refuse_unwritable(source: Source, format: str) -> None:
    """Raises `ToastError` if no file of this format can hold the program, or if XLA would refuse the file."""
    if format in SHARDINGS_ONLY:
        return
    refuse_left_out(source.module, source.path)

    def place(operation: Any) -> str:
        return place_text(str(operation.location), source.text_file) or source.path

    refuse_unpartitionable(source.module, place, shardy=format in ("stablehlo", "bytecode"))
