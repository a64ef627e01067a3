"""An on-disk cache of slow results in the user's cache folder. Results are dataclasses of plain data; the key is a hash
of everything that they depend on.

Files are written atomically; a file that cannot be read is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from toast_cli.inputs import typed

Result = TypeVar("Result")

_ENTRIES = 2_000  # in each folder; the ones used longest ago go first


class DiskCache(Generic[Result]):
    """A folder of results of one type; with the folder `None`, nothing is stored."""

    def __init__(self, folder: Path | None, kind: type[Result]) -> None:
        self._folder, self._kind = folder, kind

    def find(self, key: str) -> Result | None:
        """The cached result of a key; None if there is none, or the key is empty."""
        if self._folder is None or not key:
            return None
        path = self._folder / f"{key}.json"
        try:
            found: Result = typed(self._kind, json.loads(path.read_bytes()), "the result")
        except (OSError, ValueError, RecursionError):
            return None
        with suppress(OSError):
            os.utime(path)
        return found

    def store(self, key: str, result: Any) -> None:
        """Stores a result under a key; does nothing if the key is empty or the folder cannot be written."""
        if self._folder is None or not key:
            return
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self._folder, suffix=".tmp")
            with os.fdopen(descriptor, "w") as file:
                json.dump(asdict(result), file)
            Path(temporary).replace(self._folder / f"{key}.json")
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        assert self._folder is not None
        entries = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in entries[:-_ENTRIES]:
            path.unlink(missing_ok=True)


def users_folder(name: str) -> Path | None:
    """The folder `$XDG_CACHE_HOME/toast/NAME`, by default under `~/.cache`; None if `TOAST_CACHE=off` is set."""
    if os.environ.get("TOAST_CACHE", "").lower() in ("off", "0", "no"):
        return None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        home = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:  # nobody's home
        return None
    return home / "toast" / name


def key_of(content: bytes, *facts: object) -> str:
    """The cache key of a result that depends on `content` and on `facts`."""
    digest = hashlib.sha256(content)
    digest.update(repr(facts).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()
