"""Output files: checks their paths before the long computation and writes their contents atomically after it."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from toast_cli.errors import UsageError
from toast_cli.inputs import resolved

STDOUT = "-"


class Format(StrEnum):
    stablehlo = "stablehlo"
    bytecode = "bytecode"
    hlo = "hlo"
    spmd = "spmd"
    spmd_hlo = "spmd-hlo"
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
    """An output: a path or `-`, as given with `option`."""

    option: str
    path: str

    @property
    def is_stdout(self) -> bool:
        return self.path == STDOUT


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
            _check_file(target, inputs)


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


def _check_file(target: Target, inputs: Sequence[str]) -> None:
    try:
        _check_path(target, inputs)
    except OSError as error:  # a path that is too long, say
        raise _cannot_write(target, error) from None


def _check_path(target: Target, inputs: Sequence[str]) -> None:
    path = Path(target.path)
    if not target.path or path.is_dir():
        raise UsageError("is a directory" if target.path else "no file name", where=target.option, hint="give a file")
    for name in inputs:
        if name != STDOUT and path.exists() and _same_file(path, name):
            raise UsageError(f"{target.path} is the input itself", where=target.option, hint="write to another file")
    folder = resolved(target.path, target.option, UsageError).parent
    if not folder.is_dir():
        raise UsageError(f"there is no directory {folder}", where=target.option, hint=f"make it: mkdir -p {folder}")
    try:
        if path.exists() and not path.is_file():
            return
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
        probe, descriptor = _open_beside(path)
        probe.unlink()
        os.close(descriptor)
    except OSError as error:
        raise _cannot_write(target, error) from None


def _same_file(path: Path, name: str) -> bool:
    try:
        return Path(name).exists() and path.samefile(name)
    except (OSError, ValueError):  # the error is reported when the file is read
        return False


def _replace(path: Path, content: bytes) -> None:
    """Write beside `path`, then rename. Killed at any moment, this leaves the old file or the new one, and at most a
    hidden temporary file that the next write to `path` removes.
    """
    _remove_leftovers(path)
    temporary, descriptor = _open_beside(path)
    try:
        with os.fdopen(descriptor, "wb") as file:  # the lock on it lasts until the file has its name
            file.write(content)
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _open_beside(path: Path) -> tuple[Path, int]:
    """(a new temporary file in the folder of `path`, a descriptor that is open on it and holds a lock on it)."""
    while True:
        temporary = path.with_name(f"{_temporary_prefix(path)}{secrets.token_hex(4)}.tmp")
        # 0o666 less the umask, as for any new file.
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        with suppress(OSError):  # file systems without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:  # else somebody took it for a leftover before it was locked
            return temporary, descriptor
        os.close(descriptor)


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files of writers that were killed: those that nobody holds a lock on."""
    prefix = _temporary_prefix(path)
    for name in os.listdir(path.parent):  # noqa: PTH208 (no need of a Path for each)
        if not name.startswith(prefix) or not name.endswith(".tmp"):
            continue
        leftover = path.with_name(name)
        with suppress(OSError):
            descriptor = os.open(leftover, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()
            finally:
                os.close(descriptor)


def _temporary_prefix(path: Path) -> str:
    return f".{path.name[:100]}."


def _compress(content: bytes, suffix: str) -> bytes:
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
