"""Text for people: quantities with a unit, in three significant digits, and one row for arrays whose paths differ by
numbers only.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from toast_cli.program.model import DTYPE_BITS

UNKNOWN = "n/a"

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNT_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_PASS = "(?:fwd|bwd|remat)"
_LOCATION = re.compile(rf"(?P<place>.+?) \((?P<passes>(?:{_PASS}(?:\+{_PASS})*(?= |\)))?) ?(?P<path>.*)\)")
_ARRAY_TYPE = re.compile(r"(?P<dtype>.+)\[(?P<shape>[\d,]*)\]")


def format_bytes(count: float) -> str:
    """`12.1 GiB`: binary units, from bytes."""
    if not math.isfinite(count):
        return UNKNOWN
    value, unit = abs(count), 0
    while value >= 1000 and unit < len(_BYTE_UNITS) - 1:
        value /= 1024
        unit += 1
    sign = "-" if count < 0 else ""
    return f"{sign}{value:.0f} B" if unit == 0 else f"{sign}{_three_digits(value)} {_BYTE_UNITS[unit]}"


def format_seconds(seconds: float) -> str:
    """`23.4 ms`: the largest unit with a non-zero integer part, minutes from 10 minutes on.

    Less than a nanosecond is `0 s`, because it is a rounding error.
    """
    if not math.isfinite(seconds):
        return UNKNOWN
    if abs(seconds) >= 600:
        return f"{_three_digits(seconds / 60)} min"
    for scale, unit in _SECOND_UNITS:
        # 0.9995 so that what would round up to 1000 of a unit is 1 of the next.
        if abs(seconds) >= 0.9995 * scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return "0 s"


def format_flops(flops: float) -> str:
    """`312 TFLOP`: decimal prefixes, a number of operations (not a rate)."""
    if not math.isfinite(flops):
        return UNKNOWN
    value, prefix = flops, 0
    while value >= 999.5 and prefix < len(_COUNT_PREFIXES) - 1:
        value /= 1000
        prefix += 1
    return f"{value:.0f} FLOP" if prefix == 0 else f"{_three_digits(value)} {_COUNT_PREFIXES[prefix]}FLOP"


def format_count(count: float) -> str:
    """`9,205`; `0.5` for an op that runs every other time."""
    rounded = round(count)
    return f"{rounded:,}" if rounded and abs(count - rounded) < 0.01 * count else f"{count:,.2g}"


def format_price(amount: float) -> str:
    """Three significant digits, in whatever currency: `0.0123`, `4.20`, `1,230`."""
    digits = 2 - math.floor(math.log10(amount)) if amount > 0 else 0
    return f"{round(amount, digits):,.{max(0, digits)}f}"


def format_percent(fraction: float) -> str:
    """`51.2%` from 0.512; whole per cents from 10 times on."""
    if not math.isfinite(fraction):
        return UNKNOWN
    percent = 100 * fraction
    return f"{percent:,.0f}%" if abs(percent) >= 1000 else f"{percent:.1f}%"


def format_ratio(ratio: float) -> str:
    """`12.9×`."""
    return f"{_three_digits(ratio)}×" if math.isfinite(ratio) else UNKNOWN


def format_plural(count: int, noun: str) -> str:
    """`1 op`, `9,205 ops`, `76 classes`."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{format_count(count)} {noun}{ending}"


def format_sharding(sharding: list[list[str]]) -> str:
    """`(data, None, data+model)`: per dimension the mesh axes that split it, major to minor; `replicated` when none
    does.
    """
    if not any(sharding):
        return "replicated"
    return f"({', '.join('+'.join(axes) or 'None' for axes in sharding)})"


def split_location(location: str) -> tuple[str, str, str]:
    """`model.py:47 attend (bwd layer_0/mul)` -> its place, the pass (`bwd+remat` for two) and the path."""
    matched = _LOCATION.fullmatch(location)
    return (matched["place"], matched["passes"], matched["path"]) if matched else (location, "", "")


def join_location(place: str, passes: str, path: str) -> str:
    """Joins the three results of `split_location` again."""
    names = f"{passes} {path}".strip()
    return f"{place} ({names})" if names else place


def shorten_location(location: str, room: int) -> str:
    """`model.py:47 attend (bwd layer_0/attention/dot_general)` in at most `room` columns, if possible.

    The file, the line, the function and the pass stay; of the path, as many of its last components as fit.
    """
    if len(location) <= room:
        return location
    place, passes, path = split_location(location)
    parts = path.split("/")
    shorter = [join_location(place, passes, "/".join(["…", *parts[first:]])) for first in range(1, len(parts))]
    return next((text for text in shorter if len(text) <= room), join_location(place, passes, ""))


def type_bytes(array_type: str) -> int:
    """Bytes of a whole array, given its type in a report (`bf16[2048,2048]`); 0 if that is not an array type."""
    matched = _ARRAY_TYPE.fullmatch(array_type)
    if matched is None:
        return 0
    elements = math.prod(int(size) for size in matched["shape"].split(",") if size)
    return (elements * DTYPE_BITS.get(matched["dtype"], 32) + 7) // 8


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    if magnitude >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"


# ---------------------------------------------------------------- arrays in one row
# Fold arrays that differ only by numbers in their path: entries go in, one row per pattern comes out.
#
# `params['layers'][0]['wq']` … `params['layers'][17]['wq']`, all of one type and sharding, become
# `params['layers'][*]['wq']`, 18 of them. A pattern is exact: `*` stands for every number found in that place,
# anything narrower is written out (`[1..17]`, `[3,12..165]`), and no array outside the row matches the row's pattern.
# Only a list of numbers too long to read is shortened (`[0,3,…,19]`).

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
        matching = sum(all(n in place for n, place in zip(ns, present, strict=True)) for ns in numbers.values())
        varying = [place for place, values in enumerate(present) if len(values) > 1]
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
    return tuple(int(digits) for digits in _NUMBER.findall(name))


def _places(numbers: Iterable[Numbers]) -> list[set[int]]:
    """The numbers found at each place."""
    return [set(place) for place in zip(*numbers, strict=True)]


def _pattern(name: str, present: Sequence[set[int]], everywhere: Sequence[set[int]]) -> str:
    """`name` with each number that varies among the members replaced by the members' values."""
    spans = map(_span, present, everywhere)
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
