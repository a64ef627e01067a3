"""Paths of arguments and results in the user's trees, and patterns that mean some of them."""

from __future__ import annotations

import re

_KEY = re.compile(r"""\[['"]([^'"]*)['"]\]|\[(\d+)\]|\.([A-Za-z_]\w*)""")


def matches(pattern: str, path: str, index: int, kind: str = "arg") -> bool:
    """Whether a pattern means this argument or result, by its number, its path, or its path in the style of Flax and
    Orbax.

    `*` (or `.*`) is anything; brackets and quotes, of which paths are full, are themselves.
    """
    if pattern == f"{kind}{index}":
        return True
    expression = ".*".join(map(re.escape, pattern.replace(".*", "*").split("*")))
    return bool(path) and any(re.fullmatch(expression, name) for name in (path, slash_path(path)))


def slash_path(path: str) -> str:
    """`params['layers'][0].kernel` -> `params/layers/0/kernel`."""
    return _KEY.sub(lambda key: "/" + (key[1] or key[2] or key[3]), path)
