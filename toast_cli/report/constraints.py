"""The section of a terminal report about constraints: those that carry the plan, or lines to paste."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from rich.console import RenderableType
from rich.text import Text

from toast_cli.quantities import format_bytes, format_count, format_seconds, type_bytes
from toast_cli.report import style
from toast_cli.report.model import Report, matters

# What a report shows without --verbose.
SHORT_CONSTRAINTS = 6
# What stands before every line to paste; a report has no room for it.
JAX = "x = jax.lax."
KERNEL = "kernel"
_INTEGERS = re.compile(r"u?i\d+\[")


def constraints(report: Report, verbose: bool) -> RenderableType | None:
    """The lines to paste for those who would rather keep their program than take the written one; equal ones once.

    Without `verbose` those that are worth most, or where no figures tell them apart, those of the largest arrays.
    """
    placed = [one for one in report.constraints if one.place != KERNEL]
    if not placed:
        return None
    if any(map(matters, report.constraint_families)) and not verbose:
        return _few_constraints(report, len(placed))
    alike = Counter((_place(one.location), one.type, one.line) for one in placed)
    listed = list(alike.items()) if verbose else sorted(alike.items(), key=_weight, reverse=True)[:SHORT_CONSTRAINTS]
    drawn = style.table([("", "right"), ("", "fold")])
    for (place, type_, line), count in listed:
        drawn.add_row(f"×{format_count(count)}" if count > 1 else "", _line_to_paste(report, place, type_, line))
    rest = len(placed) - sum(count for _, count in listed)
    more = [Text(f"and {format_count(rest)} more; --verbose lists all", style.LABEL)] if rest else []
    return style.section(f"sharding constraints inside the program, {format_count(len(placed))} in all", drawn, *more)


def _place(location: str) -> str:
    """The line of the source alone."""
    return location.partition(" (")[0] or "(unknown)"


def _line_to_paste(report: Report, place: str, type_: str, line: str) -> Text:
    """Where it goes, and the line."""
    return Text(f"{place}, {type_}\n").append_text(style.with_axes(line.removeprefix(JAX), list(report.mesh.axes)))


def kernels(report: Report) -> RenderableType | None:
    """The kernels that run on parts, and the lines that say so in JAX."""
    found = [one for one in report.constraints if one.place == KERNEL]
    if not found:
        return None
    drawn = style.table([("", "fold")])
    for one in found[:SHORT_CONSTRAINTS]:
        drawn.add_row(_line_to_paste(report, _place(one.location), one.type, one.line))
    rest = len(found) - SHORT_CONSTRAINTS
    more = [Text(f"and {format_count(rest)} more; the JSON report lists all", style.LABEL)] if rest > 0 else []
    return style.section("hand-written kernels on parts, and the same in JAX", drawn, *more)


def _few_constraints(report: Report, number: int) -> RenderableType:
    """Those that carry the plan, with what it costs without them; the others of `number` in a sentence."""
    carrying = [one for one in report.constraint_families if matters(one)]
    drawn = style.table(
        [("step time", "right"), ("peak memory", "right"), ("", "right"), ("without this line", "fold")]
    )
    for one in carrying:
        count = f"×{one.count}" if one.count > 1 else ""
        cell = _line_to_paste(report, _place(one.location), one.type, one.line)
        drawn.add_row(more(one.saved_seconds, format_seconds), more(one.saved_bytes, format_bytes), count, cell)
    rest = number - sum(one.count for one in carrying)
    count = format_count(number)
    others = f"and {format_count(rest)} more; --verbose lists all. " if rest else ""
    hint = "You need not paste any of them: toast.load, toast.jit and the written program apply them all."
    title = f"sharding constraints inside the program, {count} in all, and those that save most"
    return style.section(title, drawn, Text(others + hint, style.LABEL))


def _weight(constraint: tuple[tuple[str, str, str], int]) -> tuple[bool, int]:
    """How much a constraint may matter: least where it leaves all to the compiler, or speaks of integers, which are
    indices and masks; else by the bytes of its array."""
    (_, type_, line), count = constraint
    return _says_something(line) and not _INTEGERS.match(type_), type_bytes(type_) * count


def _says_something(line: str) -> bool:
    """Whether a line says about any dimension how it is split."""
    spec = line.partition("P(")[2].rstrip(")")
    return any(entry.strip() not in ("", "P.UNCONSTRAINED") for entry in spec.split(","))


def more(figure: float, text: Callable[[float], str]) -> str:
    """`+1.86 s`; empty for nothing, or for less."""
    return f"+{text(figure)}" if figure > 0 and text(figure) != text(0) else ""
