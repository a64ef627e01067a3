"""What has been made in the blocks around, for all who come later to read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any


class Scopes:
    """What is made once and read by all who come later in the same block, or in blocks within it."""

    def __init__(self) -> None:
        self._blocks: list[dict[Hashable, Any]] = [{}]

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What stands under this key; it is made here where there is nothing yet."""
        for block in self._blocks:
            if key in block:
                return block[key]
        made = self._blocks[-1][key] = make()
        return made

    @contextmanager
    def within(self, *, alone: bool = False) -> Iterator[None]:
        """A block within, while the `with` block runs; `alone`: which makes everything anew."""
        before = self._blocks
        self._blocks = [{}] if alone else [*before, {}]
        try:
            yield
        finally:
            self._blocks = before
