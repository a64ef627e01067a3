"""An on-disk cache of slow results in the user's cache folder. Results are plain data; the key is a hash of everything
that they depend on.

Files are written atomically; a file that cannot be read is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

_ENTRIES = 2_000  # in each folder; the ones used longest ago go first


class Kept:
    """A cache folder; with the folder `None`, nothing is stored."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def find(self, key: str) -> dict[str, Any] | None:
        """The cached facts of a key, or None."""
        if self._folder is None:
            return None
        path = self._folder / f"{key}.json"
        try:
            facts = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return None
        with suppress(OSError):
            os.utime(path)
        return facts if isinstance(facts, dict) else None

    def keep(self, key: str, facts: dict[str, Any]) -> None:
        """Stores facts under a key; does nothing if the folder cannot be written."""
        if self._folder is None:
            return
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self._folder, suffix=".tmp")
            with os.fdopen(descriptor, "w") as file:
                json.dump(facts, file)
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
