"""Makes a `Request` of options as users write them, on the command line and in Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, TypeVar

from toast_cli.base.errors import UsageError
from toast_cli.base.files import read_whole_number as read_number
from toast_cli.base.units import parse_bytes, parse_seconds
from toast_cli.plan.decisions import parse_goal
from toast_cli.request import AUTO, OPTIONS, Option, OptionKind, Request

Words = TypeVar("Words", bound=StrEnum)

WITH_OPTION = "--with"


def parse_with(text: str) -> tuple[str, int]:
    """`decode.mlir:64` -> the program and how often it runs for one run of the first; once without a number."""
    path, colon, number = text.rpartition(":")
    if not colon or not number.removeprefix("-").isdigit():
        return text, 1
    runs = read_number(number)
    if not runs or not path:
        raise UsageError(f'"{text:.60}" runs {number} times', where=WITH_OPTION, hint="write e.g. decode.mlir:64")
    return path, runs


def make_request(program: str, mesh: str, given: Mapping[str, Any]) -> Request:
    """The request that options ask for.

    Args:
        given: values by the names of options, `memory_limit` or `memory-limit`, as they were written; None where one
            was not given. Names that belong to no option of a run are passed over, so a command can hand over all of
            its parameters.

    Raises UsageError for values that cannot be read, and for options that do not go together.
    """
    written = {name.replace("_", "-"): value for name, value in given.items() if value is not None}
    request = Request(
        program,
        mesh,
        **{name: _read(option, written[option.key]) for name, option in OPTIONS.items() if option.key in written},
    )
    if request.complete and request.plan is None:
        raise UsageError("--complete adds to a saved plan", hint="give that with --plan FILE")
    if request.plan is not None and (request.tactics or request.strategy):
        raise UsageError("is a plan already", where="--plan", hint="give it without --tactic and --strategy")
    if request.confirm <= 0 and (request.confirm_with is not None or request.confirm_seconds is not None):
        raise UsageError(
            "there is nothing to confirm",
            where="--confirm-with" if request.confirm_with is not None else "--confirm-budget",
            hint="say with --confirm N how many plans to compile",
        )
    parse_goal(request.minimise, request.subject_to)  # raises for errors that do not depend on the program
    return request


def request_of_keywords(program: str, mesh: str, keywords: Mapping[str, Any]) -> Request:
    """The request that keyword arguments of `toast.partition` ask for: the fields of `Request`, with values as the
    command line takes them, or of Python's own types.

    Raises UsageError for other names, too.
    """
    for name in keywords.keys() - OPTIONS.keys():
        flags = {option.key.replace("-", "_"): field for field, option in OPTIONS.items()}
        near = [flags[name]] if name in flags else get_close_matches(name, OPTIONS, n=1)
        guess = f'did you mean "{near[0]}"? ' if near else ""
        raise UsageError(f'unknown option "{name}"', where="toast", hint=f"{guess}choose from {', '.join(OPTIONS)}")
    return make_request(program, mesh, {OPTIONS[name].key: value for name, value in keywords.items()})


def _read(option: Option, value: Any) -> Any:
    """Converts a value to the type in `Request`. Raises UsageError at the option's flag."""
    if isinstance(value, Mapping):  # in Python: mesh_shape={"data": 8}, dims={"b": 256}
        pairs = [f"{name}={size}" for name, size in value.items()]
        value = ",".join(pairs) if option.kind is OptionKind.TEXT else pairs
    others: Any = str if isinstance(option.kind, type) else object
    types: dict[Any, Any] = {OptionKind.TEXT: str | os.PathLike, OptionKind.TEXTS: Iterable, OptionKind.FLAG: bool}
    if not isinstance(value, types.get(option.kind, others)):
        raise UsageError(f"takes no {type(value).__name__}: {value!r:.60}", where=option.flag, hint="give text")
    match option.kind:
        case OptionKind.TEXT:
            return os.fspath(value)
        case OptionKind.TEXTS:
            return (value,) if isinstance(value, str) else tuple(value)
        case OptionKind.PLANS if value == "auto":
            return AUTO
        case OptionKind.WHOLE | OptionKind.PLANS:
            return whole_number(option.least, option.flag)(value)
        case OptionKind.BYTES:
            return bytes_or_none(value, option.flag)
        case OptionKind.SECONDS:
            return seconds_or_none(value, option.flag)
        case type() as kind:
            return one_of(kind, option.flag)(value).value
        case _:
            return value


def one_of(kind: type[Words], option: str) -> Callable[[str], Words]:
    """A parser of words of `kind`; other words are a UsageError at `option`.

    It avoids the option parser's own messages, which vary between its versions.
    """

    def read(text: str) -> Words:
        words = [member.value for member in kind]
        if text in words:
            return kind(text)
        near = get_close_matches(text.lower(), words, n=1)
        guess = f'did you mean "{near[0]}"? ' if near else ""
        raise UsageError(f'unknown word "{text}"', where=option, hint=f"{guess}choose from {', '.join(words)}")

    return read


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


def bytes_or_none(text: str | int | None, option: str) -> int | None:
    """Bytes from `28GiB`; None for an option that was not given."""
    return None if text is None else parse_bytes(text, where=option)


def seconds_or_none(text: str | float | None, option: str) -> float | None:
    """Positive seconds from `120ms`, `1.5s` or a bare number; None for an option that was not given."""
    if text is None:
        return None
    seconds = parse_seconds(text, where=option)
    if seconds <= 0:
        raise UsageError(f"{text} is not a time above 0", where=option, hint="give more than 0 seconds, e.g. 120ms")
    return seconds
