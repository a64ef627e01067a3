"""Finds the place in the user's source that an HLO instruction comes from.

Enters: a module's text, whose head may hold tables of file names, locations and stack frames. Leaves: `file.py:12` by
frame number. An instruction either names its frame (`stack_frame_id=3`) or has `source_file` and `source_line`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from toast_cli.frontend.places import Frame

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ENTRY = re.compile(r"^(\d+) (.*)$")
_FIELD = re.compile(r"(\w+)=(\d+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_OWN = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')


def places(text: str, through: Collection[str] = ()) -> dict[int, str]:
    """Frame number -> `file.py:12`, the innermost place outside installed packages; empty if the text has no tables.

    Args:
        through: places to skip in favour of their caller (a helper around `with_sharding_constraint`).
    """
    head = head_tables(text)
    tables = {name: {n: dict(_FIELD.findall(entry)) for n, entry in table.items()} for name, table in head.items()}
    files = {number: entry.strip('"') for number, entry in head["FileNames"].items()}
    frames = {}
    for number in tables["StackFrames"]:
        stack = list(_stack(number, tables, files))
        users = [frame.place for frame in stack if frame.is_users and frame.place not in through]
        if stack:
            frames[number] = next(iter(users), stack[0].place)
    return frames


def _stack(number: int, tables: dict[str, dict[int, dict[str, str]]], files: dict[int, str]) -> Iterator[Frame]:
    """A frame and its callers."""
    seen = set[int]()
    while number in tables["StackFrames"] and number not in seen:
        seen.add(number)
        entry = tables["StackFrames"][number]
        place = tables["FileLocations"].get(int(entry.get("file_location_id", 0)))
        if place is not None:
            yield Frame("", files.get(int(place.get("file_name_id", 0)), "?"), int(place.get("line", 0)))
        number = int(entry.get("parent_frame_id", 0)) - 1  # one more than it is, so that 0 can be left out


def head_tables(text: str) -> dict[str, dict[int, str]]:
    """The numbered entries of each table before the first computation."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    current: dict[int, str] | None = None
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            break
        if line in tables:
            current = tables[line]
        entry = _ENTRY.match(line)
        if entry and current is not None:
            current[int(entry[1])] = entry[2]
    return tables


def place_of(attributes: str, frames: dict[int, str]) -> str:
    """`file.py:12` of one instruction, or an empty string."""
    frame = _FRAME.search(attributes)
    if frame:
        return frames.get(int(frame[1]), "")
    own = _OWN.search(attributes)
    if own:
        return f"{own[1].rsplit('/', 1)[-1]}:{own[2]}" if own[2] else own[1].rsplit("/", 1)[-1]
    return ""
