"""The look of reports: consoles, colours and bars. rich is imported here and in the modules that draw, nowhere else."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, cycle
from typing import Any, TextIO

from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.containers import Lines
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from toast_cli.base.units import printable, printable_lines
from toast_cli.price.memory_fit import NO, UNSURE, YES
from toast_cli.program.quantities import format_count, format_plural

NARROWEST, WIDEST = 60, 200
# Minimum widths of a column that wraps, and of one of names.
LEAST_FOLD = 12
LEAST_NAME = 8
# Width if neither a terminal (a pipe, a log file) nor COLUMNS defines it.
UNKNOWN_WIDTH = 100

TITLE = "bold"
LABEL = "dim"
GOOD = "green"
BAD = "bold red"
WARNING = "yellow"
COMPUTE = "cyan"
COMMUNICATION = "magenta"
MEMORY = "blue"
EMPTY = "dim"

# Mesh axes keep one colour each through the whole report.
_AXIS_COLOURS = ("cyan", "magenta", "yellow", "blue", "green", "red")

# One character for one character, so that columns stay aligned.
_ASCII = str.maketrans("×·…→µ█▓▒░━─╸✓✗★–α", "x-.>u#%=.=--+x*-a")
# What stays on one line: as far as a space, or a separator of a path or name that is not part of a number or unit.
_PIECE = re.compile(r"(?:[^\s/.,_]|__|[.,](?=\d|py\b)|(?<=\{)/|/(?=s\b))*(?:[/.,_]+\s*|\s+|$)")
# Where a word that is too long for a line is divided: `data-|parallel`, `Train|State`.
_INSIDE_WORDS = re.compile(r"(?<=[-+])|(?<=[a-z])(?=[A-Z])")
_TRAILING_SPACE = re.compile(r"[ ]+((?:\x1b\[[\d;]*m)*)$", re.MULTILINE)


class _Folded(Text):
    """Text of a column that wraps: lines end at spaces and behind the separators of paths and names, if they can."""

    def wrap(self, console: Console, width: int, **_options: Any) -> Lines:
        lines = Lines()
        for line in self.split(allow_blank=True):
            places, used = list[int](), 0
            for piece in _PIECE.finditer(line.plain):
                word, start = piece[0].rstrip(), piece.start()
                for part in _INSIDE_WORDS.split(word) if cell_len(word) > width else [word]:
                    if used and part and used + cell_len(part) > width:
                        places.append(start)
                        used = 0
                    *full, rest = chop_cells(part, width) or [""]  # more than one part if it is too long for a line
                    places += [*accumulate(map(len, full), initial=start)][1:]
                    used += cell_len(rest)
                    start += len(part)
                used += cell_len(piece[0][len(word) :])
            lines.extend(line.divide(places))
        for line in lines:
            line.rstrip()
        return lines


class HarmlessConsole(Console):
    """A console that neutralises control sequences in text: it shows control characters as `�`."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if options is not None and options.overflow == "fold" and isinstance(renderable, (str, Text)):
            text = Text(renderable) if isinstance(renderable, str) else renderable
            renderable = _Folded(text.plain, text.style, end=text.end, spans=text.spans)
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                yield Segment(printable_lines(segment.text), segment.style)


def make_console(stream: TextIO, width: int | None = None) -> Console:
    """A console on `stream` that prints text unchanged, between 60 and 200 columns wide.

    Colour follows the stream (none unless it is a terminal) and NO_COLOR, FORCE_COLOR and TERM as rich reads them.
    """
    console = HarmlessConsole(file=stream, markup=False, highlight=False, emoji=False, soft_wrap=False)
    if width is None:
        is_known = console.is_terminal or "COLUMNS" in os.environ
        width = console.width if is_known else UNKNOWN_WIDTH
    console.width = min(max(width, NARROWEST), WIDEST)
    return console


def render(renderables: Iterable[RenderableType], console: Console) -> str:
    """The console's output, without trailing spaces and in ASCII if the stream is not Unicode."""
    with console.capture() as captured:
        for renderable in renderables:
            console.print(renderable)
    return _encodable(_TRAILING_SPACE.sub(r"\1", captured.get()), console.encoding)


def plain_text(text: str, encoding: str | None) -> str:
    """`text` on one line, without control characters; characters that the encoding lacks are replaced one by one."""
    return _encodable(printable(text), encoding)


def _encodable(text: str, encoding: str | None) -> str:
    if encoding is None or encoding.lower().startswith("utf"):
        return text
    return text.translate(_ASCII).encode(encoding, "replace").decode(encoding)


