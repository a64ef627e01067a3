"""Disjoint sets of dimension names, in which a name may be an ordered product of others.

Every dimension starts as one name. `unify` makes two names one; `unify_product` declares a name the product of others,
major to minor. Splitting a name splits its whole class, and two different splits of one class meet in their common
refinement. Where the cut points do not form a divisibility chain, the rest is not unified.
"""

from __future__ import annotations

from toast_cli.program.disjoint_set import DisjointSets


class Names:
    """The dimension names of one analysis; mutable.

    A name is an int; `sizes[name]` its number of elements. `find` returns the representative of all equal names.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._same: DisjointSets[int] = DisjointSets()
        self.find = self._same.find
        self._parts: dict[int, list[int]] = {}  # root -> names it is the product of, major to minor

    def new(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def leaves(self, name: int) -> list[int]:
        """The unsplit names (roots) whose ordered product this name is, major to minor; itself where it is not
        split.
        """
        root = self.find(name)
        parts = self._parts.get(root)
        if parts is None:
            return [root]
        return [leaf for part in parts for leaf in self.leaves(part)]

    def unify(self, left: int, right: int) -> bool:
        """Makes two names of equal size one; False where their splits do not line up all the way."""
        left, right = self.find(left), self.find(right)
        if left == right:
            return True
        if right in self._parts:
            if left in self._parts:
                aligned = self._align(self.leaves(left), self.leaves(right))
                if aligned:
                    self._same.union(left, right)
                return aligned
            left, right = right, left
        self._same.union(left, right)  # `right` is not split; whatever `left` is, it becomes that
        return True

    def unify_product(self, whole: int, parts: list[int]) -> bool:
        """Declares `whole` the ordered product of `parts`; False where that does not line up all the way."""
        root = self.find(whole)
        if len(parts) == 1:
            return self.unify(root, parts[0])
        leaves = [leaf for part in parts for leaf in self.leaves(part)]
        if root in self._parts:
            return self._align(self.leaves(root), leaves)
        if root in leaves:
            return False
        self._parts[root] = list(parts)
        return True

    def _align(self, left: list[int], right: list[int]) -> bool:
        """Unifies two ordered products leaf by leaf, splitting the larger leaf where one divides the other."""
        left, right = left[::-1], right[::-1]  # so that the major ends can be popped
        while left and right:
            a, b = left.pop(), right.pop()
            leaves_a, leaves_b = self.leaves(a), self.leaves(b)
            if len(leaves_a) > 1 or len(leaves_b) > 1:  # split meanwhile
                left.extend(reversed(leaves_a))
                right.extend(reversed(leaves_b))
                continue
            size_a, size_b = self.sizes[a], self.sizes[b]
            if size_a == size_b:
                self.unify(a, b)
            elif size_b % size_a == 0:
                left.append(a)
                right.extend(reversed(self._split(b, size_a)))
            elif size_a % size_b == 0:
                left.extend(reversed(self._split(a, size_b)))
                right.append(b)
            else:
                return False
        return True

    def _split(self, leaf: int, major: int) -> list[int]:
        """Cuts an unsplit name into `major` times the rest."""
        root = self.find(leaf)
        parts = [self.new(major), self.new(self.sizes[root] // major)]
        self._parts[root] = parts
        return parts
