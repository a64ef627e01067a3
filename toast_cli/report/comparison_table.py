"""A comparison for people: facts go in; a table of figures and differences comes out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from toast_cli.explain.words import name_list
from toast_cli.quantities import format_bytes, format_ratio, format_seconds
from toast_cli.report import style
from toast_cli.report.comparison import ANNOTATED, SEARCH, UNSHARDED, Comparison, Contender, differences

# Names of dimensions listed over one axis before the rest is counted.
_LISTED = 5


def comparison_blocks(found: Comparison, width: int, verbose: bool) -> list[RenderableType]:
    """Figures, then the decisions that differ, then with --verbose the strategies that do not apply."""
    blocks = [_figures(found, width), Text(), _decisions(found)]
    if verbose and found.not_applicable:
        rows = style.table([("", "left"), ("", "fold")])
        for name, why in found.not_applicable.items():
            rows.add_row(name, Text(why, style.LABEL))
        blocks += [Text(), style.section("strategies that do not apply", rows)]
    return blocks


def one_line(found: Comparison) -> str:
    """The best, on one line."""
    best, search = found.best, found.contenders[0]
    head = f"{found.program.name} on {found.mesh.name}: "
    if best is None:
        return (
            f"{head}NOTHING FITS, the search's plan needs {format_bytes(search.peak_bytes)} of "
            f"{format_bytes(found.limit_bytes)}"
        )
    experts = [one for one in found.contenders if one.kind == "strategy" and one.met]
    beside = f"; best strategy {experts[0].label} {format_seconds(experts[0].step_seconds)}" if experts else ""
    return f"{head}{best.label} {format_seconds(best.step_seconds)} a step, {format_bytes(best.peak_bytes)}{beside}"


def _figures(found: Comparison, width: int) -> RenderableType:
    compiled = [("compiled step", "right"), ("and peak", "right")] if found.compiler else []
    columns = [
        ("", "left"), ("plan", "name"), ("step time", "right"), ("", "right"),
        ("compute", "right"), ("communication", "right"), ("peak memory", "right"), *compiled, ("", "left"),
    ]  # fmt: skip
    reference = found.contenders[0].step_seconds or 1.0
    cells = [
        [
            Text("★" if one.best else "", style.GOOD),
            Text(one.label, style.TITLE if one.name == SEARCH else ""),
            format_seconds(one.step_seconds),
            format_ratio(one.step_seconds / reference),
            format_seconds(one.compute_seconds),
            format_seconds(one.communication_seconds),
            format_bytes(one.peak_bytes),
            *(compiled_texts(one) if compiled else ()),
            _verdict(one),
        ]
        for one in found.contenders
    ]
    rows = style.fitted(columns, cells, width, spare=((4, 5), (3,)))
    shape = " × ".join(f"{axis}={size}" for axis, size in found.mesh.axes.items())
    by = f" compiled with {found.compiler}" if found.compiler else ""
    shown = f"{format_bytes(found.limit_bytes)} usable per device"
    title = f"{found.program.name} on {found.mesh.name}, {shape}, {shown}"
    words = Text(
        "★ best by "
        + ", then ".join(found.minimised)
        + by
        + "; on the front: no other plan is better in both time and memory",
        style.LABEL,
    )
    return style.section(title, rows, words)


def compiled_texts(one: Contender) -> tuple[str, str]:
    """Compiled step time and peak memory, or the reason why there are none."""
    facts = one.compiled
    if facts is None or facts.step_seconds is None or facts.peak_bytes is None:
        return (facts.outcome if facts is not None else "", "")
    return format_seconds(facts.step_seconds), format_bytes(facts.peak_bytes)


def _verdict(one: Contender) -> Text:
    fits = one.fits if one.compiled is None or one.compiled.fits is None else one.compiled.fits
    if not fits:
        return Text("does not fit", style.BAD)
    verdict = Text("fits", style.GOOD) if one.met else Text("breaks a bound", style.WARNING)
    return verdict.append(", on the front", "") if one.front else verdict


def _decisions(found: Comparison) -> RenderableType:
    axes = list(found.mesh.axes)
    rows = style.table([("", "left"), ("", "left"), ("", "fold")])
    search = found.contenders[0]
    rows.add_row(
        Text(SEARCH, style.TITLE), "decides", listed(search.decisions, axes) if search.decisions else Text("nothing")
    )
    for one in found.contenders[1:]:
        if one.kind in (UNSHARDED, ANNOTATED):
            continue
        adds, lacks = listed(one.adds, axes), listed(one.lacks, axes)
        if one.adds:
            rows.add_row(one.label, "adds", adds)
        if one.lacks:
            rows.add_row("" if one.adds else one.label, "lacks", lacks)
        if not one.adds and not one.lacks:
            rows.add_row(one.label, "", "decides the same")
    return style.section(
        "decisions that a strategy has and the search's plan has not (adds), and the other way round (lacks)", rows
    )


def listed(decisions: Sequence[str], axes: Sequence[str]) -> Text:
    """`data: batch, embed; model: ff`."""
    parts = []
    for axis, names in differences(decisions).items():
        names = name_list(names)
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        parts.append(f"{', '.join(names[:_LISTED])}{more} over {axis}")
    return style.with_axes("; ".join(parts), axes)
