"""Extracts the place in the file and one sentence from jaxlib's error messages."""

from __future__ import annotations

import re
from typing import Any

from toast_cli.printable import printable

# `"-":3:12` in an MLIR location; `was parsing 3:19: error: expects opcode` in XLA's HLO parser.
_MLIR_PLACE = re.compile(r'"-":([1-9]\d*):(\d+)')
_HLO_ERROR = re.compile(r"was parsing (\d+):(\d+): error: (.*)")
_STATUS = re.compile(r"^[A-Z_]+: ")
# The C++ library's message for a list that ends too early: `vector::_M_range_check: __n (which is 0) >= …`.
_LIBRARY_SAYS = re.compile(r"\w+(?:::_M_\w+|::at\b|::substr)")
_FILE_PLACE = re.compile(r'"((?:[^"\\]|\\.)+)":(\d+)(?::(\d+))?')


def first_error(error: Exception) -> tuple[str, str]:
    """Place (`3:19`, or empty) and message of the first thing wrong, from an `ir.MLIRError` or an XLA status."""
    diagnostics = getattr(error, "error_diagnostics", None)
    if diagnostics:
        place = _MLIR_PLACE.search(str(diagnostics[0].location))
        return (f"{place[1]}:{place[2]}" if place else "", _one_line(str(diagnostics[0].message)))
    text = str(error)
    found = _HLO_ERROR.findall(text)
    if found:
        # The parser reports its attempts; one that ends in a colon only introduces the next.
        line, column, message = next((f for f in found if not f[2].endswith(":")), found[0])
        return f"{line}:{column}", message.split(", error: ")[-1]
    if _LIBRARY_SAYS.match(_STATUS.sub("", text)):
        return "", "XLA's reader fails in it: a list in it, such as `dimensions` or `replica_groups`, is too short"
    if "conversion error" in text:  # how the bindings put it
        return "", "a name in it is not text"
    return "", _one_line(_STATUS.sub("", text))


def _one_line(text: str) -> str:
    """The first line, without a full stop, short enough for a terminal."""
    line = text.strip().splitlines()[0].rstrip(".:; ") if text.strip() else "no reason given"
    return printable(line if len(line) <= 300 else line[:299] + "…")


def place_of(operation: Any, path: str) -> str:
    """The location of an operation:
    `model.py:12:4` if the program records it, else its line in the file, else the file.
    """
    found = _FILE_PLACE.search(str(operation.location))
    if not found:
        return path
    file = path if found[1] == "-" else found[1]
    return printable(":".join(part for part in (file, found[2], found[3]) if part))
