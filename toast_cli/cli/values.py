"""Parses values of the command line: text goes in, numbers and choices come out, or a UsageError."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

from toast_cli.errors import UsageError
from toast_cli.inputs import whole_number as read_number
from toast_cli.outputs import Format as Format

Words = TypeVar("Words", bound=StrEnum)


class CheckFormat(StrEnum):
    text = "text"
    json = "json"
    junit = "junit"
    github = "github"


class BestBy(StrEnum):
    step_time = "step_time"
    peak_memory = "peak_memory"
    communication = "communication"
    device_time = "device_time"


class Annotate(StrEnum):
    minimal = "minimal"
    full = "full"
    arguments = "arguments"


def one_of(kind: type[Words], option: str) -> Callable[[str], Words]:
    """A parser of words of `kind`; other words are a UsageError at `option`.

    It avoids the option parser's own messages, which vary between its versions.
    """

    def read(text: str) -> Words:
        from difflib import get_close_matches

        words = [member.value for member in kind]
        if text in words:
            return kind(text)
        near = get_close_matches(text.lower(), words, n=1)
        guess = f'did you mean "{near[0]}"? ' if near else ""
        raise UsageError(f'unknown word "{text}"', where=option, hint=f"{guess}choose from {', '.join(words)}")

    return read


def metavar(kind: type[StrEnum]) -> str:
    return f"<{'|'.join(member.value for member in kind)}>"


def whole_number(least: int, option: str) -> Callable[[str | int], int]:
    """A parser of integers of at least `least`; anything else is a UsageError at `option`."""

    def read(text: str | int) -> int:
        written = str(text).strip()
        number = read_number(written.removeprefix("-"))
        if number is None:
            raise UsageError(f'"{written:.40}" is not a whole number', where=option, hint=f"give {least} or more")
        number = -number if written.startswith("-") else number
        if number < least:
            raise UsageError(f"{number} is too small", where=option, hint=f"give {least} or more")
        return number

    return read


def bytes_or_none(text: str | None, option: str) -> int | None:
    """Bytes from `28GiB`; None for an option that was not given."""
    from toast_cli.units import parse_bytes

    return None if text is None else parse_bytes(text, where=option)


def seconds_or_none(text: str | None, option: str) -> float | None:
    """Positive seconds from `120ms`, `1.5s` or a bare number; None for an option that was not given."""
    from toast_cli.units import parse_seconds

    if text is None:
        return None
    seconds = parse_seconds(text, where=option)
    if seconds <= 0:
        raise UsageError(f"{text} is not a time above 0", where=option, hint="give more than 0 seconds, e.g. 120ms")
    return seconds


def parse_fraction(text: str, option: str) -> float:
    """`5%` or `0.05` -> 0.05."""
    hint = "write e.g. 5% or 0.05"
    stripped = text.strip()
    percent = stripped.endswith("%")
    try:
        number = float(stripped.removesuffix("%"))
    except ValueError:
        raise UsageError(f'"{text}" is not a percentage', where=option, hint=hint) from None
    fraction = number / 100 if percent else number
    if not 0 <= fraction < float("inf"):
        raise UsageError(f'"{text}" is not a percentage of zero or more', where=option, hint=hint)
    if not percent and fraction > 1:
        raise UsageError(f'"{text}" would be {100 * fraction:g}%', where=option, hint=f"write {text}% if you mean that")
    return fraction
