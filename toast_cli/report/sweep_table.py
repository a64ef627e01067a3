"""Results of `toast sweep`: one `Row` per point goes in; a table, CSV and JSON come out."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

from rich.console import RenderableType
from rich.text import Text

from toast_cli.report import style
from toast_cli.report.format import format_bytes, format_percent, format_seconds
from toast_cli.report.json_file import write_json
from toast_cli.report.model import Report

SCHEMA = "toast.sweep/1"
# From this width on, the table shows what the step time is made of.
WIDE = 120

FITS: Literal["fits"] = "fits"
DOES_NOT_FIT: Literal["does-not-fit"] = "does-not-fit"
FAILED: Literal["failed"] = "failed"
Status = Literal["fits", "does-not-fit", "failed"]


@dataclass(frozen=True)
class Row:
    """One program on one mesh of one shape. Field names are the CSV's and JSON's; None where a point failed.

    `mesh_shape` is what was found or asked for (`data=8,model=2`), `seconds` the wall time the point took.
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


def row_of(program: str, mesh: str, report: Report, seconds: float) -> Row:
    """The row of a point that was judged."""
    predicted = report.predicted
    return Row(
        program=program,
        mesh=mesh,
        mesh_shape=",".join(f"{axis}={size}" for axis, size in report.mesh.axes.items()),
        status=FITS if predicted.fits else DOES_NOT_FIT,
        step_seconds=predicted.step_seconds,
        compute_seconds=predicted.compute_seconds,
        communication_seconds=predicted.communication_seconds,
        peak_bytes=predicted.peak_bytes,
        limit_bytes=predicted.limit_bytes,
        mfu=predicted.mfu,
        summary=report.plan.summary,
        evaluations=report.search.evaluations,
        seconds=seconds,
    )


def mark_best(rows: Sequence[Row]) -> list[Row]:
    """The rows with `best` set on the fastest that fits, for each program; the first of equals."""
    fastest: dict[str, int] = {}
    for number, row in enumerate(rows):
        if row.status == FITS and _step(row) < _step(rows[fastest[row.program]] if row.program in fastest else None):
            fastest[row.program] = number
    return [replace(row, best=fastest.get(row.program) == number) for number, row in enumerate(rows)]


def to_csv(rows: Sequence[Row]) -> bytes:
    """UTF-8 CSV with a head line; empty cells where there is no figure."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({**asdict(row), "best": str(row.best).lower()})
    return text.getvalue().encode()


def to_json(rows: Sequence[Row]) -> bytes:
    return write_json({"schema": SCHEMA, "points": [asdict(row) for row in rows]})


def sweep_tables(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """A table for each program, one row a point, the best marked; narrower screens show fewer figures."""
    programs = list(dict.fromkeys(row.program for row in rows))
    if len(programs) == 1:
        return [_table(rows, width)]
    return [
        style.section(program, _table([row for row in rows if row.program == program], width)) for program in programs
    ]


def _table(rows: Sequence[Row], width: int) -> RenderableType:
    wide = width >= WIDE
    more = [("compute", "right"), ("communication", "right"), ("MFU", "right")] if wide else []
    drawn = style.table(
        [
            ("", "left"),
            ("mesh", "left"),
            ("shape", "left"),
            ("step time", "right"),
            *more,
            ("peak memory", "right"),
            ("", "fold"),
        ]
    )
    for row in rows:
        axes = [part.partition("=")[0] for part in row.mesh_shape.split(",")]
        drawn.add_row(
            Text("★" if row.best else "", style.GOOD),
            row.mesh,
            style.with_axes(row.mesh_shape or "-", axes),
            Text(_seconds(row.step_seconds), style.TITLE if row.best else ""),
            *([_seconds(row.compute_seconds), _seconds(row.communication_seconds), _percent(row.mfu)] if wide else []),
            "" if row.peak_bytes is None else format_bytes(row.peak_bytes),
            _outcome(row, axes),
        )
    return drawn


def best_line(row: Row) -> str:
    """The best row of a program, on one line."""
    return (
        f"{row.program}: {row.mesh} {row.mesh_shape}, {_seconds(row.step_seconds)} a step, "
        f"{format_bytes(row.peak_bytes or 0)}; {row.summary}"
    )


def _outcome(row: Row, axes: Sequence[str]) -> Text:
    if row.status == FAILED:
        return Text(f"failed: {row.error}", style.BAD)
    if row.status == DOES_NOT_FIT:
        return Text(f"does not fit in {format_bytes(row.limit_bytes or 0)}", style.BAD)
    return style.with_axes(row.summary, axes)


def _step(row: Row | None) -> float:
    return float("inf") if row is None or row.step_seconds is None else row.step_seconds


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else format_percent(fraction)
