"""Parses values of the command line that are no options of a run."""

from __future__ import annotations

from enum import StrEnum

from toast_cli.errors import UsageError
from toast_cli.outputs import Format as Format


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


def metavar(kind: type[StrEnum]) -> str:
    return f"<{'|'.join(member.value for member in kind)}>"


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
