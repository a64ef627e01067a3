"""Recognises a program from its content and parses it: what enters are bytes, what leaves is an `ir.Module`.

Formats, by the name that reports show:

* `stablehlo`: MLIR text. `bytecode`: MLIR bytecode. `portable`: a StableHLO portable artifact (versioned bytecode).
* `jax.export`: what `jax.export.Exported.serialize` writes (a FlatBuffer around a portable artifact).
* `hlo-text`: HLO as XLA prints it. `hlo-proto`: a serialized HloModuleProto, or an HloProto or HloSnapshot around one.

Each may be compressed with gzip or zstd. Everything binary and everything that XLA parses goes through a child process.
"""

from __future__ import annotations

import gzip
import io
import re
import sys
import zlib
from pathlib import Path
from typing import Any

from toast_cli.errors import InputError
from toast_cli.frontend.convert import convert
from toast_cli.frontend.diagnostics import first_error
from toast_cli.frontend.foreign import foreign_hint
from toast_cli.frontend.wire import flatbuffer_bytes, message_fields

STDIN = "-"
GZIP, ZSTD, BYTECODE = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"ML\xefR"
PORTABLE_PRODUCER = b"StableHLO_v"
# Layers of compression that are unpacked; more is no accident.
MAX_LAYERS = 4
# MLIR's parser descends once per bracket and overflows its stack at some 5,000; programs have a few dozen.
MAX_NESTING = 1_000
# Number of the field `mlir_module_serialized` of jax.export's FlatBuffer schema.
EXPORT_MODULE_SLOT = 13
# Field numbers of HloModuleProto: its computations; and of what wraps it: HloProto, HloSnapshot and HloModuleProtoWithConfig.
PROTO_COMPUTATIONS, PROTO_WRAPPED = 3, 1

FORMATS_HINT = (
    "toast reads StableHLO text (`jax.jit(f).lower(…).as_text()`), MLIR bytecode, StableHLO portable artifacts, "
    "jax.export files, HLO text and HLO protos, each also with gzip or zstd"
)
_FOREIGN = (
    (b"PK\x03\x04", "a zip archive"), (b"\xfd7zXZ\x00", "compressed with xz"), (b"BZh", "compressed with bzip2"),
    (b"\x93NUMPY", "a NumPy array file"), (b"\x80\x04\x95", "a Python pickle"), (b"\x89HDF", "an HDF5 file"),
    (b"\x7fELF", "an executable"), (b"%PDF", "a PDF"),
)  # fmt: skip
_HLO_START = re.compile(r"(?:\s|//[^\n]*\n|/\*.*?\*/)*(?:HloModule\b|ENTRY\b)", re.DOTALL)
_STRING = re.compile(rb'"(?:[^"\\\n]|\\.)*"')
_OPENING, _CLOSING = b"([{<", b")]}>"
_NO_BRACKETS = bytes(set(range(256)) - set(_OPENING + _CLOSING))
_STEPS = bytes.maketrans(_OPENING + _CLOSING, b"\x01" * 4 + b"\xff" * 4)
_CHUNK = 1 << 20
_MLIR_WORD = re.compile(r"\bfunc\.func\b|\bmodule\b")
_TEXT_PROTO_START = re.compile(r"\s*(?:hlo_module\s*[:{<]|name:\s*\"|computations\s*\{)")


def read_bytes(path: str) -> bytes:
    """The file's content (`-`: standard input), unpacked when it is compressed with gzip or zstd, also several times.

    Raises `InputError` when there is no such file, it cannot be read, is empty, or its compression is damaged.
    """
    where = source_name(path)
    data = _read(path, where)
    for _ in range(MAX_LAYERS):
        if not data:
            raise InputError("the program is empty", where=where, hint="was it written completely?")
        if data.startswith(GZIP):
            data = _gunzip(data, where)
        elif data.startswith(ZSTD):
            data = _unzstd(data, where)
        else:
            return data
    raise InputError(f"more than {MAX_LAYERS - 1} layers of compression", where=where, hint="unpack it first")


def source_name(path: str) -> str:
    """How messages call the input."""
    return "<stdin>" if path == STDIN else path


def _read(path: str, where: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == STDIN else Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError("no such file", where=where, hint=_near(path)) from None
    except IsADirectoryError:
        raise InputError("this is a directory", where=where, hint="give the file of one program") from None
    except PermissionError:
        raise InputError("no permission to read it", where=where, hint="check the file's mode and owner") from None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read ({error})", where=where) from None


def _near(path: str) -> str:
    """A file next to the missing one whose name is close to it."""
    from difflib import get_close_matches

    folder = Path(path).parent
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return f"the folder {folder} does not exist either"
    close = get_close_matches(Path(path).name, names, n=1)
    return f"did you mean {folder / close[0]}?" if close else "check the path"


def _gunzip(data: bytes, where: str) -> bytes:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"damaged gzip data ({error})", where=where, hint="was it written completely?") from None


def _unzstd(data: bytes, where: str) -> bytes:
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True) as reader:
            unpacked: bytes = reader.read()
    except zstandard.ZstdError as error:
        raise InputError(f"damaged zstd data ({error})", where=where, hint="was it written completely?") from None
    if not unpacked:
        raise InputError("damaged zstd data (nothing in it)", where=where, hint="was it written completely?")
    return unpacked


