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

from toast_cli.hardware import written_shape
from toast_cli.program.quantities import (
    format_bytes,
    format_count,
    format_percent,
    format_price,
    format_ratio,
    format_seconds,
    shorten_location,
)
from toast_cli.report import style
from toast_cli.report.comparison import PIPELINE, on_front
from toast_cli.report.explain.study import Change, Explanation
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
ORDER: tuple[Status, ...] = (FITS, UNSURE, BREAKS_BOUND, DOES_NOT_FIT, FAILED)  # of the rows of a table


@dataclass(frozen=True)
class SweepRow:
    """One program of some sizes on one mesh of one shape. Field names are the CSV's and JSON's; None if a point failed.

    `mesh_shape` is the one found or requested (`data=8,model=2`), `dims` the sizes of symbolic dimensions
    (`b=256,s=4096`), `seconds` the wall time of the point, `key` identifies the same point in a later sweep. Prices are
    in the user's currency; None where the price of a chip is unknown, like tokens a second where the program has none.
    `beyond`: where the largest size was asked for, the next one and why it does not fit.
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
    dims: str = ""
    tokens_per_second: float | None = None
    step_price: float | None = None
    million_price: float | None = None
    rewritten: str = ""
    front: bool = False
    samples_per_second: float | None = None
    beyond: str = ""
    pipeline_seconds: float | None = None

    @property
    def device_seconds(self) -> float | None:
        """Device time of a step: seconds times devices."""
        return None if self.step_seconds is None or self.devices is None else self.step_seconds * self.devices

    @property
    def token_seconds(self) -> float | None:
        """Seconds for a token of all; for a sample, or else a step, where the number of tokens is unknown."""
        rate = self.tokens_per_second or self.samples_per_second
        return 1.0 / rate if rate else self.step_seconds


# Criterion of the best point -> its figure, of which less is better.
FIGURES: dict[str, Callable[[SweepRow], float | None]] = {
    "step_time": lambda row: row.step_seconds,
    "tokens": lambda row: row.token_seconds,
    "price": lambda row: row.million_price or row.step_price,
    "peak_memory": lambda row: row.peak_bytes,
    "communication": lambda row: row.communication_seconds,
    "device_time": lambda row: row.device_seconds,
}


def row_of(program: str, mesh: str, report: Report, seconds: float, key: str = "") -> SweepRow:
    """The row of a finished point."""
    predicted = report.predicted
    statuses: dict[str, Status] = {"yes": FITS, "unsure": UNSURE, "no": DOES_NOT_FIT}
    return SweepRow(
        program=program,
        mesh=mesh,
        mesh_shape=written_shape(report.mesh.axes),
        status=statuses[report.fit] if report.met or report.fit == "no" else BREAKS_BOUND,
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
        dims=written_shape(report.program.dims),
        tokens_per_second=predicted.tokens_per_second or None,
        samples_per_second=predicted.samples_per_second or None,
        step_price=predicted.step_price or None,
        million_price=predicted.million_price or None,
        rewritten="; ".join(report.program.rewritten),
        beyond=report.sizes.beyond if report.sizes is not None else "",
        pipeline_seconds=report.baselines[PIPELINE].step_seconds if PIPELINE in report.baselines else None,
    )


def ranked(rows: Sequence[SweepRow], by: str | None = None) -> list[SweepRow]:
    """The rows, those that surely fit first, each kind from the smallest figure on; with the best and the front marked.

    The front: no other row that surely fits is better in the time of a token (of a step) and as good in its price, or
    the other way round; where prices are unknown, in time and memory.

    Args:
        by: the figure; None for the time of a step, or of a token where the sizes of symbolic dimensions differ.
    """
    figure = FIGURES[by or ("tokens" if len({row.dims for row in rows}) > 1 else "step_time")]
    priced = any(row.step_price for row in rows)
    cost = FIGURES["price" if priced else "peak_memory"]

    def place(row: SweepRow) -> tuple[int, float]:
        value = figure(row)
        return ORDER.index(row.status), math.inf if value is None else value

    def pair(row: SweepRow) -> tuple[float, float]:
        time, beside = row.token_seconds, cost(row)
        return math.inf if time is None else time, math.inf if beside is None else beside

    fitting = [pair(row) for row in rows if row.status == FITS]
    marked = [replace(row, best=False, front=row.status == FITS and on_front(pair(row), fitting)) for row in rows]
    ordered = sorted(marked, key=place)
    if ordered and ordered[0].status == FITS and figure(ordered[0]) is not None:
        ordered[0] = replace(ordered[0], best=True)
    return ordered


def to_csv(rows: Sequence[SweepRow]) -> bytes:
    """UTF-8 CSV with a head line; empty cells for missing figures."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(SweepRow)], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({**asdict(row), "best": str(row.best).lower()})
    return text.getvalue().encode("utf-8", "backslashreplace")


