"""Trees of named parts with an amount each, such as time by module. Enters: paths with amounts. Leaves: `Branch`es."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# Parts smaller than this fraction of the whole are merged.
_LEAST = 1e-3
_CHILDREN = 40


@dataclass
class Branch:
    """amount: sum over all below it. kind: of all below it, if they have the same one; else empty. note: more words."""

    name: str
    amount: float = 0.0
    kind: str = ""
    note: str = ""
    below: dict[str, Branch] = field(default_factory=dict)

    def add(self, path: Iterable[str], amount: float, kind: str, note: str = "") -> None:
        """Adds a leaf's amount to all branches on its path."""
        self.kind = kind if not self.amount or self.kind == kind else ""
        self.amount += amount
        head, *rest = [*path] or [""]
        if head:
            self.below.setdefault(head, Branch(head)).add(rest, amount, kind, note)
        else:
            self.note = self.note or note


def plain(branch: Branch, whole: float | None = None) -> dict[str, object]:
    """The tree as JSON, the largest parts first, without levels that hold a single part of the same name.

    Args:
        whole: amount of the root.
    """
    whole = branch.amount if whole is None else whole
    parts = sorted(branch.below.values(), key=lambda part: (-part.amount, part.name))
    shown = [part for part in parts[:_CHILDREN] if part.amount >= _LEAST * whole]
    rest = parts[len(shown) :]
    found: dict[str, object] = {"n": branch.name, "a": float(f"{branch.amount:.6g}")}
    if branch.kind:
        found["k"] = branch.kind
    if branch.note:
        found["t"] = branch.note
    below = [plain(part, whole) for part in shown]
    if rest and shown:
        kinds = {part.kind for part in rest}
        other = Branch(
            f"{len(rest)} smaller", sum(part.amount for part in rest), kinds.pop() if len(kinds) == 1 else ""
        )
        below.append(plain(other, whole))
    if below:
        found["c"] = below
    return found
