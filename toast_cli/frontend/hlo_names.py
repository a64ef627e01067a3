"""Restores paths of arguments from HLO names: XLA replaces each sign that is no letter, digit or underscore by `_`.

In: names of an entry computation's parameters, `params__layers___0___w__.1`. Out: paths in the user's trees,
`params['layers'][0]['w']`. XLA appends a number to every name. A dot right behind the argument's own name cannot be
distinguished from an underscore in it: `state.params['w']` comes back as `state_params['w']`.
"""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\.\d+$")
_WORDS = r"[A-Za-z0-9]+(?:_[A-Za-z0-9]+)*"
_ARGUMENT = re.compile(rf"(?=[A-Za-z]){_WORDS}")
# A key, an index, or an attribute in HLO's form, and its restored form.
_STEPS = (
    (re.compile(rf"__({_WORDS})__"), "['{}']"),
    (re.compile(r"_(\d+)_"), "[{}]"),
    (re.compile(rf"(?<=_)_(?=[A-Za-z])({_WORDS})"), ".{}"),
)
# Underscores that replace several signs of a key that is not a word: `output_projection/~/w`.
_MANY = re.compile(r"(?<=[A-Za-z0-9])_{3,}(?=[A-Za-z0-9])")
MOST = 400  # names longer than this are left as they are


def restored_paths(names: list[str]) -> list[str]:
    """The paths that names were made from, or the words in a name if its path is ambiguous. Returns the names unchanged
    if they are not HLO's or if two paths would be equal."""
    if not all(_NUMBER.search(name) for name in names):
        return names
    bare = [_NUMBER.sub("", name) for name in names]
    paths = [restored_path(short) or _words(short) or name for short, name in zip(bare, names, strict=True)]
    return paths if len(set(paths)) == len(set(names)) else names


def restored_path(name: str) -> str | None:
    """The path that a name was made from; None if there is none."""
    whole = _ARGUMENT.match(name) if len(name) <= MOST else None
    ends = [] if whole is None else [end for end in range(whole.end(), 0, -1) if _ARGUMENT.fullmatch(name, 0, end)]
    dead: set[int] = set()
    return next((name[:end] + rest for end in ends if (rest := _steps(name, end, dead)) is not None), None)


def _words(name: str) -> str:
    """`output_projection____w__` -> `output_projection/w`; empty for other names."""
    return _MANY.sub("/", name).strip("_") if _MANY.search(name) else ""


def _steps(name: str, start: int, dead: set[int]) -> str | None:
    """The path of the name from `start` on; None if it cannot be restored. dead: positions known to fail."""
    if start == len(name):
        return ""
    if start in dead:
        return None
    for pattern, form in _STEPS:
        for end in range(len(name), start, -1):
            found = pattern.fullmatch(name, start, end)
            if found and (rest := _steps(name, end, dead)) is not None:
                return form.format(found[1]) + rest
    dead.add(start)
    return None
