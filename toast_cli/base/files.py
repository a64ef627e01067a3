"""Files: what a user gives is read within bounds, outputs are checked before and written atomically after a long
computation, and slow results are kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from toast_cli.base.errors import InputError, ToastError, UsageError
from toast_cli.base.units import parse_bytes

# ---------------------------------------------------------------- reading
# Reads what a user gives: files and standard input, bounded in size, and the text, numbers and JSON in them.
#
# Every file that a command reads goes through `read_file`, so no file can fill the memory.

STDIN = "-"
# Size limits in bytes: of a program (unpacked), of a report or a saved plan, and of hand-written files.
PROGRAM_BYTES = 512 * 2**20
REPORT_BYTES = 64 * 2**20
TEXT_BYTES = 256 * 2**10
# Environment variable that replaces all of these limits: `TOAST_MAX_INPUT=4GiB`.
LIMIT_VARIABLE = "TOAST_MAX_INPUT"
_CHUNK = 1 << 20
_DIGITS = 18  # of numbers that fit in 64 bits

Error = TypeVar("Error", bound=ToastError)


def limit_of(default: int) -> int:
    """The size limit in bytes: the environment's `TOAST_MAX_INPUT` if it is set, else `default`."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    if not text:
        return default
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

    Raises `InputError` with `hint` when there is no such file, and also when it cannot be read, or is too large.
    """
    where = "<stdin>" if path == STDIN else path
    most = limit_of(limit)
    try:
        if path == STDIN:
            if sys.stdin is None:
                raise InputError("standard input is closed", where=where, hint="give a file")
            return _bounded(sys.stdin.buffer.read, where, most)
        with Path(path).open("rb", buffering=0) as file:
            return _bounded(file.read, where, most)
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
    """The JSON value in a file of at most `REPORT_BYTES`. Raises `InputError` with `hint` for anything else."""
    content = read_file(path, REPORT_BYTES, hint=hint)
    try:
        return json.loads(content.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise InputError("is not JSON: not UTF-8 text", where=path, hint=hint) from None
    except json.JSONDecodeError as error:
        raise InputError("is not JSON", where=f"{path}:{error.lineno}:{error.colno}", hint=hint) from None
    except (RecursionError, ValueError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"is not JSON that can be read: {why}", where=path, hint=hint) from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def typed(kind: Any, facts: Any, document: str, name: str = "") -> Any:
    """Plain data from JSON as a value of the type `kind`: a dataclass, whose fields are of such types; a list, tuple,
    dictionary or alternative of such types; some words; or a plain type.

    A field that is missing takes its default; fields that the dataclass does not have are left out.

    Args:
        document: "the report", for messages. name: `program.name`, the place of `facts` in it.

    Raises ValueError that names the field.
    """
    origin, inside = get_origin(kind), get_args(kind)
    if NoneType in inside:
        return None if facts is None else typed(inside[0], facts, document, name)
    if is_dataclass(kind) and isinstance(facts, dict):
        hints, values = get_type_hints(kind), dict[str, Any]()
        for field in fields(kind):
            path = f"{name}.{field.name}".removeprefix(".")
            if field.init and field.name in facts:
                values[field.name] = typed(hints[field.name], facts[field.name], document, path)
            elif field.init and field.default is MISSING and field.default_factory is MISSING:
                raise ValueError(f"{document} has no {path}")
        make: Callable[..., Any] = kind  # type: ignore[assignment]
        return make(**values)
    if origin in (list, tuple) and isinstance(facts, list):
        return origin(typed(inside[0], entry, document, name) for entry in facts)
    if origin is dict and isinstance(facts, dict):
        return {key: typed(inside[1], value, document, f"{name}.{key}") for key, value in facts.items()}
    if origin is Literal:
        right = facts in inside
    else:
        plain = kind in (str, int, float, bool) and (not isinstance(facts, bool) or kind is bool)
        right = plain and isinstance(facts, (int, float) if kind is float else kind)
        right = right and (isinstance(facts, str) or abs(facts) <= sys.float_info.max)
    if not right:
        raise ValueError(f"{name} is {reprlib.repr(facts):.40}")
    return facts


def read_whole_number(text: str) -> int | None:
    """The number that ASCII digits denote; None for other text and for numbers of more than `_DIGITS` digits."""
    return int(text) if text.isascii() and text.isdecimal() and len(text.lstrip("0")) <= _DIGITS else None


def resolved(path: str, where: str, kind: type[Error]) -> Path:
    """The absolute path without links and dots.

    Raises `kind` if the file system cannot resolve it.
    """
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise kind(f"{reason}: {path}", where=where) from None


# ---------------------------------------------------------------- writing
# Output files: checks their paths before the long computation and writes their contents atomically after it.

STDOUT = "-"


class Format(StrEnum):
    stablehlo = "stablehlo"
    bytecode = "bytecode"
    hlo = "hlo"
    specs = "specs"
    python = "python"
    jax_export = "jax_export"


_FORMATS = {
    ".mlir": Format.stablehlo,
    ".mlirbc": Format.bytecode,
    ".stablehlo": Format.stablehlo,
    ".hlo": Format.hlo,
    ".json": Format.specs,
    ".py": Format.python,
    ".jax_export": Format.jax_export,
}
_COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class Target:
    """An output: a path or `-`, as given with `option`. folder_of: for a folder, its JSON file that lists its
    `files`, those that the next output may replace."""

    option: str
    path: str
    folder_of: str = ""

    @property
    def is_stdout(self) -> bool:
        return self.path == STDOUT


def is_folder(path: str | None) -> bool:
    """True if an output is a folder: it ends in a slash, or is one."""
    return path is not None and (path.endswith("/") or Path(path).is_dir())


def output_format(path: str | None, given: Format | None) -> Format:
    """The format of the output at `path`: `given` if set, else that of the file's extension; StableHLO on stdout."""
    if given is not None or path is None or path == STDOUT:
        return given or Format.stablehlo
    name = Path(path)
    suffix = Path(name.stem).suffix if name.suffix in _COMPRESSED else name.suffix
    if suffix not in _FORMATS:
        raise UsageError(
            f'the extension "{suffix}" names no output format'
            if suffix
            else "no extension to tell the output format by",
            where=path,
            hint=f"give --format, or one of {', '.join(_FORMATS)} (compressed with {' or '.join(_COMPRESSED)})",
        )
    return _FORMATS[suffix]


