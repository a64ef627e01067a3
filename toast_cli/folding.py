"""Fold arrays that differ only by numbers in their path: entries go in, one row per pattern comes out.

`params['layers'][0]['wq']` … `params['layers'][17]['wq']`, all of one type and sharding, become
`params['layers'][*]['wq']`, 18 of them. A pattern is exact: `*` stands for every number found in that place, anything
narrower is written out (`[1..17]`, `[3,12..165]`), and no array outside the row matches the row's pattern. Only a list
of numbers too long to read is shortened (`[0,3,…,19]`).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

_NUMBER = re.compile(r"\d+")
# A path's components: `params`, `['layers']`, `.mu`, `/kernel`.
_COMPONENT = re.compile(r"\[[^\]]*\]|[./]?[^./\[]+|[./\[]")
_READABLE_RUNS = 3
_READABLE_HEADS = 4

# The numbers in one name, in order.
Numbers = tuple[int, ...]


@dataclass(frozen=True)
class NamedArray:
    """One array. Entries fold only when `kind` (whatever must be equal: type, sharding, donation) is the same."""

    name: str
    kind: tuple[object, ...]


@dataclass(frozen=True)
class Folded:
    """A pattern and the positions (in the folded sequence, ascending) of the entries it stands for."""

    pattern: str
    members: tuple[int, ...]


def fold(entries: Sequence[NamedArray]) -> list[Folded]:
    """Group entries by pattern and kind, in order of each group's first member.

    Patterns of one kind that differ only by what they start with are one row too: a training step's parameters and its
    optimizer state are trees of one shape, written `{params,opt_state.mu,opt_state.nu}['layers'][*]['wq']`.
    """
    families: dict[str, list[int]] = defaultdict(list)
    for position, entry in enumerate(entries):
        families[_NUMBER.sub("*", entry.name)].append(position)
    rows = [row for family in families.values() for row in _fold_family(entries, family)]
    kinds: dict[tuple[object, ...], list[Folded]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.members):
        kinds[entries[row.members[0]].kind].append(row)
    return sorted((row for alike in kinds.values() for row in _fold_trees(alike)), key=lambda row: row.members)


def _fold_family(entries: Sequence[NamedArray], family: Sequence[int]) -> list[Folded]:
    """Fold entries whose names are equal but for their numbers."""
    numbers = {position: _numbers(entries[position].name) for position in family}
    everywhere = _places(numbers.values())
    kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for position in family:
        kinds[entries[position].kind].append(position)
    rows = []
    pending = list(kinds.values())
    while pending:
        members = pending.pop()
        present = _places(numbers[member] for member in members)
        matching = sum(_matches(found, present) for found in numbers.values())
        varying = [place for place, found in enumerate(present) if len(found) > 1]
        if matching == len(members) or not varying:
            rows.append(Folded(_pattern(entries[members[0]].name, present, everywhere), tuple(members)))
        else:
            # The pattern would match too much: split at the place that varies least, into the fewest rows.
            narrowest = min(varying, key=lambda place: len(present[place]))
            pending.extend(_split(members, numbers, narrowest))
    return rows


def _fold_trees(rows: Sequence[Folded]) -> list[Folded]:
    """Fold rows of one kind that end alike: each joins the rows it shares its longest ending with."""
    parts = [tuple(_COMPONENT.findall(row.pattern)) for row in rows]
    counts = Counter(ending for path in parts for ending in _endings(path))
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, path in enumerate(parts):
        shared = next((ending for ending in _endings(path) if counts[ending] > 1), ())
        # Rows that share nothing stay alone: no path is empty followed by its own number.
        groups[shared or (*path, "", str(number))].append(number)
    folded = []
    for shared, numbers in groups.items():
        if len(numbers) == 1:
            folded.append(rows[numbers[0]])
            continue
        heads = [parts[number][: -len(shared)] for number in numbers]
        members = sorted(member for number in numbers for member in rows[number].members)
        folded.append(Folded(_braced(heads) + "".join(shared), tuple(members)))
    return folded


def _endings(path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The suffixes of a path (without its first component, its first two, …), the longest first. Suffixes of numbers
    only are left out."""
    endings = [path[first:] for first in range(1, len(path))]
    return [ending for ending in endings if any(letter.isalpha() for part in ending for letter in part)]


def _braced(heads: Sequence[tuple[str, ...]]) -> str:
    """`{params,opt.mu}`; a common prefix is written in front: `params{['encoder'],['decoder']}`."""
    common = 0
    while len({head[: common + 1] for head in heads}) == 1:
        common += 1
    texts = ["".join(head[common:]) for head in heads]
    if len(texts) > _READABLE_HEADS:
        texts = [*texts[: _READABLE_HEADS - 1], "…", texts[-1]]
    return f"{''.join(heads[0][:common])}{{{','.join(texts)}}}"


def _split(members: Sequence[int], numbers: dict[int, Numbers], place: int) -> list[list[int]]:
    parts: dict[int, list[int]] = defaultdict(list)
    for member in members:
        parts[numbers[member][place]].append(member)
    return list(parts.values())


def _numbers(name: str) -> Numbers:
    return tuple(int(found) for found in _NUMBER.findall(name))


def _places(numbers: Iterable[Numbers]) -> list[set[int]]:
    """The numbers found at each place."""
    return [set(place) for place in zip(*numbers, strict=True)]


def _matches(numbers: Numbers, present: Sequence[set[int]]) -> bool:
    return all(number in place for number, place in zip(numbers, present, strict=True))


def _pattern(name: str, present: Sequence[set[int]], everywhere: Sequence[set[int]]) -> str:
    """`name` with each number that varies among the members replaced by the members' values."""
    spans = iter([_span(found, whole) for found, whole in zip(present, everywhere, strict=True)])
    return _NUMBER.sub(lambda matched: next(spans) or matched.group(), name)


def _span(present: set[int], everywhere: set[int]) -> str:
    """`*`, `1..17` or `0,2,5..7`; empty if all members have the same number, which then stays as written."""
    if len(present) == 1:
        return ""
    if present == everywhere:
        return "*"
    ordered = sorted(present)
    steps = {later - earlier for earlier, later in pairwise(ordered)}
    if len(ordered) > _READABLE_RUNS and len(steps) == 1 and steps != {1}:
        return f"{ordered[0]},{ordered[1]}..{ordered[-1]}"
    runs = [str(first) if first == last else f"{first}..{last}" for first, last in _runs(ordered)]
    if len(runs) > _READABLE_RUNS:
        runs = [*runs[: _READABLE_RUNS - 1], "…", runs[-1]]
    return ",".join(runs)


def _runs(ordered: Iterable[int]) -> list[tuple[int, int]]:
    """Maximal runs of consecutive numbers, as (first, last)."""
    runs: list[tuple[int, int]] = []
    for number in ordered:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