def recognise(data: bytes) -> str:
    """The format's name (see the module's docstring); empty when it is none of them."""
    if data.startswith(BYTECODE):
        return "portable" if PORTABLE_PRODUCER in data[: 32 + len(BYTECODE)] else "bytecode"
    module = flatbuffer_bytes(data, EXPORT_MODULE_SLOT)
    if module is not None and bytes(module[: len(BYTECODE)]) == BYTECODE:
        return "jax.export"
    text = as_text(data)
    if text is not None:
        return "hlo-text" if _HLO_START.match(text) else "stablehlo"
    return "hlo-proto" if hlo_module_proto(data) is not None else ""


def as_text(data: bytes) -> str | None:
    """The bytes as text (UTF-8, with or without a byte order mark); None when they are none."""
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def hlo_module_proto(data: bytes | memoryview) -> bytes | None:
    """The HloModuleProto in a proto that is one or that wraps one, at most three messages deep; None when there is none."""
    for _ in range(4):
        fields = message_fields(data)
        if not fields:
            return None
        if any(field.tag == PROTO_COMPUTATIONS and message_fields(field.payload) for field in fields) and not any(
            field.tag == PROTO_WRAPPED and _is_module(field.payload) for field in fields
        ):
            return bytes(data)
        wrapped = [field.payload for field in fields if field.tag == PROTO_WRAPPED]
        if not wrapped:
            return None
        data = wrapped[0]
    return None


def _is_module(data: memoryview) -> bool:
    """Whether a message has computations: the mark of an HloModuleProto (in its place an HloModuleProto has its name)."""
    return any(
        field.tag == PROTO_COMPUTATIONS and message_fields(field.payload) for field in message_fields(data) or []
    )


def parse(data: bytes, where: str) -> tuple[str, Any]:
    """The format's name and the `ir.Module` (in a context of its own) of a program of any of the formats.

    Raises `InputError` at `where` (with line and column for text) with the first thing that is wrong.
    """
    kind = recognise(data)
    if kind == "stablehlo":
        return kind, _parse_text(data, where)
    if kind == "":
        raise InputError(f"this is not a program toast can read{_guess(data)}", where=where, hint=FORMATS_HINT)
    return kind, _parse_bytecode(_converted(kind, data, where), where)


def _converted(kind: str, data: bytes, where: str) -> bytes:
    """Plain MLIR bytecode of a program that is not MLIR text."""
    if kind == "jax.export":
        module = flatbuffer_bytes(data, EXPORT_MODULE_SLOT)
        inner = bytes(module) if module is not None else b""
        hint = "export it again, with this jax or an older one"
        return convert("portable" if recognise(inner) == "portable" else "bytecode", inner, where, hint)
    if kind == "hlo-proto":
        return convert(kind, hlo_module_proto(data) or b"", where, "is it an HloModuleProto or HloProto, and complete?")
    if kind == "hlo-text":
        return convert(kind, data.removeprefix(b"\xef\xbb\xbf"), where, "is it HLO as this version of XLA prints it?")
    return convert(
        kind, data, where, "is the file complete, and not written by a newer StableHLO than this jaxlib has?"
    )


def _parse_bytecode(bytecode: bytes, where: str) -> Any:
    from toast_cli import xla

    try:
        return xla.parse_module(xla.make_context(), bytecode)
    except xla.ir.MLIRError as error:
        raise InputError(first_error(error)[1], where=where, hint="is the file complete?") from None


def _parse_text(data: bytes, where: str) -> Any:
    from toast_cli import xla

    text = as_text(data) or ""
    if not text.strip():
        raise InputError("the program is empty", where=where, hint="was it written completely?")
    if _TEXT_PROTO_START.match(text):
        raise InputError(
            "this is an HLO proto in text form", where=where, hint="write it in binary form or as HLO text"
        )
    if nesting(data) > MAX_NESTING:
        raise InputError(
            f"brackets are nested more than {MAX_NESTING:,} deep", where=where, hint="is it a program, and complete?"
        )
    try:
        return xla.parse_module(xla.make_context(), text)
    except xla.ir.MLIRError as error:
        if not _MLIR_WORD.search(text):
            raise InputError("this is not a program toast can read", where=where, hint=FORMATS_HINT) from None
        place, message = first_error(error)
        hint = foreign_hint(message) or "is the file complete, and StableHLO as this jaxlib knows it?"
        raise InputError(message, where=f"{where}:{place}" if place else where, hint=hint) from None


def nesting(text: bytes) -> int:
    """How deep the brackets of MLIR text are nested, at most; those in strings do not count."""
    depth = _depth(text)
    if depth <= MAX_NESTING:
        return depth
    # Names in locations may hold single brackets, many thousand of them. Leaving strings out takes longer, so only now.
    return _depth(_STRING.sub(b"", text))


def _depth(text: bytes) -> int:
    import numpy as np

    brackets = text.replace(b"->", b"").translate(None, _NO_BRACKETS)
    deepest = level = 0
    for start in range(0, len(brackets), _CHUNK):
        steps = np.frombuffer(brackets[start : start + _CHUNK].translate(_STEPS), dtype=np.int8)
        levels = level + np.cumsum(steps, dtype=np.int64)
        deepest, level = max(deepest, int(levels.max())), int(levels[-1])
    return deepest


def _guess(data: bytes) -> str:
    """What a file of no known format seems to be instead."""
    found = next((name for magic, name in _FOREIGN if data.startswith(magic)), "")
    return f": it is {found}" if found else ""
