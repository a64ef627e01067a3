"""What `toast sweep`, `toast tactics`, `toast verify` and `toast explain` print."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from toast_cli.price.memory_fit import RISK
from toast_cli.program.quantities import format_bytes, format_count, format_percent, format_seconds, shorten_location
from toast_cli.report import style
from toast_cli.report.explain.study import Change, Explanation, Item
from toast_cli.report.model import Report, write_json
from toast_cli.report.style import make_console, plain_text, render, section, table
from toast_cli.tactics import ALIASES
from toast_cli.tactics.model import Applies, Tactic

if TYPE_CHECKING:
    from toast_cli.ask_xla.verdict import Verdict


# ---------------------------------------------------------------- sweep
# Results of `toast sweep`: one `SweepRow` per point goes in; a table, CSV and JSON come out.

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


# ---------------------------------------------------------------- tactics
# Tables of all tactics and strategies, and of those that apply to a program.

_LISTED = 8


def known(tactics: Iterable[Tactic], strategies: Sequence[str]) -> list[RenderableType]:
    """Every tactic with its description and aliases; every strategy."""
    rows = style.table([("", "left"), ("", "fold")])
    for tactic in tactics:
        also = ", ".join(alias for alias, name in ALIASES.items() if name == tactic.name and not tactic.source)
        rows.add_row(Text(tactic.name, style.TITLE), tactic.about + (f" (also: {also})" if also else ""))
    rows.add_row(Text("search", style.TITLE), "nothing by itself: it names the mesh axes that the search may use")
    return [
        style.section("tactics for --tactic NAME:AXIS, and what each splits over the axis", rows),
        Text(),
        style.section("strategies for --strategy NAME", Text(", ".join(strategies))),
    ]


def applying(
    found: Sequence[Applies], axes: Sequence[str], reasons: Mapping[str, str], plans: Sequence[str]
) -> list[RenderableType]:
    """The effect of each tactic on one program, and the strategies that apply."""
    rows = style.table([("tactic", "left"), ("over", "left"), ("splits", "fold")])
    for one in found:
        if one.axes:
            more = f" and {len(one.decides) - _LISTED} more" if len(one.decides) > _LISTED else ""
            over = style.with_axes(", ".join(one.axes), axes)
            rows.add_row(Text(one.name, style.TITLE), over, ", ".join(one.decides[:_LISTED]) + more)
        else:
            rows.add_row(Text(one.name, style.LABEL), "-", Text(one.reason, style.LABEL))
    missing = [name for name, why in reasons.items() if why.startswith("here the same")]
    same = Text(f"for this program the same as one of these: {', '.join(missing)}", style.LABEL) if missing else Text()
    return [
        style.section("tactics", rows),
        Text(),
        style.section("strategies that apply", Text(", ".join(plans) or "none"), same),
    ]


# ---------------------------------------------------------------- verify
# Renders a `Verdict` for a terminal.

_MARK = {"agreed": ("ok", "green"), "disagreed": ("FAILED", "bold red"), "unchecked": ("-", "dim")}
_ROWS, _DIFFERENCES = 12, 10


def print_verdict(verdict: Verdict, stream: TextIO, *, quiet: bool = False) -> None:
    """Prints one row per part; then the collectives, promised and compiled. Quiet: one line."""
    if quiet:
        stream.write(plain_text(verdict_line(verdict), stream.encoding) + "\n")
        return
    parts = table((("", "left"), ("part", "left"), ("what", "fold")))
    for part in verdict.parts:
        word, style = _MARK[part.outcome]
        parts.add_row(Text(word, style), part.name, part.text)
    blocks = [section(f"verdict of {verdict_text(verdict, ': ')}", parts)]
    rows: list[dict[str, Any]] = next(
        (part.facts.get("collectives", []) for part in verdict.parts if part.name == "collectives"), []
    )
    if rows:
        compared = table(
            (
                ("kind", "left"),
                ("axes", "left"),
                ("promised", "right"),
                ("", "right"),
                ("compiled", "right"),
                ("", "right"),
            )
        )
        for row in rows[:_ROWS]:
            compared.add_row(
                row["kind"],
                "+".join(row["axes"]),
                format_bytes(row["promised_bytes"]),
                f"×{format_count(row['promised_count'])}",
                format_bytes(row["compiled_bytes"]),
                f"×{format_count(row['compiled_count'])}",
            )
        blocks.append(section("collectives, bytes of results on each device", compared))
    differences = [d for part in verdict.parts for d in part.facts.get("differences", [])]
    if differences:
        blocks.append(section("collectives that differ, bytes of one result", difference_table(differences)))
    memory = next((part.facts for part in verdict.parts if part.name == "memory" and part.facts), None)
    if memory:
        blocks.append(section("memory on each device", memory_table(memory)))
        blocks.append(section(f"compiled in {format_seconds(memory['compile_seconds'])}"))
    stream.write(render(blocks, make_console(stream)))


def verdict_text(verdict: Verdict, joint: str) -> str:
    """`XLA (v4:2x2x4): agreed`, `XLA: agreed (CPU partitioner; --compiler tpu asks the real one)`."""
    if verdict.compiler != "cpu":
        return f"XLA ({verdict.compiler}){joint}{verdict.outcome}"
    asked = "; ".join(filter(None, ("CPU partitioner", verdict.unasked)))
    return f"XLA{joint}{verdict.outcome} ({asked})"


def verdict_line(verdict: Verdict) -> str:
    """The verdict, and the reason if it is not agreement."""
    wanted = verdict.outcome if verdict.outcome != "agreed" else ""
    reasons = [f"{part.name}: {part.text}" for part in verdict.parts if part.outcome == wanted]
    return verdict_text(verdict, " ") + "".join(f"; {reason}" for reason in reasons)


def difference_table(differences: list[dict[str, Any]]) -> Table:
    """Collectives that only the report or only the compiler has, and their places in the source."""
    rows = table(
        (("", "left"), ("kind", "left"), ("axes", "left"), ("result", "right"), ("", "right"), ("comes from", "fold"))
    )
    for one in differences[:_DIFFERENCES]:
        rows.add_row(
            one["side"], one["kind"], "+".join(one["axes"]), format_bytes(one["bytes"]), f"×{one['count']:.3g}",
            Text(one["place"]),
        )  # fmt: skip
    if len(differences) > _DIFFERENCES:
        rows.add_row("", f"and {len(differences) - _DIFFERENCES} more; --json lists all")
    return rows


def memory_table(facts: dict[str, Any]) -> Table:
    """Arguments, temporaries and peak, predicted and compiled."""
    rows = table((("", "left"), ("predicted", "right"), ("compiled", "right")))
    named = {
        "argument_bytes": "arguments",
        "temp_bytes": "temporaries",
        "peak_bytes": "peak",
        "host_bytes": "on the host",
    }
    for key, name in named.items():
        predicted, compiled = facts.get(f"predicted_{key}"), facts.get(key)
        if predicted is not None or compiled is not None:
            rows.add_row(name, "" if predicted is None else format_bytes(predicted), format_bytes(compiled or 0))
    if "limit_bytes" in facts:
        rows.add_row("limit", format_bytes(facts["limit_bytes"]), "")
    return rows


# ---------------------------------------------------------------- explain
# An explanation for people: facts go in, sections of a terminal report come out.

# Changes smaller than this fraction are shown as none.
_NOTHING = 0.0005
_SHORT = 20


def explanation_blocks(found: Explanation, width: int, verbose: bool) -> list[RenderableType]:
    """The subject, the reasons in words, the list, and the alternatives."""
    axes = list(found.axes)
    shape = " × ".join(f"{axis}={size}" for axis, size in found.axes.items())
    head = Text(f"{found.program} on {found.mesh}, ").append_text(style.with_axes(shape, axes))
    blocks: list[RenderableType] = [head]
    if found.summary and found.subject == "plan":
        blocks.append(style.with_axes(found.summary, axes))
    body = [style.with_axes(sentence, axes) for sentence in found.sentences]
    blocks += [Text(), style.section(found.subject, *body)]
    if found.items:
        blocks += [Text(), style.section(found.listed, _items(found, width, verbose))]
    if found.changes:
        shown = found.changes if verbose else found.changes[:_SHORT]
        rest = len(found.changes) - len(shown)
        more = [Text(f"and {format_count(rest)} more; --verbose lists all", style.LABEL)] if rest else []
        blocks += [Text(), style.section(found.alternatives, _changes(found, shown, width), *more)]
    return blocks


def explanation_line(found: Explanation) -> str:
    """The subject and its complete first sentence."""
    return f"{found.subject}: {found.sentences[0]}" if found.sentences else found.subject


def _items(found: Explanation, width: int, verbose: bool) -> RenderableType:
    shown = found.items if verbose else found.items[:_SHORT]
    timed, sized = any(one.seconds for one in shown), any(one.bytes for one in shown)
    rows = [_cells(one, timed, sized) for one in shown]
    heads = [("", "left"), ("", "right"), *([("", "right")] if timed else []), *([("", "right")] if sized else [])]
    drawn = style.table([*heads, ("", "fold")])
    room = style.room(width, rows)
    if room < 24:  # long names: wrap them, and put the rest beneath
        drawn = style.table([("", "fold"), *heads[1:], ("", "fold")])
        room = 40
    for one, cells in zip(shown, rows, strict=True):
        drawn.add_row(style.with_axes(cells[0], list(found.axes)), *cells[1:], shorten_location(one.detail, room))
    return drawn


def _cells(one: Item, timed: bool, sized: bool) -> tuple[str, ...]:
    return (
        one.text,
        f"×{format_count(one.count)}" if one.count != 1 else "",
        *([format_seconds(one.seconds) if one.seconds else ""] if timed else []),
        *([format_bytes(one.bytes) if one.bytes else ""] if sized else []),
    )


def _changes(found: Explanation, shown: list[Change], width: int) -> RenderableType:
    noted = any(one.note for one in shown)
    columns = [
        ("", "fold"), ("step time", "right"), ("", "right"), ("peak memory", "right"), ("", "right"), ("", "left"),
        *([("", "fold")] if noted else []),
    ]  # fmt: skip
    now: list[str | Text] = [
        Text("as annotated" if found.subject == "as annotated" else "the plan as it is", style.LABEL),
        format_seconds(found.step_seconds),
        "",
    ]
    rows = [[*now, format_bytes(found.peak_bytes), "", "", *([""] if noted else [])]]
    rows += [
        [
            style.with_axes(one.what, list(found.axes)),
            format_seconds(one.step_seconds),
            _difference(one.step_seconds, found.step_seconds),
            format_bytes(one.peak_bytes),
            _difference(one.peak_bytes, found.peak_bytes),
            "" if one.fits else Text("does not fit" if width >= style.NARROW else "✗", style.BAD),
            *([one.note] if noted else []),
        ]
        for one in shown
    ]
    return style.fitted(columns, rows, width, spare=((2, 4),))


def _difference(value: float, now: float) -> Text:
    """`+12.3%`, red if it is worse; `=` for no change."""
    if not now or abs(value / now - 1) < _NOTHING:
        return Text("=", style.LABEL)
    change = value / now - 1
    text = f"{value / now:.1f}×" if change > 9 else f"{100 * change:+.1f}%"
    return Text(text, style.BAD if change > 0 else style.GOOD)
