"""Tables of all tactics and strategies, and of those that apply to a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from toast_cli.report import style
from toast_cli.tactics import ALIASES
from toast_cli.tactics.model import Tactic
from toast_cli.tactics.survey import Applies

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
