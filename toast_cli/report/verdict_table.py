"""Renders a `Verdict` for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

from rich.table import Table
from rich.text import Text

from toast_cli.quantities import format_bytes, format_count, format_seconds
from toast_cli.report.style import make_console, plain_text, render, section, table

if TYPE_CHECKING:
    from toast_cli.verify.verdict import Verdict

_MARK = {"agreed": ("ok", "green"), "disagreed": ("FAILED", "bold red"), "unchecked": ("-", "dim")}
_ROWS, _DIFFERENCES = 12, 10


def print_verdict(verdict: Verdict, stream: TextIO, *, quiet: bool = False) -> None:
    """Prints one row per part; then the collectives, promised and compiled. Quiet: one line."""
    if quiet:
        stream.write(plain_text(one_line(verdict), stream.encoding) + "\n")
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


def one_line(verdict: Verdict) -> str:
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
