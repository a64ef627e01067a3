"""An on-disk cache of compilers' answers in the user's cache folder: no program is compiled twice.

An answer is stored under a hash of everything it depends on: the written program, the compiler with its version, the
machine, and the format of this file.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path

from toast_cli import kept
from toast_cli.confirm.model import Compiled
from toast_cli.kept import Kept

_FORMAT = "1"


class Cache:
    """A folder of answers; with the folder `None`, nothing is stored."""

    def __init__(self, folder: Path | None) -> None:
        self._kept = Kept(folder)

    def find(self, key: str) -> Compiled | None:
        """The stored answer, marked as cached."""
        facts = self._kept.find(key)
        if facts is None:
            return None
        known = {field.name for field in fields(Compiled)}
        try:
            answer = Compiled(**{name: value for name, value in facts.items() if name in known})
        except TypeError:
            return None
        return replace(answer, cached=True)

    def keep(self, key: str, answer: Compiled) -> None:
        """Stores an answer, except for a compilation that ran out of time: a later run may allow more time."""
        if answer.outcome != "timed out":
            self._kept.keep(key, asdict(answer))


def user_cache() -> Cache:
    """The cache in `$XDG_CACHE_HOME/toast/compiled`, by default under `~/.cache`. `TOAST_CACHE=off` switches it off."""
    return Cache(kept.users_folder("compiled"))


def key_of(content: bytes, *facts: object) -> str:
    """The cache key of an answer about `content` that also depends on `facts`."""
    return kept.key_of(content, _FORMAT, *facts)