def to_json(rows: Sequence[SweepRow]) -> bytes:
    return write_json({"schema": SCHEMA, "points": [asdict(row) for row in rows]})


def rows_table(rows: Sequence[SweepRow], width: int) -> Table:
    """One row per point, what does not fit greyed; narrower screens show fewer figures. Columns that are equal in all
    rows (the program, sizes, the seed, the limit), and figures that no row has, are left out. Ratios are against the
    first row."""
    first = rows[0] if rows else None

    def differs(values: Iterable[object]) -> bool:
        return len(set(values)) > 1

    def against(figure: Callable[[SweepRow], float | None]) -> Callable[[SweepRow], str]:
        reference = figure(first) if first is not None else None

        def ratio(row: SweepRow) -> str:
            value = figure(row)
            return "" if row is first or not reference or value is None else format_ratio(value / reference)

        return ratio

    def shown(name: str, write: Callable[[float], str]) -> Callable[[SweepRow], str]:
        return lambda row: "" if getattr(row, name) is None else write(getattr(row, name))

    def rate(number: float) -> str:
        return format_count(round(number))

    seconds = shown("step_seconds", format_seconds)
    limits = len({row.limit_bytes for row in rows if row.limit_bytes is not None}) > len({row.mesh for row in rows})
    common = set.intersection(*(set(row.dims.split(",")) for row in rows)) if rows else set()
    shapes = len({(row.mesh, row.mesh_shape) for row in rows}) > len({row.mesh for row in rows})
    sized = len({row.dims for row in rows}) > 1 and any(row.samples_per_second for row in rows)
    tokens, price = any(row.tokens_per_second for row in rows), any(row.step_price for row in rows)
    staged = any(row.pipeline_seconds for row in rows)
    several = len(rows) > 1
    # Heading, kind, whether it is there, how expendable it is (0: always shown), text of a row.
    columns: list[tuple[str, str, bool, int, Callable[[SweepRow], str | Text]]] = [
        ("", "left", True, 0, lambda row: Text("★" if row.best else "·" if row.front else "", style.GOOD)),
        ("program", "left", differs(row.program for row in rows), 0, lambda row: row.program),
        ("mesh", "name", True, 0, lambda row: row.mesh),
        (
            "shape",
            "left",
            True,
            0 if shapes or not several else 2,
            lambda row: style.with_axes(row.mesh_shape or "-", _axes(row)),
        ),
        ("sizes", "left", differs(row.dims for row in rows), 0, lambda row: _sizes(row, common)),
        ("seed", "right", differs(row.seed for row in rows), 0, lambda row: str(row.seed)),
        ("step time", "right", True, 0, lambda row: Text(seconds(row), style.TITLE if row.best else "")),
        ("", "right", several, 1, against(lambda row: row.step_seconds)),
        ("tokens/s", "right", tokens, 0, shown("tokens_per_second", rate)),
        ("samples/s", "right", not tokens and sized, 0, shown("samples_per_second", rate)),
        ("", "right", tokens and several, 1, against(lambda row: row.tokens_per_second)),
        ("price a step", "right", price, 2, shown("step_price", format_price)),
        ("a million", "right", price, 0, shown("million_price", format_price)),
        ("", "right", price and several, 1, against(lambda row: row.million_price or row.step_price)),
        ("pipeline", "right", staged, 0, shown("pipeline_seconds", format_seconds)),
        ("compute", "right", True, 3, shown("compute_seconds", format_seconds)),
        ("communication", "right", True, 3, shown("communication_seconds", format_seconds)),
        ("MFU", "right", True, 4, shown("mfu", format_percent)),
        ("peak memory", "right", True, 0, shown("peak_bytes", format_bytes)),
        ("of", "right", limits, 0, shown("limit_bytes", format_bytes)),
        ("", "fold", True, 0, lambda row: _outcome(row, _axes(row))),
    ]
    there = [column for column in columns if column[2]]
    cells = []
    for row in rows:
        grey = row.status in (DOES_NOT_FIT, BREAKS_BOUND)  # but for the words at the end
        texts = [(kind, text(row)) for _, kind, *_, text in there]
        cells.append([Text(str(cell), style.LABEL) if grey and kind != "fold" else cell for kind, cell in texts])
    spare = tuple(tuple(n for n, column in enumerate(there) if column[3] == rank) for rank in (4, 3, 2, 1))
    return style.fitted([(head, kind) for head, kind, *_ in there], cells, width - WORDS, spare=spare)


