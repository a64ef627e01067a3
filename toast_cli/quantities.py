"""Formats quantities for people: numbers go in, short text with a unit comes out.

Three significant digits throughout.
"""

from __future__ import annotations

import math
import re

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
    whole = round(count)
    return f"{whole:,}" if whole and abs(count - whole) < 0.01 * count else f"{count:,.2g}"


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
    return next((one for one in shorter if len(one) <= room), join_location(place, passes, ""))


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
