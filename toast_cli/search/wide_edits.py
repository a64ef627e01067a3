"""Edits of several decisions at once: of all about an axis, of all about one family of groups.

What helps one layer, or one axis, may help only where it is done in all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations, permutations
from typing import Any

from toast_cli.plan.decisions import Plan, Shard
from toast_cli.search.edits import Edit, Move, Shards, like
from toast_cli.search.units import Units


def families(decided: Units, plan: Plan) -> list[Edit]:
    """Everything that changes where all decisions about one family of groups hold that are about the same axes, or
    moves them to other axes: layers that are alike have groups of their own, and what helps one of them may help
    only where it is done in all."""
    groups = decided.problem.dimensions.groups
    alike: dict[tuple[int, int], list[Shards]] = defaultdict(list)
    for unit in decided.held(plan):
        if shards := tuple(d for d in unit if isinstance(d, Shard)):
            alike[groups[shards[0].group].family, decided.part_of[shards[0].axis]].append(shards)
    taken = {d[:2] for d in plan if isinstance(d, Shard)}
    found: list[Edit] = []
    for (_, part), units in alike.items():
        if len(units) > 1:
            found += [*_in_other_scopes(decided, units), *_on_other_axes(decided, units, part, taken)]
    return found


def _in_other_scopes(decided: Units, units: list[Shards]) -> Iterator[Edit]:
    """Edits by which all of these units come to leave the same ops, as far as each may."""
    changed: dict[tuple[int, int], list[tuple[Shards, Move]]] = defaultdict(list)
    for unit in units:
        for to in decided.problem.decisions.variants(unit[0]):
            if isinstance(to, Shard) and to.sides == unit[0].sides:
                changed[to.unless, to.only].append((unit, like(to, unit)))
    for changes in changed.values():
        if len(changes) > 1:
            yield Edit(tuple(d for out, _ in changes for d in out), tuple(d for _, into in changes for d in into))


def _on_other_axes(decided: Units, units: list[Shards], part: int, taken: set[tuple[int, int]]) -> Iterator[Edit]:
    """Edits by which these units come to be about the axes of another part of the grain, as far as they may and are
    not `taken`."""
    offers = decided.problem.decisions.offers
    for other, axes in enumerate(decided.parts):
        if other == part or len(axes) != len(decided.parts[part]):
            continue
        place = decided.places(part, other)
        moved = [(d, d._replace(axis=place[d.axis])) for unit in units for d in unit]
        moved = [(d, to) for d, to in moved if offers(to) and to[:2] not in taken]
        if len(moved) > 1:
            yield Edit(tuple(d for d, _ in moved), tuple(to for _, to in moved))


def about_axes(decided: Units, plan: Plan) -> list[Edit]:
    """Edits of all decisions about an axis together, which may become those about another axis, and of all about
    two, of those of what is split over both, or of each group that is. Of a coarse grain, parts stand for axes.
    """
    decisions, part_of, offers = plan[len(decided.problem.fixed) :], decided.part_of, decided.problem.decisions.offers
    parts = sorted({part_of[d.axis] for d in decisions})
    if len(parts) < 2:
        return []
    found = [Edit(move, move) for move in (tuple(d for d in decisions if part_of[d.axis] == p) for p in parts)]
    alike = [
        (one, other) for one, other in permutations(parts, 2) if len(decided.parts[one]) == len(decided.parts[other])
    ]
    for one, other in alike:
        if one > other:
            continue
        place = decided.places(one, other) | decided.places(other, one)
        either = tuple(d for d in decisions if d.axis in place)
        of_groups = Counter(about for about, *_ in {(d[0], type(d), part_of[d.axis]) for d in either})
        both = tuple(d for d in either if of_groups[d[0]] > 1)
        for moved in dict.fromkeys((either, both)):
            into = tuple(d._replace(axis=place[d.axis]) for d in moved)
            if into and all(map(offers, into)):
                found.append(Edit(moved, into))
        units = [
            shards for unit in decided.together(both) if (shards := tuple(d for d in unit if isinstance(d, Shard)))
        ]
        pairs = (pair for pair in combinations(units, 2) if pair[0][0].group == pair[1][0].group)
        found += [edit for pair in pairs for edit in _crosswise(*pair) if all(map(offers, edit.into))]
    for one, other in alike:
        place = decided.places(one, other)
        out = tuple(d for d in decisions if part_of[d.axis] == other)
        into = tuple(filter(offers, (d._replace(axis=place[d.axis]) for d in decisions if d.axis in place)))
        if into and into != out:
            found.append(Edit(out, into))
    return found


def _crosswise(one: Shards, other: Shards) -> list[Edit]:
    """Edits of two units about one group that exchange where they hold, their sides, or their axes."""
    pair = (*one, *other)
    scopes = (
        *_with(one, unless=other[0].unless, only=other[0].only),
        *_with(other, unless=one[0].unless, only=one[0].only),
    )
    sides = *_with(one, sides=other[0].sides), *_with(other, sides=one[0].sides)
    found = [scopes, sides]
    if len(one) == len(other):
        swapped = zip(pair, (*other, *one), strict=True)
        found.append(tuple(d._replace(axis=to.axis) for d, to in swapped))
    return [Edit(pair, into) for into in dict.fromkeys(found) if into != pair]


def _with(unit: Shards, **fields: Any) -> Shards:
    return tuple(d._replace(**fields) for d in unit)
