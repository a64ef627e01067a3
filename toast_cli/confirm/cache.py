"""Answers of compilers, kept in the user's cache folder: nothing is compiled twice.

An answer is stored under a hash of everything it depends on: the written program, the compiler with its version, the
machine, and the format of this file. Files are written whole or not at all; one that cannot be read counts as not
there.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path

from toast_cli.confirm.model import Compiled

_FORMAT = "1"
_ENTRIES = 2_000  # kept; the ones used longest ago go first


class Cache:
    """A folder of answers; `None` remembers nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def find(self, key: str) -> Compiled | None:
        """The stored answer, marked as cached."""
        if self._folder is None:
            return None
        path = self._folder / f"{key}.json"
        try:
            facts = json.loads(path.read_bytes())
            known = {field.name for field in fields(Compiled)}
            answer = Compiled(**{name: value for name, value in facts.items() if name in known})
        except (OSError, ValueError, TypeError, AttributeError):
            return None
        with suppress(OSError):
            os.utime(path)
        return replace(answer, cached=True)

    def keep(self, key: str, answer: Compiled) -> None:
        """Stores an answer. A compilation that ran out of time is not one: more time may be given another day."""
        if self._folder is None or answer.outcome == "timed out":
            return
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self._folder, suffix=".tmp")
            with os.fdopen(descriptor, "w") as file:
                json.dump(asdict(answer), file)
            Path(temporary).replace(self._folder / f"{key}.json")
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        assert self._folder is not None
        entries = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in entries[:-_ENTRIES]:
            path.unlink(missing_ok=True)


def user_cache() -> Cache:
    """The cache in `$XDG_CACHE_HOME/toast/compiled`, by default under `~/.cache`. `TOAST_CACHE=off` switches it off."""
    if os.environ.get("TOAST_CACHE", "").lower() in ("off", "0", "no"):
        return Cache(None)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        home = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:  # nobody's home
        return Cache(None)
    return Cache(home / "toast" / "compiled")


def key_of(content: bytes, *facts: object) -> str:
    """The name of an answer about `content`, given everything else that it depends on."""
    digest = hashlib.sha256(content)
    digest.update(repr((_FORMAT, *facts)).encode())
    return digest.hexdigest()