def program_name(path: str) -> str:
    """The name of a program's file without the extensions of formats and compressions."""
    name = Path(path if path != STDIN else "stdin")
    while name.suffix in (*_FORMATS, *_COMPRESSED, ".txt"):
        name = name.with_suffix("")
    return name.name


def extension_of(format: Format) -> str:
    """The extension of a file in this format."""
    return next((extension for extension, written in _FORMATS.items() if written is format), ".mlir")


def check_targets(targets: Sequence[Target], inputs: Sequence[str]) -> None:
    """Raise UsageError for a target that cannot be written, is one of the `inputs`, or is another target too.

    Writability is tried, not guessed: a file is made beside the target and removed again.
    """
    seen: dict[Path | str, str] = {}
    for target in targets:
        key = STDOUT if target.is_stdout else resolved(target.path, target.option, UsageError)
        if key in seen:
            raise UsageError(f"{seen[key]} and {target.option} both write to {target.path}", hint="give two files")
        seen[key] = target.option
        if not target.is_stdout:
            others = [other.path for other in targets if other is not target and target.folder_of]
            try:
                _check_path(target, [*inputs, *others])
            except OSError as error:  # a path that is too long, say
                raise _cannot_write(target, error) from None


def write_target(target: Target, content: bytes) -> None:
    """Write `content`, compressed as the extension says.

    The file appears complete or not at all; links are followed.
    """
    if target.is_stdout:
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    path = resolved(target.path, target.option, UsageError)
    content = _compress(content, path.suffix)
    try:
        if path.exists() and not path.is_file():  # a device or a pipe: nothing to replace
            path.write_bytes(content)
        else:
            _replace(path, content)
    except OSError as error:
        raise _cannot_write(target, error) from None


def write_folder(target: Target, files: Mapping[str, bytes]) -> None:
    """Writes a folder of these files, in place of an earlier one; it appears complete or not at all."""
    path = resolved(target.path, target.option, UsageError)
    new, old = _beside(path), _beside(path)
    try:
        new.mkdir()
        for name, content in files.items():
            (new / name).write_bytes(content)
        _check_folder(target, ())  # again: the search took long
        if path.exists():
            path.rename(old)
        new.rename(path)
    except OSError as error:
        raise _cannot_write(target, error) from None
    finally:
        if old.exists() and not path.exists():  # also where Ctrl-C came in between
            old.rename(path)
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _check_path(target: Target, inputs: Sequence[str]) -> None:
    """Raises UsageError for an output that is an input, or has no folder; OSError where it cannot be written."""
    path = Path(target.path)
    if target.folder_of:
        _check_folder(target, inputs)
    if not target.path or (path.is_dir() and not target.folder_of):
        raise UsageError("is a directory" if target.path else "no file name", where=target.option, hint="give a file")
    for name in inputs:
        if name != STDOUT and path.exists() and _same_file(path, name):
            raise UsageError(f"{target.path} is the input itself", where=target.option, hint="write to another file")
    folder = resolved(target.path, target.option, UsageError).parent
    if not folder.is_dir():
        raise UsageError(f"there is no directory {folder}", where=target.option, hint=f"make it: mkdir -p {folder}")
    if path.exists() and not path.is_file() and not target.folder_of:
        return
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(13, "Permission denied")
    probe = _beside(path)
    probe.touch(exist_ok=False)
    probe.unlink()


