"""Where in the user's source an HLO instruction comes from.

Enters: a module's text, whose head may hold tables of file names, locations and stack frames. Leaves: `file.py:12` by
frame number. An instruction either names its frame (`stack_frame_id=3`) or carries `source_file` and `source_line`
itself.
"""

from __future__ import annotations

import re

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ENTRY = re.compile(r"^(\d+) (.*)$")
_FIELD = re.compile(r"(\w+)=(\d+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_OWN = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')


def places(text: str) -> dict[int, str]:
    """Frame number -> `file.py:12`, the innermost place; empty where the text has no tables."""
    tables = head_tables(text)
    files = {number: entry.strip('"').rsplit("/", 1)[-1] for number, entry in tables["FileNames"].items()}
    lines = {}
    for number, entry in tables["FileLocations"].items():
        fields = dict(_FIELD.findall(entry))
        lines[number] = f"{files.get(int(fields.get('file_name_id', 0)), '?')}:{fields.get('line', '?')}"
    frames = {}
    for number, entry in tables["StackFrames"].items():
        at = int(dict(_FIELD.findall(entry)).get("file_location_id", 0))
        if at in lines:
            frames[number] = lines[at]
    return frames


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
