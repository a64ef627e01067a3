"""Compares two stored reports. Enters: two `StoredReport`s. Leaves: the changes between them, and their rendering."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from toast_cli.quantities import format_bytes, format_percent, format_seconds
from toast_cli.report import style
from toast_cli.report.checks import drift_lines
from toast_cli.report.json_file import StoredReport

SCHEMA = "toast.difference/1"


@dataclass(frozen=True)
class FigureChange:
    """A predicted figure in both; seconds or bytes."""

    name: str
    before: float
    now: float

    @property
    def change(self) -> str:
        """`+3.1%`; empty where nothing changed."""
        if self.before == self.now:
            return ""
        if not self.before:
            return "new"
        share = self.now / self.before - 1
        return f"{'+' if share > 0 else '-'}{format_percent(abs(share))}"


@dataclass(frozen=True)
class Difference:
    """heads: programs and meshes of the reports, if they differ. drift: see `drift_lines`."""

    before: str
    now: str
    heads: list[str]
    figures: list[FigureChange]
    drift: list[str]

    @property
    def same(self) -> bool:
        return not self.heads and not self.drift and all(figure.before == figure.now for figure in self.figures)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "same": self.same, **asdict(self)}


def difference(before: StoredReport, now: StoredReport) -> Difference:
    """The changes between two reports."""
    heads = []
    if before.program_name != now.program_name:
        heads.append(f"programs: {before.program_name}, then {now.program_name}")
    meshes = [f"{one.mesh_name} ({one.devices} {one.chip})" for one in (before, now)]
    if meshes[0] != meshes[1]:
        heads.append(f"meshes: {meshes[0]}, then {meshes[1]}")
    figures = [
        FigureChange("step time", before.step_seconds, now.step_seconds),
        FigureChange("communication", before.communication_seconds, now.communication_seconds),
        FigureChange("peak memory", before.peak_bytes, now.peak_bytes),
    ]
    return Difference(
        before.path,
        now.path,
        heads,
        figures,
        drift_lines(before.decisions, now.decisions, before.arguments, now.arguments),
    )


def blocks(found: Difference) -> list[RenderableType]:
    """Renderables for the terminal."""
    rows = style.table([("", "left"), (found.before, "right"), (found.now, "right"), ("", "right")])
    for one in found.figures:
        shown = format_bytes if one.name == "peak memory" else format_seconds
        rows.add_row(one.name, shown(one.before), shown(one.now), one.change)
    lines = [Text(line) for line in found.drift] or [Text("the same decisions and shardings", style.LABEL)]
    heads = [Text(head) for head in found.heads]
    return [*heads, rows, Text(), style.section("plan", *lines)]
