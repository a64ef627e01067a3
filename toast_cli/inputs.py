"""Reads what a user gives: files and standard input, bounded in size, and the text, numbers and JSON in them.

Every file that a command reads goes through `read_file`, so no file can fill the memory or block the command forever.
"""

from __future__ import annotations

import errno
import json
import os
import reprlib
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from toast_cli.errors import InputError, ToastError

STDIN = "-"
# Size limits in bytes: of a program (unpacked), of a report or a saved plan, and of hand-written files.
PROGRAM_BYTES = 512 * 2**20
REPORT_BYTES = 64 * 2**20
TEXT_BYTES = 256 * 2**10
# Environment variable that replaces all of these limits: `TOAST_MAX_INPUT=4GiB`.
LIMIT_VARIABLE = "TOAST_MAX_INPUT"
# How long to wait for a writer on a pipe that nobody has opened for writing.
WRITER_SECONDS = 10.0
_CHUNK = 1 << 20
_DIGITS = 18  # of numbers that fit in 64 bits

Error = TypeVar("Error", bound=ToastError)


def limit_of(default: int) -> int:
    """The size limit in bytes: the environment's `TOAST_MAX_INPUT` if it is set, else `default`."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    if not text:
        return default
    from toast_cli.units import parse_bytes

    return parse_bytes(text, where=LIMIT_VARIABLE)


def too_large(where: str, limit: int, what: str = "") -> InputError:
    """The error for more than `limit` bytes."""
    size = (
        f"{limit >> 20:,} MiB" if limit >= 1 << 20 else f"{limit >> 10:,} KiB" if limit >= 1 << 10 else f"{limit} bytes"
    )
    hint = f"if it is meant to be that large, set {LIMIT_VARIABLE}, e.g. {LIMIT_VARIABLE}=4GiB"
    return InputError(f"more than {size}{what}", where=where, hint=hint)


def read_file(path: str, limit: int, *, hint: str | Callable[[], str] = "") -> bytes:
    """The content of a file (`-`: standard input) of at most `limit` bytes, or as many as `TOAST_MAX_INPUT` says.

    Raises `InputError` with `hint` when there is no such file, and also when it cannot be read, is too large, or is a
    pipe to which nobody writes.
    """
    where = "<stdin>" if path == STDIN else path
    most = limit_of(limit)
    try:
        if path == STDIN:
            if sys.stdin is None:
                raise InputError("standard input is closed", where=where, hint="give a file")
            return _bounded(sys.stdin.buffer.read, where, most)
        return _read(path, where, most)
    except FileNotFoundError:
        raise InputError("no such file", where=where, hint=hint() if callable(hint) else hint) from None
    except IsADirectoryError:
        raise InputError("this is a directory", where=where, hint="give a file") from None
    except PermissionError:
        raise InputError("no permission to read it", where=where, hint="check the file's mode and owner") from None
    except ValueError as error:
        raise InputError(f"cannot be read ({error})", where=where) from None
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror or error})", where=where) from None


def _read(path: str, where: str, limit: int) -> bytes:
    # Without O_NONBLOCK, opening a pipe waits until somebody opens its other end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        begun = b""
        if stat.S_ISFIFO(mode):
            begun = _wait_for_writer(descriptor, where)
        os.set_blocking(descriptor, True)
        if stat.S_ISREG(mode) and os.fstat(descriptor).st_size > limit:
            raise too_large(where, limit)
        return begun + _bounded(file.read, where, limit - len(begun))


def _wait_for_writer(descriptor: int, where: str) -> bytes:
    """Waits for the first bytes from a pipe and returns them.

    While no process has the pipe open for writing, a read returns no bytes; after the waiting time this raises an
    error.
    """
    deadline = time.monotonic() + WRITER_SECONDS
    while time.monotonic() < deadline:
        try:
            begun = os.read(descriptor, 1)
        except BlockingIOError:  # somebody has, and writes later
            return b""
        if begun:
            return begun
        time.sleep(0.02)
    raise InputError("nobody writes to this pipe", where=where, hint="start the program that writes to it first")


def _bounded(read: Callable[[int], bytes | None], where: str, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while chunk := read(_CHUNK):
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            raise too_large(where, limit)
    return b"".join(chunks)


def text_of(content: bytes, where: str, kind: type[Error], hint: str = "") -> str:
    """The content as UTF-8 text, without a byte order mark. Raises `kind` if it is not valid UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise kind("is not UTF-8 text", where=where, hint=hint) from None