def _check_folder(target: Target, others: Sequence[str]) -> None:
    """Raises UsageError unless a folder is new, empty, or holds files of an earlier output alone, none of `others`."""
    path, hint = resolved(target.path, target.option, UsageError), "give a new folder, or an empty one"
    used = [
        name for name in others if name != STDOUT and resolved(name, target.option, UsageError).is_relative_to(path)
    ]
    if used or Path.cwd().is_relative_to(path):
        what = f"{used[0]} is in it" if used else "the working directory is in it"
        raise UsageError(f"{target.path} cannot be replaced: {what}", where=target.option, hint=hint)
    own = set[str]()
    with suppress(InputError, TypeError, KeyError):  # no list: no file is known to be of an earlier output
        own.update(read_json(str(path / target.folder_of), "")["files"])
    strangers = [file.name for file in path.iterdir() if file.name not in own or file.is_dir()] if path.exists() else []
    if strangers:
        what = f"{target.path} has other files than those of an earlier output"
        raise UsageError(f"{what}: {strangers[0]}", where=target.option, hint=hint)


def _same_file(path: Path, name: str) -> bool:
    try:
        return Path(name).exists() and path.samefile(name)
    except (OSError, ValueError):  # the error is reported when the file is read
        return False


def _replace(path: Path, content: bytes) -> None:
    """Writes beside `path`, then renames. Killed at any moment, this leaves the old file or the new one, and at most a
    hidden temporary file."""
    temporary = _beside(path)
    try:
        with temporary.open("xb") as file:
            file.write(content)
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """A new hidden name in the folder of `path`."""
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")


def _compress(content: bytes, suffix: str) -> bytes:
    """The content in the compression of a file's extension."""
    if suffix == ".gz":
        import gzip

        # No time stamp: equal programs make equal files.
        return gzip.compress(content, mtime=0)
    if suffix == ".zst":
        import zstandard

        return zstandard.ZstdCompressor(level=9).compress(content)
    return content


def _cannot_write(target: Target, error: OSError) -> UsageError:
    return UsageError(f"cannot write {target.path}: {error.strerror or error}", where=target.option)


# ---------------------------------------------------------------- the cache
# An on-disk cache of slow results in the user's cache folder. Results are dataclasses of plain data; the key is a hash
# of everything that they depend on.
#
# Files are written atomically; a file that cannot be read is ignored.

Result = TypeVar("Result")

_ENTRIES = 2_000  # in each folder; the ones used longest ago go first


class DiskCache(Generic[Result]):
    """A folder of results of one type; with the folder `None`, nothing is stored."""

    def __init__(self, folder: Path | None, kind: type[Result]) -> None:
        self._folder, self._kind = folder, kind

    def find(self, key: str) -> Result | None:
        """The cached result of a key; None if there is none, or the key is empty."""
        if self._folder is None or not key:
            return None
        path = self._folder / f"{key}.json"
        try:
            result: Result = typed(self._kind, json.loads(path.read_bytes()), "the result")
        except (OSError, ValueError, RecursionError):
            return None
        with suppress(OSError):
            os.utime(path)
        return result

    def store(self, key: str, result: Any) -> None:
        """Stores a result under a key; does nothing if the key is empty or the folder cannot be written."""
        if self._folder is None or not key:
            return
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            _replace(self._folder / f"{key}.json", json.dumps(asdict(result)).encode())
            entries = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for path in entries[:-_ENTRIES]:
                path.unlink(missing_ok=True)


def users_folder(name: str) -> Path | None:
    """The folder `$XDG_CACHE_HOME/toast/NAME`, by default under `~/.cache`; None if `TOAST_CACHE=off` is set."""
    if os.environ.get("TOAST_CACHE", "").lower() in ("off", "0", "no"):
        return None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        home = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:  # nobody's home
        return None
    return home / "toast" / name


def key_of(content: bytes, *facts: object) -> str:
    """The cache key of a result that depends on `content` and on `facts`."""
    digest = hashlib.sha256(content)
    digest.update(repr(facts).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()