def fit_text(fit: str) -> Text:
    """The verdict on memory in words."""
    words = {YES: ("fits", GOOD), UNSURE: ("may not fit", WARNING), NO: ("does not fit", BAD)}
    return Text(*words[fit])


def with_axes(text: str, axes: Sequence[str], style: str = "") -> Text:
    """`text` with the names of mesh axes in their colours."""
    coloured = Text(text, style=style)
    for axis, colour in zip(axes, cycle(_AXIS_COLOURS), strict=False):
        coloured.highlight_regex(rf"(?<![\w.'\"\[]){re.escape(axis)}(?![\w'\"\]])", colour)
    return coloured


BAR = "█▒░"  # what bars are drawn with


def bar(parts: Iterable[tuple[float, str, str]], width: int) -> Text:
    """A bar of `width` characters; the rest is drawn empty, and anything beyond 1 is cut off.

    Args:
        parts: fraction (0 to 1), glyph and style of each. Every non-zero part takes at least one character.
    """
    drawn = Text()
    end = 0.0
    for fraction, glyph, look in parts:
        end += fraction
        length = round(min(end, 1.0) * width) - len(drawn)
        if fraction > 0:
            length = max(length, 1)
        drawn.append(glyph * min(length, width - len(drawn)), look)
    drawn.append("░" * (width - len(drawn)), EMPTY)
    return drawn


def table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[RenderableType]] = ()) -> Table:
    """A table without lines, of (head, kind) columns; heads are dim, and left out if all are empty.

    A column is `left`, `right`, or `fold`: left, and wrapped on narrow screens; a `name` also wraps, but `fitted`
    leaves out other columns first.
    """
    drawn = Table(
        box=None,
        show_header=any(head for head, _ in columns),
        header_style=LABEL,
        show_edge=False,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for head, kind in columns:
        if kind in ("fold", "name"):
            drawn.add_column(head, overflow="fold", min_width=LEAST_FOLD)
        else:
            drawn.add_column(head, justify="right" if kind == "right" else "left", no_wrap=True, overflow="ellipsis")
    for row in rows:
        drawn.add_row(*row)
    return drawn


def fitted(
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[str | Text]],
    width: int,
    spare: Sequence[tuple[int, ...]] = (),
) -> Table:
    """A table with rows. Cells of columns other than `fold` do not wrap at this width, if possible.

    Args:
        width: of the screen; the table is indented.
        spare: columns to leave out together, one group after the other until the others fit.
    """
    left = list(range(len(columns)))
    for group in (*spare, ()):
        needed = sum(_natural(columns[k], [row[k] for row in rows]) + 2 for k in left)
        if needed <= width:
            break
        left = [number for number in left if number not in group]
    drawn = table([columns[k] for k in left], [[row[k] for k in left] for row in rows])
    for column, k in zip(drawn.columns, left, strict=True):
        if columns[k][1] == "name":  # short names need no more than they have
            column.min_width = min(LEAST_NAME, max([0, *(cell_len(str(row[k])) for row in rows)]))
    return drawn


def _natural(column: tuple[str, str], cells: Sequence[str | Text]) -> int:
    """The natural width of a column of a table; the minimum width of one that wraps."""
    longest = max([cell_len(column[0]), *(cell_len(str(cell)) for cell in cells)])
    return min(longest, LEAST_FOLD) if column[1] == "fold" else longest


def indented(renderable: RenderableType) -> Padding:
    return Padding(renderable, (0, 0, 0, 2))


def section(title: str, *body: RenderableType) -> RenderableType:
    """A heading and, indented beneath it, the body."""
    return Group(Text(title, TITLE), *(indented(part) for part in body))


def more(hidden: int, noun: str) -> list[Text]:
    """A line about what is listed with --verbose alone, if there is something."""
    return [Text(f"and {format_plural(hidden, noun)}; --verbose lists all", LABEL)] if hidden > 0 else []


def times(count: float) -> str:
    """`×1,024`; empty for once."""
    return f"×{format_count(count)}" if count != 1 else ""


def shape(axes: Mapping[str, int]) -> str:
    """`data=8 × model=2`."""
    return " × ".join(f"{axis}={size}" for axis, size in axes.items())


def room(width: int, rows: Sequence[Sequence[str]]) -> int:
    """Width left for the last cell of an indented table whose other cells are `rows`."""
    used = sum(max(len(cell) for cell in column) + 2 for column in zip(*rows, strict=True))
    return max(width - 2 - used, 12)
