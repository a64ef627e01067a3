"""Results of `toast sweep`: one `SweepRow` per point goes in; a table, CSV and JSON come out."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

from rich.console import RenderableType
from rich.text import Text

from toast_cli.compiler.memory_fit import RISK
from toast_cli.quantities import format_bytes, format_percent, format_seconds
from toast_cli.report import style
from toast_cli.report.json_file import write_json
from toast_cli.report.model import Report

SCHEMA = "toast.sweep/1"
ROW_SCHEMA = "toast.sweep.point/1"
# Width of the words at the end of a row before the parts of the step time are shown.
WORDS = 28

FITS: Literal["fits"] = "fits"
UNSURE: Literal["unsure"] = "unsure"
DOES_NOT_FIT: Literal["does-not-fit"] = "does-not-fit"
BREAKS_BOUND: Literal["breaks-bound"] = "breaks-bound"
FAILED: Literal["failed"] = "failed"
Status = Literal["fits", "unsure", "does-not-fit", "breaks-bound", "failed"]


@dataclass(frozen=True)
class SweepRow:
    """One program on one mesh of one shape. Field names are the CSV's and JSON's; None if a point failed.

    `mesh_shape` is the one found or requested (`data=8,model=2`), `seconds` the wall time of the point, `key`
    identifies the same point in a later sweep.
    """

    program: str
    mesh: str
    mesh_shape: str
    status: Status
    error: str = ""
    step_seconds: float | None = None
    compute_seconds: float | None = None
    communication_seconds: float | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    mfu: float | None = None
    summary: str = ""
    evaluations: int | None = None
    seconds: float | None = None
    best: bool = False
    devices: int | None = None
    seed: int = 0
    key: str = ""

    @property
    def device_seconds(self) -> float | None:
        """Device time of a step: seconds times devices."""
        return None if self.step_seconds is None or self.devices is None else self.step_seconds * self.devices


# Criterion of the best point -> its figure, of which less is better.
FIGURES: dict[str, Callable[[SweepRow], float | None]] = {
    "step_time": lambda row: row.step_seconds,
    "peak_memory": lambda row: row.peak_bytes,
    "communication": lambda row: row.communication_seconds,
    "device_time": lambda row: row.device_seconds,
}


def row_of(program: str, mesh: str, report: Report, seconds: float, key: str = "") -> SweepRow:
    """The row of a finished point."""
    predicted = report.predicted
    found: dict[str, Status] = {"yes": FITS, "unsure": UNSURE, "no": DOES_NOT_FIT}
    return SweepRow(
        program=program,
        mesh=mesh,
        mesh_shape=",".join(f"{axis}={size}" for axis, size in report.mesh.axes.items()),
        status=found[report.fit] if report.met or report.fit == "no" else BREAKS_BOUND,
        step_seconds=predicted.step_seconds,
        compute_seconds=predicted.compute_seconds,
        communication_seconds=predicted.communication_seconds,
        peak_bytes=predicted.peak_bytes,
        limit_bytes=predicted.limit_bytes,
        mfu=predicted.mfu,
        summary=report.plan.summary,
        evaluations=report.search.evaluations,
        seconds=seconds,
        devices=report.mesh.devices,
        seed=report.search.seed,
        key=key,
    )


def mark_best(rows: Sequence[SweepRow], by: str = "step_time") -> list[SweepRow]:
    """The rows with `best` set, for each program, on the fitting one with the smallest figure; the first of equals. The
    figure of one that may not fit counts as larger by `RISK`."""
    figure = FIGURES[by]
    least: dict[str, tuple[float, int]] = {}
    for number, row in enumerate(rows):
        value = figure(row)
        if value is not None and row.status == UNSURE:
            value *= 1.0 + RISK
        if row.status in (FITS, UNSURE) and value is not None and value < least.get(row.program, (math.inf, 0))[0]:
            least[row.program] = (value, number)
    best = {number for _, number in least.values()}
    return [replace(row, best=number in best) for number, row in enumerate(rows)]


def to_csv(rows: Sequence[SweepRow], *, head: bool = True) -> bytes:
    """UTF-8 CSV, with a head line if `head`; empty cells for missing figures."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(SweepRow)], lineterminator="\n")
    if head:
        writer.writeheader()
    for row in rows:
        writer.writerow({**asdict(row), "best": str(row.best).lower()})
    return text.getvalue().encode("utf-8", "backslashreplace")


def to_json(rows: Sequence[SweepRow]) -> bytes:
    return write_json({"schema": SCHEMA, "points": [asdict(row) for row in rows]})


def sweep_tables(rows: Sequence[SweepRow], width: int) -> list[RenderableType]:
    """A table for each program, one row per point, the best marked; narrower screens show fewer figures."""
    programs = list(dict.fromkeys(row.program for row in rows))
    if len(programs) == 1:
        return [rows_table(rows, width)]
    return [
        style.section(program, rows_table([row for row in rows if row.program == program], width))
        for program in programs
    ]


def rows_table(rows: Sequence[SweepRow], width: int) -> RenderableType:
    """One row per point; columns that are equal in all rows, the seed and the limit, are left out."""
    seeds = len({row.seed for row in rows}) > 1
    limits = len({row.limit_bytes for row in rows if row.limit_bytes is not None}) > len({row.mesh for row in rows})
    columns = [
        ("", "left"), ("mesh", "name"), ("shape", "left"), *([("seed", "right")] if seeds else []),
        ("step time", "right"), ("compute", "right"), ("communication", "right"),
        ("MFU", "right"), ("peak memory", "right"), *([("of", "right")] if limits else []), ("", "fold"),
    ]  # fmt: skip
    cells: list[list[str | Text]] = []
    for row in rows:
        axes = [part.partition("=")[0] for part in row.mesh_shape.split(",")]
        cells.append(
            [
                Text("★" if row.best else "", style.GOOD),
                row.mesh,
                style.with_axes(row.mesh_shape or "-", axes),
                *([str(row.seed)] if seeds else []),
                Text(_seconds(row.step_seconds), style.TITLE if row.best else ""),
                _seconds(row.compute_seconds),
                _seconds(row.communication_seconds),
                _percent(row.mfu),
                "" if row.peak_bytes is None else format_bytes(row.peak_bytes),
                *(["" if row.limit_bytes is None else format_bytes(row.limit_bytes)] if limits else []),
                _outcome(row, axes),
            ]
        )
    time = 3 + seeds
    return style.fitted(columns, cells, width - WORDS, spare=((time + 3,), (time + 1, time + 2)))


def best_line(row: SweepRow) -> str:
    """The best row of a program, on one line."""
    return (
        f"{row.program}: {row.mesh} {row.mesh_shape}, {'MAY NOT FIT, ' * (row.status == UNSURE)}"
        f"{_seconds(row.step_seconds)} a step, {format_bytes(row.peak_bytes or 0)}; {row.summary}"
    )


def _outcome(row: SweepRow, axes: Sequence[str]) -> Text:
    if row.status == FAILED:
        return Text(f"failed: {row.error}", style.BAD)
    if row.status == DOES_NOT_FIT:
        return Text(f"does not fit in {format_bytes(row.limit_bytes or 0)}", style.BAD)
    if row.status == BREAKS_BOUND:
        return Text("breaks a bound", style.BAD)
    return style.with_axes("may not fit; " * (row.status == UNSURE) + row.summary, axes)


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else format_percent(fraction)
