"""A sweep as one HTML page: for each program time against memory of all its points, and their table.

In: rows of `sweep_table`. Out: bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from toast_cli.quantities import format_plural
from toast_cli.report.html.charts import front_line, plan_point, plans_chart
from toast_cli.report.html.frame import WIDE, frame, from_terminal, section
from toast_cli.report.sweep_table import DOES_NOT_FIT, FITS, SweepRow, rows_table

_COLOURS = 8  # meshes with a colour of their own


def page(rows: Sequence[SweepRow]) -> bytes:
    """UTF-8 HTML, scripts and styles inside."""
    programs = list(dict.fromkeys(row.program for row in rows))
    meshes = list(dict.fromkeys(row.mesh for row in rows))
    colours = {mesh: f"k{number}" if number < _COLOURS else "others" for number, mesh in enumerate(meshes)}
    parts = []
    for program in programs:
        own = [row for row in rows if row.program == program]
        about = "Each point is one mesh shape; faster is lower, less memory is further left, a cross does not fit."
        parts.append(section(program, about, _chart(own, colours) + from_terminal(rows_table(own, WIDE), len(own))))
    counted = f"{format_plural(len(programs), 'program')}, {format_plural(len(rows), 'point')}"
    return frame("Sweep", counted, "\n".join(parts))


def _chart(rows: Sequence[SweepRow], colours: dict[str, str]) -> str:
    done = [row for row in rows if row.step_seconds is not None and row.peak_bytes is not None]
    points = [
        {
            **plan_point(
                row.mesh_shape or row.mesh, row.peak_bytes or 0, row.step_seconds or 0.0, row.status != DOES_NOT_FIT,
                colours[row.mesh], [row.mesh, row.summary],
            ),
            "big": row.best,
        }
        for row in done
    ]  # fmt: skip
    limits = {row.limit_bytes for row in done}
    limit = limits.pop() or 0 if len(limits) == 1 else 0
    front = front_line((row.peak_bytes or 0, row.step_seconds or 0.0) for row in done if row.status == FITS)
    legend = [[mesh, colour] for mesh, colour in colours.items() if any(row.mesh == mesh for row in done)]
    return plans_chart(points, limit, legend, front)
