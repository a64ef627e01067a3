"""The largest size of a symbolic dimension with which a program surely fits and keeps the user's bounds: `--dim b=max`.

The sizes in question are powers of two, or those of a range (`b=64..4096*2`, `b=64..4096+64`), as far as they keep the
constraints that the file states. They are tried by bisection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toast_cli.base.errors import InputError, UsageError
from toast_cli.frontend.symbolic import DIM_OPTION, LARGEST, keeps, parse_dims
from toast_cli.program.quantities import format_bytes, format_count, format_percent
from toast_cli.report.model import Report, SizesFacts, TriedSizeFacts
from toast_cli.report.terminal import bound_text

MAX = "max"
_RANGE = re.compile(r"(\d{1,12})\s*\.\.\s*(\d{1,12})\s*(?:([*+])\s*(\d{1,12}))?")
# The largest factor of powers of two, where these alone keep no constraint; sizes in a range, at most.
_FACTORS, _MOST = 4096, 100_000


@dataclass(frozen=True)
class SizeRange:
    """Sizes of symbol `name` from `first` to `last`; each is `step` times the one before, or `step` more if `adds`.
    text: as the user wrote it."""

    name: str
    first: int
    last: int
    step: int
    adds: bool
    text: str


def split_dims(texts: Sequence[str]) -> tuple[tuple[str, ...], SizeRange | None]:
    """`("b=max", "s=4096")` -> the sizes that are given, `("s=4096",)`, and those of which the largest is wanted.

    Raises UsageError for what are no sizes, and for several symbols of which the largest is wanted.
    """
    ranges = [size_range for text in texts if (size_range := _range(text)) is not None]
    given = tuple(text for text in texts if _range(text) is None)
    sizes = parse_dims(given)
    for wanted in ranges:
        parse_dims([f"{wanted.name}={wanted.first}"])
        if wanted.name in sizes:
            what = f"both {wanted.name}={sizes[wanted.name]} and {wanted.text} are given"
            raise UsageError(what, where=DIM_OPTION, hint="give one")
    if len(ranges) > 1:
        what = f"the largest size of both {ranges[0].name} and {ranges[1].name} is asked for"
        raise UsageError(what, where=DIM_OPTION, hint="give all but one of them a size")
    return given, ranges[0] if ranges else None


def _range(text: str) -> SizeRange | None:
    name, _, sizes = (part.strip() for part in text.partition("="))
    if sizes == MAX:
        return SizeRange(name, 1, LARGEST, 2, False, f"{name}={MAX}")
    matched = _RANGE.fullmatch(sizes)
    if matched is None:
        return None
    adds, step = matched[3] == "+", int(matched[4] or 2)
    first, last = int(matched[1]), int(matched[2])
    few = 0 < first <= last <= LARGEST and step > (not adds) and (not adds or (last - first) // step < _MOST)
    if not few:
        hint = "write its first and last size and the factor or step between, e.g. b=64..4096*2 or b=64..4096+64"
        raise UsageError(f'"{text:.60}" is not a range of sizes', where=DIM_OPTION, hint=hint)
    return SizeRange(name, first, last, step, adds, text)


def sizes_in(wanted: SizeRange, given: Sequence[str], constraints: Sequence[str], devices: int) -> list[int]:
    """The sizes to try, in order: those of the range that keep the constraints. For `b=max` they are powers of two
    times the odd part of the number of devices, or if none of these keeps the constraints, times the least size that
    does.

    Args:
        given: sizes of the other symbols. constraints: those that the file states, `mod(b, 8) == 0`.

    Raises UsageError if there are none.
    """
    others = parse_dims(given)

    def kept(sizes: Sequence[int]) -> list[int]:
        return [size for size in sizes if all(keeps(text, {**others, wanted.name: size}) for text in constraints)]

    if wanted.adds:
        sizes = kept(range(wanted.first, wanted.last + 1, wanted.step))
    elif wanted.text.endswith(MAX):
        sizes = kept(_powers(devices // (devices & -devices), wanted))
        sizes = sizes or [n for least in kept(range(1, _FACTORS))[:1] for n in kept(_powers(least, wanted))]
    else:
        sizes = kept(_powers(wanted.first, wanted))
    if not sizes:
        what = f"no size of {wanted.text} keeps the constraints that the file states: {'; '.join(constraints)}"
        raise UsageError(what, where=DIM_OPTION, hint=f"give a range, e.g. {wanted.name}=96..9600+96")
    return sizes


def _powers(first: int, wanted: SizeRange) -> list[int]:
    sizes = [first]
    while sizes[-1] * wanted.step <= wanted.last:
        sizes.append(sizes[-1] * wanted.step)
    return sizes


def tried_size(size: int, report: Report) -> TriedSizeFacts:
    """The figures of a plan with this size."""
    predicted = report.predicted
    broken = [bound for bound in report.goal.bounds if not bound.holds]
    why = ""
    if report.fit != "yes":
        needs = "may need more than" if report.fit == "unsure" else f"needs {format_bytes(predicted.peak_bytes)} of"
        why = f"{needs} {format_bytes(predicted.limit_bytes)}"
    elif broken:
        why = f"has {'; '.join(map(bound_text, broken))}"
    rate = predicted.tokens_per_second or predicted.samples_per_second
    return TriedSizeFacts(size, predicted.step_seconds, predicted.peak_bytes, rate, why)


def try_sizes(sizes: Sequence[int], attempt: Callable[[int], TriedSizeFacts | None]) -> list[TriedSizeFacts]:
    """The sizes that were tried, in order: by bisection up to the largest that fits, then down from there as long as a
    smaller one has more tokens a second.

    Args:
        sizes: in order. attempt: the figures with a size; None to stop, as the user wishes.

    Raises InputError if the program cannot have the smallest size, and KeyboardInterrupt if it stops before one fits.
    """
    tried: dict[int, TriedSizeFacts] = {}

    def fits(place: int) -> bool:
        if sizes[place] not in tried:
            try:
                facts = attempt(sizes[place])
            except InputError as error:  # too large, for its shapes or for any machine
                if not place:
                    raise
                facts = TriedSizeFacts(sizes[place], why=error.what)
            if facts is None:
                raise KeyboardInterrupt
            tried[sizes[place]] = facts
        return not tried[sizes[place]].why

    low, high = -1, len(sizes)  # the size at `low` fits, the one at `high` does not
    try:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        while low > 0 and fits(low - 1) and tried[sizes[low - 1]].rate > tried[sizes[low]].rate:
            low -= 1
    except KeyboardInterrupt:
        if all(facts.why for facts in tried.values()):
            raise
    return [tried[size] for size in sorted(tried)]


def chosen_sizes(wanted: SizeRange, tried: Sequence[TriedSizeFacts], *, interrupted: bool = False) -> SizesFacts:
    """The largest size that fits, or if none does, the smallest; with the reason in words. interrupted: larger ones
    were not all tried."""
    fitting = [facts for facts in tried if not facts.why]
    name, chosen = wanted.name, fitting[-1] if fitting else tried[0]
    larger = next((facts for facts in tried if facts.size > chosen.size), chosen)
    of = "size" if wanted.text.endswith(MAX) else f"of {wanted.text}"
    beyond = f"{name}={larger.size} {larger.why}"
    if not fitting:
        text, beyond = f"no {of} surely fits in the program as written: {name}={chosen.size} {chosen.why}", ""
    elif interrupted:
        text, beyond = f"{name}={chosen.size} surely fits; the search for a larger size was interrupted", ""
    elif larger is chosen:
        text, beyond = f"{name}={chosen.size}, the largest {of}, surely fits", ""
    else:
        text = f"{name}={chosen.size} is the largest {of} that surely fits: {beyond}"
    best = max(fitting, key=lambda facts: facts.rate, default=chosen)
    if best.rate > chosen.rate:
        more = format_percent(best.rate / chosen.rate - 1)
        text += f"; with {name}={best.size}, {format_count(round(best.rate))} a second are {more} more"
    return SizesFacts(name, chosen.size, text, beyond, list(tried))
