"""Disjoint sets (union-find): what has been said to belong together, directly or by way of others."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)


class DisjointSets(Generic[Member]):
    """Sets of items, each known by one of its members, the representative.

    An item not heard of before is a set of its own.
    """

    def __init__(self) -> None:
        self._parent: dict[Member, Member] = {}

    def find(self, item: Member) -> Member:
        """The representative of the item's set."""
        parent = self._parent
        above = parent.setdefault(item, item)
        while above != item:
            parent[item] = above = parent[above]  # halves the way for those who come later
            item, above = above, parent[above]
        return item

    def union(self, first: Member, second: Member) -> bool:
        """Joins the sets of two items; the representative of the first one's stays.

        False where they were one set already.
        """
        first, second = self.find(first), self.find(second)
        self._parent[second] = first
        return first != second
