"""Places tactics on mesh axes: each wish for a tactic gets the axes it acts on, and several wishes make one plan.

In: a `Problem` and wishes. Out: decisions in order of priority.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from toast_cli.errors import UsageError
from toast_cli.plan.decisions import Decision, Plan, Shard
from toast_cli.plan.problem import Problem
from toast_cli.tactics.model import DoesNotApply, Look, Tactic, effective
from toast_cli.tactics.named import SEARCH, find_tactic

_HINT = "`toast tactics PROGRAM --mesh SPEC` shows what applies, and why not"


@dataclass(frozen=True)
class Wish:
    """A requested tactic, and the names of its mesh axes; None where the user left them out."""

    tactic: Tactic
    axes: tuple[str, ...] | None
    text: str
    option: str

    @property
    def is_search(self) -> bool:
        return self.tactic.name == SEARCH


Placed = tuple[tuple[Wish, tuple[int, ...]], ...]  # each wish and its axes (numbers)


def needs_axes(wishes: Sequence[Wish]) -> list[int]:
    """Indices of the wishes without axes, except companions, which take the axes of the preceding wish."""
    return [k for k, wish in enumerate(wishes) if wish.axes is None and not (wish.tactic.companion and k)]


def place(wishes: Sequence[Wish], names: Sequence[str], shares: Mapping[int, tuple[int, ...]] | None = None) -> Placed:
    """Each wish and its axes (numbers).

    Args:
        shares: index of a wish without axes -> its axes. By default, the first such wish takes the remaining axes,
            except the last ones, of which each later wish takes one.
    """
    axes: list[tuple[int, ...] | None] = [
        (shares or {}).get(k) if wish.axes is None else tuple(names.index(a) for a in wish.axes)
        for k, wish in enumerate(wishes)
    ]
    own = [k for k in needs_axes(wishes) if axes[k] is None]
    left = [a for a in range(len(names)) if not any(found and a in found for found in axes)]
    if len(own) > len(left):
        wish = wishes[own[len(left)]]
        raise UsageError(
            f"{wish.text!r} has no mesh axis left: the mesh has {', '.join(names)}", where=wish.option,
            hint=f"say which, e.g. {wish.text}:{names[-1]}",
        )  # fmt: skip
    first = len(left) - len(own) + 1
    for order, k in enumerate(own):
        axes[k] = tuple(left[:first]) if order == 0 else (left[first + order - 1],)
    placed: list[tuple[Wish, tuple[int, ...]]] = []
    for k, wish in enumerate(wishes):
        found = axes[k]
        placed.append((wish, placed[k - 1][1] if found is None else found))
    return tuple(placed)


def compose(problem: Problem, placed: Placed) -> Plan:
    """The combined decisions of the wishes, in order of priority. Raises UsageError for one that does not apply."""
    batch = {k for k, group in enumerate(problem.dimensions.groups) if group.role == "batch"}
    looks = [Look(problem, tuple(a for a in axes if problem.mesh.sizes[a] > 1), find=find_tactic) for _, axes in placed]
    busy: set[int] = set()
    for (wish, _), look in zip(placed, looks, strict=True):
        if wish.tactic.place >= 0:
            busy.update(d.axis for d in _decide(wish, look) if isinstance(d, Shard) and d.group in batch)
    parts: list[tuple[int, list[Decision]]] = []
    for (wish, _), look in zip(placed, looks, strict=True):
        parts.append((wish.tactic.place, _decide(wish, replace(look, busy=frozenset(busy)))))
    ordered = [decision for _, decisions in sorted(parts, key=lambda part: part[0]) for decision in decisions]
    plan = effective(problem, tuple(ordered))
    if not plan and prod(problem.mesh.sizes) > 1 and any(not wish.is_search for wish, _ in placed):
        text = ", ".join(wish.text for wish, _ in placed)
        raise UsageError(f"{text}: nothing in the program changes by it", where=placed[0][0].option, hint=_HINT)
    return plan


def _decide(wish: Wish, look: Look) -> list[Decision]:
    if not look.axes:
        return []
    try:
        return list(wish.tactic.decide(look))
    except DoesNotApply as why:
        raise UsageError(f"{wish.tactic.name} does not apply: {why}", where=wish.option, hint=_HINT) from None
