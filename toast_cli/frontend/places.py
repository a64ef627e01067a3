"""Converts an operation's location to a readable place in the user's source.

In: an MLIR location as text. Out: its stack of frames, and the place to show: the innermost frame outside
installed packages, with its function and the function called there: `model.py:28 Block.__call__ → MultiHeadAttention`.
The name stack follows in parentheses, as `op_path` shortens it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from toast_cli.frontend.name_stack import op_path
from toast_cli.printable import printable

# Frames to show: the user's innermost one, or the whole stack.
USERS, ALL = "user", "all"
FRAMES = (USERS, ALL)
TEXT = "-"  # MLIR's name for the text that it parses

_HEAD = re.compile(r'^loc\("((?:[^"\\]|\\.)*)"(?=\()')
_NAME = re.compile(r'^loc\("((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r'(?:"((?:[^"\\]|\\.)*)"\()?"((?:[^"\\]|\\.)*)":(\d+):\d+')
# Folders of installed packages and of Python's own library; their code is not the user's.
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python\d|^<")
_UNNAMED = frozenset({"", "<module>", "<lambda>"})


@dataclass(frozen=True)
class Frame:
    """One level of the call stack: `function` is its name without the enclosing functions; "" if unknown."""

    function: str
    path: str
    line: int

    @property
    def place(self) -> str:
        """`model.py:28`."""
        return f"{self.path.replace(chr(92), '/').rsplit('/', 1)[-1]}:{self.line}"

    @property
    def is_users(self) -> bool:
        """True for a frame outside installed packages."""
        return not _INSTALLED.search(self.path)

    def __str__(self) -> str:
        return f"{self.place} {self.function}" if self.function else self.place


def frames_of(location: str, file: str = TEXT) -> tuple[Frame, ...]:
    """The frames of a location, the innermost first; empty if it has no source. file: name of the program's own text,
    which locations without a source file refer to."""
    head = _HEAD.match(location)
    found = _FRAME.findall(location, head.end() if head else 0)
    return tuple(
        Frame(_function(function), file if path == TEXT else path, int(line)) for function, path, line in found
    )


def place_text(location: str, frames: str = USERS, file: str = TEXT) -> str:
    """`model.py:28 Block.__call__ → MultiHeadAttention (bwd layer_0/mul)`; the name alone where the location holds no
    source.

    Args:
        frames: "user" shows the innermost frame outside installed packages, "all" every frame, the innermost first.
        file: see `frames_of`.
    """
    stack, label = frames_of(location, file), op_path(name_stack_of(location))
    where = " ← ".join(map(str, stack)) if frames == ALL else _users(stack)
    return printable(f"{where} ({label})" if where and label else where or label)


def name_stack_of(location: str) -> str:
    """`jit(f)/layer_0/mul`: the names around an operation in a location; empty where it holds none."""
    stack = frames_of(location)
    head = _HEAD.match(location) or _NAME.match(location)
    return head[1] if head and not (stack and head[1] == stack[0].path) else ""


def users_frame(stack: tuple[Frame, ...]) -> int:
    """Index of the innermost frame outside installed packages; 0 if all are inside."""
    return next((k for k, frame in enumerate(stack) if frame.is_users), 0)


def functions_of(frames: Sequence[Frame]) -> tuple[str, ...]:
    """The user's functions on a call stack, the outermost first; the innermost file and line if none has a name."""
    users = [frame for frame in reversed(frames) if frame.is_users]
    names = [frame.function.removesuffix(".__call__") for frame in users if frame.function]
    return tuple(dict.fromkeys(names)) or tuple(frame.place for frame in users[-1:])


def _users(stack: tuple[Frame, ...]) -> str:
    if not stack:
        return ""
    number = users_frame(stack)
    called = stack[number - 1].function.removesuffix(".__call__") if number else ""
    return f"{stack[number]} → {called}" if called else str(stack[number])


def _function(name: str) -> str:
    """`build.<locals>.Block.__call__` -> `Block.__call__`; "" for a module's top level and for lambdas."""
    last = name.rpartition("<locals>.")[2]
    return "" if last in _UNNAMED else last
