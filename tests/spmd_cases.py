"""Programs written for one device, run on virtual devices of this process, beside the unsplit program."""

from __future__ import annotations

import tempfile
from pathlib import Path

from toast_cli import xla
from toast_cli.emit.spmd import emit_spmd
from toast_cli.frontend import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.verify.numbers import ORIGINAL, PARTITIONED, numbers_task


def wrong_results(source: Source, lowered: PartitionedProgram, devices: int) -> list[int]:
    """Numbers of the results of the spmd form that are not those of the program itself."""
    return wrong_in(source, emit_spmd(source, lowered), devices)


def wrong_in(source: Source, written: bytes, devices: int) -> list[int]:
    """The same for a program that has been written."""
    request = {"form": "stablehlo", "devices": devices, "shardy": True, "seed": 0, "seconds": 600.0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / ORIGINAL).write_bytes(xla.write_bytecode(source.module))
        (folder / PARTITIONED).write_bytes(written)
        errors = numbers_task(request, folder)["errors"]
    return [k for k, error in enumerate(errors) if not error["error"] <= error["allowed"]]
