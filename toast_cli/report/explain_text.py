"""An explanation for people: facts go in, sections of a terminal report come out."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from toast_cli.explain.model import Change, Explanation, Item
from toast_cli.quantities import format_bytes, format_count, format_seconds, shorten_location
from toast_cli.report import style

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


def one_line(found: Explanation) -> str:
    """The subject and its complete first sentence."""
    return f"{found.subject}: {found.sentences[0]}" if found.sentences else found.subject


def _items(found: Explanation, width: int, verbose: bool) -> RenderableType:
    shown = found.items if verbose else found.items[:_SHORT]
    timed, sized = any(one.seconds for one in shown), any(one.bytes for one in shown)
    costs = list(dict.fromkeys(name for one in shown for name in one.costs))
    rows = [_cells(one, timed, sized, costs) for one in shown]
    heads = [("", "left"), ("", "right"), *([("", "right")] if timed else []), *([("", "right")] if sized else [])]
    heads += [(name, "right") for name in costs]
    drawn = style.table([*heads, ("", "fold")])
    room = style.room(width, rows)
    if room < 24:  # long names: wrap them, and put the rest beneath
        drawn = style.table([("", "fold"), *heads[1:], ("", "fold")])
        room = 40
    for one, cells in zip(shown, rows, strict=True):
        drawn.add_row(style.with_axes(cells[0], list(found.axes)), *cells[1:], shorten_location(one.detail, room))
    return drawn


def _cells(one: Item, timed: bool, sized: bool, costs: list[str]) -> tuple[str, ...]:
    return (
        one.text,
        f"×{format_count(one.count)}" if one.count != 1 else "",
        *([format_seconds(one.seconds) if one.seconds else ""] if timed else []),
        *([format_bytes(one.bytes) if one.bytes else ""] if sized else []),
        *(format_seconds(one.costs[name]) if name in one.costs else "" for name in costs),
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
