"""Places tactics on mesh axes: each request for a tactic gets the axes it acts on, and several requests make one plan.

In: a `Problem` and requests. Out: decisions in order of priority.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod

from toast_cli.errors import UsageError
from toast_cli.hardware.model import Mesh
from toast_cli.plan.decisions import Decision, Plan, Shard
from toast_cli.plan.problem import Problem
from toast_cli.tactics.model import DoesNotApply, Look, Tactic, effective
from toast_cli.tactics.named import SEARCH, find_tactic

_HINT = "`toast tactics PROGRAM --mesh SPEC` shows what applies, and why not"


@dataclass(frozen=True)
class TacticRequest:
    """A requested tactic, and the names of its mesh axes; None where the user left them out."""

    tactic: Tactic
    axes: tuple[str, ...] | None
    text: str
    option: str

    @property
    def is_search(self) -> bool:
        return self.tactic.name == SEARCH


Placed = tuple[tuple[TacticRequest, tuple[int, ...]], ...]  # each request and its axes (numbers)


def needs_axes(requests: Sequence[TacticRequest]) -> list[int]:
    """Indices of the requests without axes, except companions, which take the axes of the preceding request."""
    return [k for k, request in enumerate(requests) if request.axes is None and not (request.tactic.companion and k)]


def fastest_first(mesh: Mesh, axes: Iterable[int]) -> tuple[int, ...]:
    """The axes by their slowest link. The first communicates most: a sum over several shrinks on each for the next."""
    return tuple(sorted(axes, key=lambda a: -min([link.bytes_per_second for link in mesh.axes[a].links], default=inf)))


def place(requests: Sequence[TacticRequest], mesh: Mesh, shares: Mapping[int, tuple[int, ...]] | None = None) -> Placed:
    """Each request and its axes (numbers), the fastest first.

    Args:
        shares: index of a request -> its axes. By default, the first request without axes takes the remaining axes,
            except the last ones, of which each later request takes one.
    """
    names, shares = mesh.names, shares or {}
    axes: list[tuple[int, ...] | None] = [
        None if request.axes is None else fastest_first(mesh, map(names.index, request.axes)) for request in requests
    ]
    axes = [shares.get(k, share) for k, share in enumerate(axes)]
    own = [k for k in needs_axes(requests) if axes[k] is None]
    left = [a for a in range(len(names)) if not any(found and a in found for found in axes)]
    if len(own) > len(left):
        request = requests[own[len(left)]]
        raise UsageError(
            f"{request.text!r} has no mesh axis left: the mesh has {', '.join(names)}", where=request.option,
            hint=f"say which, e.g. {request.text}:{names[-1]}",
        )  # fmt: skip
    first = len(left) - len(own) + 1
    for order, k in enumerate(own):
        axes[k] = fastest_first(mesh, left[:first]) if order == 0 else (left[first + order - 1],)
    placed: list[tuple[TacticRequest, tuple[int, ...]]] = []
    for k, request in enumerate(requests):
        found = axes[k]
        placed.append((request, placed[k - 1][1] if found is None else found))
    return tuple(placed)


def compose(problem: Problem, placed: Placed) -> Plan:
    """The combined decisions of the requests, in order of priority. Raises UsageError for one that does not apply."""
    batch = {k for k, group in enumerate(problem.dimensions.groups) if group.role == "batch"}
    looks = [Look(problem, tuple(a for a in axes if problem.mesh.sizes[a] > 1), find=find_tactic) for _, axes in placed]
    busy: set[int] = set()
    for (request, _), look in zip(placed, looks, strict=True):
        if request.tactic.place >= 0:
            busy.update(d.axis for d in _decide(request, look) if isinstance(d, Shard) and d.group in batch)
    parts: list[tuple[int, list[Decision]]] = []
    for (request, _), look in zip(placed, looks, strict=True):
        parts.append((request.tactic.place, _decide(request, replace(look, busy=frozenset(busy)))))
    ordered = [decision for _, decisions in sorted(parts, key=lambda part: part[0]) for decision in decisions]
    plan = effective(problem, tuple(ordered))
    if not plan and prod(problem.mesh.sizes) > 1 and any(not request.is_search for request, _ in placed):
        text = ", ".join(request.text for request, _ in placed)
        raise UsageError(f"{text}: nothing in the program changes by it", where=placed[0][0].option, hint=_HINT)
    return plan


def _decide(request: TacticRequest, look: Look) -> list[Decision]:
    if not look.axes:
        return []
    try:
        return list(request.tactic.decide(look))
    except DoesNotApply as why:
        raise UsageError(f"{request.tactic.name} does not apply: {why}", where=request.option, hint=_HINT) from None
