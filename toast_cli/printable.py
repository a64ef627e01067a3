"""Makes text from outside harmless for a terminal or a log.

A program, a file name or a report may hold escape sequences that move the cursor, rename the window or hide text, and
line ends that forge lines of a log. Everything that is shown goes through `printable` or `printable_lines`.
"""

from __future__ import annotations

import unicodedata

REPLACEMENT = "�"
# C0 and C1 controls, line and paragraph separators, and marks that reorder what is shown.
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF]
_ONE_LINE = {**dict.fromkeys(_CONTROLS, REPLACEMENT), **dict.fromkeys(map(ord, "\t\n\r"), " ")}
_LINES = {code: new for code, new in _ONE_LINE.items() if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    """The text on one line: line ends and tabs are spaces, other control characters are `�`."""
    return text if text.isascii() and text.isprintable() else _whole(text.translate(_ONE_LINE))


def printable_lines(text: str) -> str:
    """Like `printable`, for text of several lines: line ends and tabs stay."""
    return _whole(text.translate(_LINES))


def is_printable(text: str) -> bool:
    """True if `printable` leaves the text unchanged."""
    return printable(text) == text


def _whole(text: str) -> str:
    """Replaces lone surrogates, which stand for undecodable bytes of a file name."""
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    return "".join(REPLACEMENT if unicodedata.category(character) == "Cs" else character for character in text)
