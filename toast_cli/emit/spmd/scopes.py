"""Caches values by block, for reuse in the same and inner blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any


class Scopes:
    """Values that are made once and reused later in the same block, or in blocks within it."""

    def __init__(self) -> None:
        self._blocks: list[dict[Hashable, Any]] = [{}]

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of a key; `make` makes it in this block if it does not exist yet."""
        for block in self._blocks:
            if key in block:
                return block[key]
        made = self._blocks[-1][key] = make()
        return made

    @contextmanager
    def within(self, *, alone: bool = False) -> Iterator[None]:
        """Opens an inner block while the `with` block runs; `alone`: it cannot reuse outer values."""
        before = self._blocks
        self._blocks = [{}] if alone else [*before, {}]
        try:
            yield
        finally:
            self._blocks = before