def sweep_blocks(rows: Sequence[SweepRow], width: int) -> list[RenderableType]:
    """The table, and what its marks mean."""
    beside = "price" if any(row.step_price for row in rows) else "memory"
    front = (
        f"· no other point that surely fits is better in both time and {beside}" if any(r.front for r in rows) else ""
    )
    drawn = rows_table(rows, width)
    there = any(column.justify == "right" and not column.header for column in drawn.columns)
    ratios = "N× is against the first row" if there else ""  # narrow screens have none
    words = "; ".join(filter(None, ("★ best" if any(row.best for row in rows) else "", front, ratios)))
    return [drawn, *([Text(words, style.LABEL)] if len(rows) > 1 and words else [])]


def _sizes(row: SweepRow, common: set[str]) -> str:
    """The sizes of symbolic dimensions that are not the same in all rows."""
    return ",".join(size for size in row.dims.split(",") if size not in common)


def _axes(row: SweepRow) -> list[str]:
    return [part.partition("=")[0] for part in row.mesh_shape.split(",")]


def best_line(row: SweepRow) -> str:
    """The best row, on one line."""
    price = f", {format_price(row.step_price)} a step" if row.step_price else ""
    return (
        f"{row.program}: {row.mesh} {row.mesh_shape}{f' with {row.dims}' * bool(row.dims)}, "
        f"{format_seconds(row.step_seconds or 0.0)} a step{price}, {format_bytes(row.peak_bytes or 0)}; {row.summary}"
    )


def _outcome(row: SweepRow, axes: Sequence[str]) -> Text:
    if row.status == FAILED:
        return Text(f"failed: {row.error}", style.BAD)
    if row.status == DOES_NOT_FIT:
        return Text(f"does not fit in {format_bytes(row.limit_bytes or 0)}", style.BAD)
    if row.status == BREAKS_BOUND:
        return Text("breaks a bound", style.BAD)
    words = filter(None, ("may not fit" * (row.status == UNSURE), row.summary, row.beyond))
    return style.with_axes("; ".join(words), axes)


# ---------------------------------------------------------------- tactics
# Tables of all tactics and strategies, and of those that apply to a program.

_LISTED = 8


def all_tactics(tactics: Iterable[Tactic], strategies: Sequence[str]) -> list[RenderableType]:
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


def applicable_tactics(
    surveyed: Sequence[Applies], axes: Sequence[str], reasons: Mapping[str, str], plans: Sequence[str]
) -> list[RenderableType]:
    """The effect of each tactic on one program, and the strategies that apply."""
    rows = style.table([("tactic", "left"), ("over", "left"), ("splits", "fold")])
    for tactic in surveyed:
        if tactic.axes:
            more = f" and {len(tactic.decides) - _LISTED} more" if len(tactic.decides) > _LISTED else ""
            over = style.with_axes(", ".join(tactic.axes), axes)
            rows.add_row(Text(tactic.name, style.TITLE), over, ", ".join(tactic.decides[:_LISTED]) + more)
        else:
            rows.add_row(Text(tactic.name, style.LABEL), "-", Text(tactic.reason, style.LABEL))
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
        # The verdict, and the reason if it is not agreement.
        wanted = verdict.outcome if verdict.outcome != "agreed" else ""
        reasons = [f"; {part.name}: {part.text}" for part in verdict.parts if part.outcome == wanted]
        stream.write(plain_text(verdict_text(verdict, " ") + "".join(reasons), stream.encoding) + "\n")
        return
    parts = [(Text(*_MARK[part.outcome]), part.name, part.text) for part in verdict.parts]
    drawn = table((("", "left"), ("part", "left"), ("what", "fold")), parts)
    blocks = [section(f"verdict of {verdict_text(verdict, ': ')}", drawn)]
    rows: list[dict[str, Any]] = next(
        (part.facts.get("collectives", []) for part in verdict.parts if part.name == "collectives"), []
    )
    if rows:
        sides = [(head, "right") for head in ("promised", "", "compiled", "")]
        compared = table((("kind", "left"), ("axes", "left"), *sides))
        for row in rows[:_ROWS]:
            figures = [
                (format_bytes(row[f"{side}_bytes"]), f"×{format_count(row[f'{side}_count'])}")
                for side in ("promised", "compiled")
            ]
            compared.add_row(row["kind"], "+".join(row["axes"]), *figures[0], *figures[1])
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