def read_json(path: str, hint: str) -> Any:
    """The JSON value in a file of at most `REPORT_BYTES`. Raises `InputError` with `hint` for anything else.

    Half a surrogate pair, which no UTF-8 file can hold, becomes a question mark.
    """
    content = read_file(path, REPORT_BYTES, hint=hint)
    try:
        text = content.decode("utf-8-sig")
        facts = json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise InputError("is not JSON: not UTF-8 text", where=path, hint=hint) from None
    except json.JSONDecodeError as error:
        raise InputError("is not JSON", where=f"{path}:{error.lineno}:{error.colno}", hint=hint) from None
    except (RecursionError, ValueError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"is not JSON that can be read: {why}", where=path, hint=hint) from None
    return _whole_characters(facts) if "\\ud" in text or "\\uD" in text else facts


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _whole_characters(facts: Any) -> Any:
    if isinstance(facts, str):
        return facts.encode("utf-8", "replace").decode()
    if isinstance(facts, list):
        return [_whole_characters(value) for value in facts]
    if isinstance(facts, dict):
        return {_whole_characters(key): _whole_characters(value) for key, value in facts.items()}
    return facts


def typed(kind: Any, facts: Any, whole: str, name: str = "") -> Any:
    """Plain data from JSON as a value of the type `kind`: a dataclass, whose fields are of such types; a list, tuple,
    dictionary or alternative of such types; some words; or a plain type.

    A field that is missing takes its default; fields that the dataclass does not have are left out.

    Args:
        whole: "the report", for messages. name: `program.name`, the place of `facts` in it.

    Raises ValueError that names the field.
    """
    origin, inside = get_origin(kind), get_args(kind)
    if NoneType in inside:
        return None if facts is None else typed(inside[0], facts, whole, name)
    if is_dataclass(kind) and isinstance(facts, dict):
        hints, given = get_type_hints(kind), dict[str, Any]()
        for one in fields(kind):
            at = f"{name}.{one.name}".removeprefix(".")
            if one.init and one.name in facts:
                given[one.name] = typed(hints[one.name], facts[one.name], whole, at)
            elif one.init and one.default is MISSING and one.default_factory is MISSING:
                raise ValueError(f"{whole} has no {at}")
        make: Callable[..., Any] = kind  # type: ignore[assignment]
        return make(**given)
    if origin in (list, tuple) and isinstance(facts, list):
        return origin(typed(inside[0], one, whole, name) for one in facts)
    if origin is dict and isinstance(facts, dict):
        return {key: typed(inside[1], value, whole, f"{name}.{key}") for key, value in facts.items()}
    if origin is Literal:
        right = facts in inside
    else:
        plain = kind in (str, int, float, bool) and (not isinstance(facts, bool) or kind is bool)
        right = plain and isinstance(facts, (int, float) if kind is float else kind)
        right = right and (isinstance(facts, str) or abs(facts) <= sys.float_info.max)
    if not right:
        raise ValueError(f"{name} is {reprlib.repr(facts):.40}")
    return facts


def whole_number(text: str) -> int | None:
    """The number that ASCII digits denote; None for other text and for numbers of more than `_DIGITS` digits."""
    return int(text) if text.isascii() and text.isdecimal() and len(text.lstrip("0")) <= _DIGITS else None


def resolved(path: str, where: str, kind: type[Error]) -> Path:
    """The absolute path without links and dots.

    Raises `kind` if the file system cannot resolve it, e.g. for links that form a cycle.
    """
    try:
        os.getcwd()  # noqa: PTH109
    except OSError:
        raise kind("the working directory does not exist any more", hint="change to another one") from None
    try:
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.stat(path)  # noqa: PTH116  Path.resolve accepts links in circles from Python 3.13 on
        return Path(path).resolve()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise kind(f"{reason}: {path}", where=where) from None
