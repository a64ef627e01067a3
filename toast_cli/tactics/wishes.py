"""Tactics as users ask for them: `--tactic fsdp:data`, `--strategy 'fsdp x megatron'`; text in, decisions that a search
starts from out.

What tactics decide is fixed: it comes first in every plan and no search takes it back. The search completes the plan on
all axes; with `search:AXIS` it may only touch the axes named so; after a strategy there is nothing left to search.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from toast_cli.errors import UsageError
from toast_cli.plan.decisions import Decision, Plan, Shard
from toast_cli.plan.problem import Problem
from toast_cli.tactics.files import find_in_file
from toast_cli.tactics.model import DoesNotApply, Look, Tactic, effective
from toast_cli.tactics.named import SEARCH, find_tactic

_WISH = re.compile(r"(?:(?P<file>.+\.(?:ya?ml|py)):)?(?P<name>[^:]+?)(?::(?P<axes>[^:]*))?")
_PARTS = re.compile(r"\s*\+\s*|\s+[x×]\s+")
_SEARCH_IT = Tactic(SEARCH, "what the search finds", lambda look: ())


@dataclass(frozen=True)
class Wish:
    """A tactic and the names of the mesh axes it is wanted over; None where the user left them out."""

    tactic: Tactic
    axes: tuple[str, ...] | None
    text: str
    option: str

    @property
    def is_search(self) -> bool:
        return self.tactic.name == SEARCH


@dataclass(frozen=True)
class Wishes:
    """What `--tactic` and `--strategy` ask for. whole: nothing is left to the search."""

    wishes: tuple[Wish, ...] = ()
    whole: bool = False

    def check_axes(self, meshes: Sequence[Sequence[str]]) -> None:
        """Raises UsageError where no mesh (given by its axis names) has all axes named."""
        named = {axis: wish for wish in self.wishes for axis in wish.axes or ()}
        known = list(dict.fromkeys(name for names in meshes for name in names))
        for axis, wish in named.items():
            if axis not in known:
                raise UsageError(
                    f"unknown mesh axis {axis!r} in {wish.text!r}",
                    where=wish.option,
                    hint=f"this mesh has {', '.join(known)}",
                )
        if not any(set(named) <= set(names) for names in meshes):
            raise UsageError(f"no mesh shape has all of {', '.join(named)}", where="--mesh-shape")

    def suit(self, names: Sequence[str]) -> bool:
        """Whether a mesh with these axes has all that are named."""
        return all(axis in names for wish in self.wishes for axis in wish.axes or ())

    def state(self, problem: Problem) -> Problem:
        """The problem with what the tactics decide fixed.

        Raises UsageError for a tactic that does not apply, and says why.
        """
        if not self.wishes:
            return problem
        fixed = compose(problem, place(self.wishes, problem.mesh.names))
        open_axes = {axis for wish in self.wishes if wish.is_search for axis in wish.axes or ()}
        closed = frozenset(
            k for k, name in enumerate(problem.mesh.names) if self.whole or (open_axes and name not in open_axes)
        )
        return replace(problem, fixed=problem.canonical(fixed), closed=closed)


def parse_wishes(tactics: Sequence[str] = (), strategy: str | None = None) -> Wishes:
    """What the options ask for. Raises ToastError for names and files that are none."""
    if strategy is None:
        return Wishes(tuple(_wish(text, "--tactic") for text in tactics))
    if tactics:
        raise UsageError("--strategy is a whole plan", where="--tactic", hint="give --tactic or --strategy")
    wishes = tuple(_wish(text, "--strategy") for text in parts_of(strategy))
    if any(wish.is_search for wish in wishes):
        raise UsageError(
            "a strategy leaves nothing to the search", where="--strategy", hint="give --tactic search:AXIS"
        )
    return Wishes(wishes, whole=True)


def parts_of(strategy: str) -> list[str]:
    """The tactics that a strategy names: `fsdp:data+megatron:model`."""
    return _PARTS.split(strategy.strip())


def file_of(text: str) -> str | None:
    """The file that one tactic of `--tactic` or `--strategy` comes from; None for a tactic of toast's own."""
    matched = _WISH.fullmatch(text.strip())
    return None if matched is None else matched["file"]


def _wish(text: str, option: str) -> Wish:
    matched = _WISH.fullmatch(text.strip())
    if matched is None:
        raise UsageError(f"cannot read {text!r}", where=option, hint="write NAME:AXIS, e.g. fsdp:data")
    name, axes = matched["name"].strip(), matched["axes"]
    if matched["file"]:
        tactic = find_in_file(matched["file"], name)
    else:
        tactic = _SEARCH_IT if name == SEARCH else find_tactic(name, option)
    names = None if axes is None else tuple(part.strip() for part in axes.split(","))
    if names is not None and ("" in names or len(set(names)) < len(names)):
        raise UsageError(
            f"cannot read the axes of {text!r}", where=option, hint="write e.g. fsdp:data or fsdp:data,model"
        )
    if tactic is _SEARCH_IT and names is None:
        raise UsageError("search takes the axes it may use", where=option, hint="write e.g. search:model")
    return Wish(tactic, names, text.strip(), option)


def place(wishes: Sequence[Wish], names: Sequence[str]) -> list[tuple[Wish, tuple[int, ...]]]:
    """Each wish and its axes (numbers). Where none are named: a companion takes those of the wish before it, one tactic
    alone all, and of several each of the later ones one of the last axes.
    """
    axes: list[tuple[int, ...] | None] = [
        None if wish.axes is None else tuple(names.index(a) for a in wish.axes) for wish in wishes
    ]
    own = [k for k, wish in enumerate(wishes) if axes[k] is None and not (wish.tactic.companion and k)]
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
    return placed


def compose(problem: Problem, placed: Sequence[tuple[Wish, tuple[int, ...]]]) -> Plan:
    """What the wishes decide together, in order of priority. Raises UsageError for one that does not apply."""
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


_HINT = "`toast tactics PROGRAM --mesh SPEC` shows what applies, and why not"


def _decide(wish: Wish, look: Look) -> list[Decision]:
    if not look.axes:
        return []
    try:
        return list(wish.tactic.decide(look))
    except DoesNotApply as why:
        raise UsageError(f"{wish.tactic.name} does not apply: {why}", where=wish.option, hint=_HINT) from None
