"""The section of a terminal report about constraints: the lines to paste."""

from __future__ import annotations

import re
from collections import Counter

from rich.console import RenderableType
from rich.text import Text

from toast_cli.quantities import format_count, type_bytes
from toast_cli.report import style
from toast_cli.report.model import Report

# What a report shows without --verbose.
SHORT_CONSTRAINTS = 6
# Prefix of every line to paste; a report has no room for it.
JAX = "x = jax.lax."
KERNEL = "kernel"
_INTEGERS = re.compile(r"u?i\d+\[")


def constraints(report: Report, verbose: bool) -> RenderableType | None:
    """The lines to paste for users who keep their own program, without duplicates. Without `verbose`, those of the
    largest arrays."""
    placed = [one for one in report.constraints if one.place != KERNEL]
    if not placed:
        return None
    alike = Counter((_place(one.location), one.type, one.line) for one in placed)
    listed = list(alike.items()) if verbose else sorted(alike.items(), key=_weight, reverse=True)[:SHORT_CONSTRAINTS]
    drawn = style.table([("", "right"), ("", "fold")])
    for (place, type_, line), count in listed:
        drawn.add_row(f"×{format_count(count)}" if count > 1 else "", _line_to_paste(report, place, type_, line))
    rest = len(placed) - sum(count for _, count in listed)
    more = [Text(f"and {format_count(rest)} more; --verbose lists all", style.LABEL)] if rest else []
    return style.section(f"sharding constraints inside the program, {format_count(len(placed))} in all", drawn, *more)


def _place(location: str) -> str:
    """The source line without the name stack."""
    return location.partition(" (")[0] or "(unknown)"


def _line_to_paste(report: Report, place: str, type_: str, line: str) -> Text:
    """The place of a constraint, and its line."""
    return Text(f"{place}, {type_}\n").append_text(style.with_axes(line.removeprefix(JAX), list(report.mesh.axes)))


def kernels(report: Report) -> RenderableType | None:
    """The sharded kernels, and the equivalent lines of JAX."""
    found = [one for one in report.constraints if one.place == KERNEL]
    if not found:
        return None
    drawn = style.table([("", "fold")])
    for one in found[:SHORT_CONSTRAINTS]:
        drawn.add_row(_line_to_paste(report, _place(one.location), one.type, one.line))
    rest = len(found) - SHORT_CONSTRAINTS
    more = [Text(f"and {format_count(rest)} more; the JSON report lists all", style.LABEL)] if rest > 0 else []
    return style.section("hand-written kernels on parts, and the same in JAX", drawn, *more)


def _weight(constraint: tuple[tuple[str, str, str], int]) -> tuple[bool, int]:
    """Importance of a constraint: least if it leaves all dimensions to the compiler, or is of integers, which are
    indices and masks; else by the bytes of its array."""
    (_, type_, line), count = constraint
    return _says_something(line) and not _INTEGERS.match(type_), type_bytes(type_) * count


def _says_something(line: str) -> bool:
    """True if a line states the sharding of some dimension."""
    spec = line.partition("P(")[2].rstrip(")")
    return any(entry.strip() not in ("", "P.UNCONSTRAINED") for entry in spec.split(","))