def difference_table(differences: list[dict[str, Any]]) -> Table:
    """Collectives that only the report or only the compiler has, and their places in the source."""
    rows = table(
        (("", "left"), ("kind", "left"), ("axes", "left"), ("result", "right"), ("", "right"), ("comes from", "fold"))
    )
    for row in differences[:_DIFFERENCES]:
        rows.add_row(
            row["side"], row["kind"], "+".join(row["axes"]), format_bytes(row["bytes"]), f"×{row['count']:.3g}",
            Text(row["place"]),
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


def explanation_blocks(explanation: Explanation, width: int, verbose: bool) -> list[RenderableType]:
    """The subject, the reasons in words, the list, and the alternatives."""
    axes = list(explanation.axes)
    shape = style.with_axes(style.shape(explanation.axes), axes)
    head = Text(f"{explanation.program} on {explanation.mesh}, ").append_text(shape)
    blocks: list[RenderableType] = [head]
    if explanation.summary and explanation.subject == "plan":
        blocks.append(style.with_axes(explanation.summary, axes))
    body = [style.with_axes(sentence, axes) for sentence in explanation.sentences]
    blocks += [Text(), style.section(explanation.subject, *body)]
    if explanation.items:
        blocks += [Text(), style.section(explanation.listed, _items(explanation, width, verbose))]
    if explanation.changes:
        shown = explanation.changes if verbose else explanation.changes[:_SHORT]
        more = style.more(len(explanation.changes) - len(shown), "more change")
        blocks += [Text(), style.section(explanation.alternatives, _changes(explanation, shown, width), *more)]
    return blocks


def explanation_line(explanation: Explanation) -> str:
    """The subject and its complete first sentence."""
    return f"{explanation.subject}: {explanation.sentences[0]}" if explanation.sentences else explanation.subject


def _items(explanation: Explanation, width: int, verbose: bool) -> RenderableType:
    shown = explanation.items if verbose else explanation.items[:_SHORT]
    timed, sized = any(item.seconds for item in shown), any(item.bytes for item in shown)
    rows = [
        (
            item.text,
            style.times(item.count),
            *([format_seconds(item.seconds) if item.seconds else ""] if timed else []),
            *([format_bytes(item.bytes) if item.bytes else ""] if sized else []),
        )
        for item in shown
    ]
    drawn = style.table([("", "fold"), *[("", "right")] * (1 + timed + sized), ("", "fold")])
    room = max(style.room(width, rows), 40)
    for item, cells in zip(shown, rows, strict=True):
        text = style.with_axes(cells[0], list(explanation.axes))
        drawn.add_row(text, *cells[1:], shorten_location(item.detail, room))
    return drawn


def _changes(explanation: Explanation, shown: list[Change], width: int) -> RenderableType:
    noted = any(change.note for change in shown)
    columns = [
        ("", "fold"), ("step time", "right"), ("", "right"), ("peak memory", "right"), ("", "right"), ("", "left"),
        *([("", "fold")] if noted else []),
    ]  # fmt: skip
    now: list[str | Text] = [
        Text("as annotated" if explanation.subject == "as annotated" else "the plan as it is", style.LABEL),
        format_seconds(explanation.step_seconds),
        "",
    ]
    rows = [[*now, format_bytes(explanation.peak_bytes), "", "", *([""] if noted else [])]]
    rows += [
        [
            style.with_axes(change.what, list(explanation.axes)),
            format_seconds(change.step_seconds),
            _difference(change.step_seconds, explanation.step_seconds),
            format_bytes(change.peak_bytes),
            _difference(change.peak_bytes, explanation.peak_bytes),
            "" if change.fits else Text("does not fit", style.BAD),
            *([change.note] if noted else []),
        ]
        for change in shown
    ]
    return style.fitted(columns, rows, width, spare=((2, 4),))


def _difference(value: float, now: float) -> Text:
    """`+12.3%`, red if it is worse; `=` for no change."""
    if not now or abs(value / now - 1) < _NOTHING:
        return Text("=", style.LABEL)
    change = value / now - 1
    text = f"{value / now:.1f}×" if change > 9 else f"{100 * change:+.1f}%"
    return Text(text, style.BAD if change > 0 else style.GOOD)
