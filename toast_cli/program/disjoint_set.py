"""Disjoint sets (union-find)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)


class DisjointSets(Generic[Member]):
    """Disjoint sets of items, each identified by one of its members, the representative.

    An unknown item is a set of its own.
    """

    def __init__(self) -> None:
        self._parent: dict[Member, Member] = {}

    def find(self, item: Member) -> Member:
        """The representative of the item's set."""
        parent = self._parent
        above = parent.setdefault(item, item)
        while above != item:
            parent[item] = above = parent[above]  # path halving
            item, above = above, parent[above]
        return item

    def union(self, first: Member, second: Member) -> bool:
        """Merges the sets of two items; the representative of the first one's set stays.

        False where they were one set already.
        """
        first, second = self.find(first), self.find(second)
        self._parent[second] = first
        return first != second
