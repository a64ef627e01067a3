"""A plan's HTML for notebooks: the pages' style in one piece of markup, in the notebook's own colours.

Enters: texts. Leaves: markup without scripts, which notebooks drop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

_STYLE = """
.toast-plan { font: 14px/1.5 system-ui, sans-serif; } .toast-plan .faint { opacity: .65; }
.toast-plan .figures { display: flex; flex-wrap: wrap; gap: .6rem 2rem; margin: .4rem 0 .6rem; }
.toast-plan .figures b { display: block; font-size: 1.3rem; line-height: 1.2; }
.toast-plan table { border-collapse: collapse; } .toast-plan td { text-align: left; padding: .2rem .8rem .2rem 0; }
.toast-plan summary { cursor: pointer; }
"""


def snippet(
    title: str, summary: str, figures: Mapping[str, tuple[str, str]], more: str, rows: Iterable[tuple[str, str]]
) -> str:
    """A plan in a sentence, its figures, and a folded table.

    Args:
        figures: name -> figure, and a remark. more: title of the table. rows: of two texts.
    """
    cells = "".join(
        f"<div><span class='faint'>{escape(name)}</span><b>{escape(figure)}</b>"
        f"<span class='faint'>{escape(note)}</span></div>"
        for name, (figure, note) in figures.items()
    )
    table = "".join(
        f"<tr><td><code>{escape(one)}</code></td><td><code>{escape(other)}</code></td></tr>" for one, other in rows
    )
    return (
        f"<div class='toast-plan'><style>{_STYLE}</style><b>{escape(title)}</b><br>{escape(summary)}"
        f"<div class='figures'>{cells}</div><details><summary class='faint'>{escape(more)}</summary>"
        f"<table>{table}</table></details></div>"
    )
