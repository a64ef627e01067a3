"""Paths of arguments and results in the user's trees, and patterns that match them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

_KEY = re.compile(r"""\[['"]([^'"]*)['"]\]|\[(\d+|\*)\]|\.([A-Za-z_]\w*)""")
# Special parts of a pattern: `*`, `{a,b}`, and number lists such as `1..17` and `0,3`.
_SPECIAL = re.compile(
    r"(?P<any>\.?\*)|\{(?P<either>[^{}]*)\}|(?P<numbers>\d+(?:\.\.\d+)?(?:,\d+(?:\.\.\d+)?)+|\d+\.\.\d+)"
)
_LAYER = re.compile(r"(?<=/)\d+(?=/|$)")
_WORD = re.compile(r"[a-z]\w*")
MOST_NUMBERS = 10_000  # in one range
NEAREST = 4


def matches(pattern: str, path: str, index: int, kind: str = "arg") -> bool:
    """Whether a pattern matches this argument or result, by its number (`arg3`), its path as JAX writes it, or its path
    with slashes.

    `*` (or `.*`) is any text, `{a,b}` is one of these texts, and `1..17` or `0,3` one of these numbers, so that the
    paths in reports are patterns. All other characters match themselves, including brackets and quotes.
    """
    if pattern == f"{kind}{index}":
        return True
    names = (path, slash_path(path))
    return bool(path) and (pattern in names or any(re.fullmatch(_expression(pattern), name) for name in names))


def slash_path(path: str) -> str:
    """`params['layers'][0].kernel` -> `params/layers/0/kernel`; `[*]` for any number becomes `/*`."""
    return _KEY.sub(lambda key: "/" + (key[1] or key[2] or key[3]), path)


def shown_path(path: str, index: int) -> str:
    """The name of an argument in reports: its path with slashes, or `arg3` if it has none."""
    return slash_path(path) or f"arg{index}"


def nearest_paths(pattern: str, paths: Iterable[str]) -> str:
    """The arguments whose paths are most similar to a pattern without a match: `params/layers/*/wq, params/embed`.

    Layers are one path. Words in common count first, then letters.
    """
    wanted = set(_WORD.findall(pattern.lower()))

    def likeness(name: str) -> tuple[int, float]:
        return len(wanted.intersection(_WORD.findall(name.lower()))), SequenceMatcher(None, pattern, name).ratio()

    names = dict.fromkeys(_LAYER.sub("*", shown_path(path, k)) for k, path in enumerate(paths))
    return ", ".join(sorted(names, key=likeness, reverse=True)[:NEAREST])


def _expression(pattern: str) -> str:
    """A pattern as a regular expression."""
    text, end = "", 0
    for special in _SPECIAL.finditer(pattern):
        text += re.escape(pattern[end : special.start()]) + _meaning(special)
        end = special.end()
    return text + re.escape(pattern[end:])


def _meaning(special: re.Match[str]) -> str:
    if special["any"]:
        return ".*"
    if special["either"] is not None:
        return f"(?:{'|'.join(map(_expression, special['either'].split(',')))})"
    numbers: list[int] = []
    for run in special["numbers"].split(","):
        first, _, last = run.partition("..")
        numbers += range(int(first), int(last or first) + 1)[:MOST_NUMBERS]
    return f"(?:{'|'.join(map(str, numbers))})"
