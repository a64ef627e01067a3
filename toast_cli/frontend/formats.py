"""Recognises a program's format from its content and parses it: bytes go in, an `ir.Module` comes out.

Formats, by the name that reports show:

* `stablehlo`: MLIR text. `bytecode`: MLIR bytecode. `portable`: a StableHLO portable artifact (versioned bytecode).
* `jax.export`: the output of `jax.export.Exported.serialize` (a FlatBuffer around a portable artifact).
* `hlo-text`: HLO as XLA prints it. `hlo-proto`: a serialized HloModuleProto, or an HloProto or HloSnapshot around one.

Each may be compressed with gzip or zstd. Older text, MHLO and foreign dialects are converted, or refused with a hint.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import numpy as np

from toast_cli.base.errors import InputError
from toast_cli.base.files import PROGRAM_BYTES, STDIN, limit_of, read_file, too_large
from toast_cli.frontend.attributes import first_error, place_of
from toast_cli.frontend.convert import (
    CONVERSIONS,
    dense_module,
    flatbuffer_bytes,
    in_creation_order,
    message_fields,
    with_dense_constants,
)
from toast_cli.program.ops import CUSTOM_CALL
from toast_cli.xla import call_target, ir, location_name, make_context, operations_in, parse_module

_MARK = b"\xef\xbb\xbf"  # the byte order mark
GZIP, ZSTD, BYTECODE = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"ML\xefR"
PORTABLE_PRODUCER = b"StableHLO_v"
# Most layers of compression that are unpacked.
MAX_LAYERS = 4
# Number of the field `mlir_module_serialized` of jax.export's FlatBuffer schema.
EXPORT_MODULE_SLOT = 13
# Field numbers of HloModuleProto: its computations; and of what wraps it: HloProto, HloSnapshot and
# HloModuleProtoWithConfig.
PROTO_COMPUTATIONS, PROTO_WRAPPED = 3, 1

FORMATS_HINT = (
    "toast reads StableHLO text (`jax.jit(f).lower(…).as_text()`), MLIR bytecode, StableHLO portable artifacts, "
    "jax.export files, HLO text and HLO protos, each also with gzip or zstd"
)
OTHER_VERSION = (
    "is the file complete? MLIR bytecode of another version may not be readable: write text, or a StableHLO portable "
    "artifact (`jax.export.export(…)(…).mlir_module_serialized`), which are"
)
# The first word of HLO, after white space and comments.
_HLO_START = re.compile(rb"(?:\xef\xbb\xbf)?(?:\s++|//[^\n]*+|/\*.*?\*/)*+(?:HloModule|ENTRY)\b", re.DOTALL)
_CHUNK = 1 << 20
_MLIR_WORD = re.compile(rb"\bfunc\.func\b|\bmodule\b")


def read_bytes(path: str) -> bytes:
    """The file's content (`-`: standard input), unpacked when it is compressed with gzip or zstd, also several times.

    Raises `InputError` when there is no such file, it cannot be read, is empty or too large, or its compression is
    damaged.
    """
    where = source_name(path)
    data = read_file(path, PROGRAM_BYTES, hint="check the path")
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
    """The input's name in messages."""
    return "<stdin>" if path == STDIN else path


def _gunzip(data: bytes, where: str) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as reader:
            return _unpacked(reader.read, where)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"damaged gzip data ({error})", where=where, hint="was it written completely?") from None


def _unzstd(data: bytes, where: str) -> bytes:
    import zstandard

    limit = limit_of(PROGRAM_BYTES)
    try:
        unpacker = zstandard.ZstdDecompressor(max_window_size=max(limit, 1 << 23))
        with unpacker.stream_reader(io.BytesIO(data), read_across_frames=True) as reader:
            unpacked = _unpacked(reader.read, where)
    except (zstandard.ZstdError, MemoryError) as error:
        raise InputError(f"damaged zstd data ({error})", where=where, hint="was it written completely?") from None
    if not unpacked:
        raise InputError("damaged zstd data (nothing in it)", where=where, hint="was it written completely?")
    return unpacked


def _unpacked(read: Callable[[int], bytes], where: str) -> bytes:
    """The output of a decompressing reader, up to the size limit of programs."""
    limit = limit_of(PROGRAM_BYTES)
    content = bytearray()
    while chunk := read(_CHUNK):
        content += chunk
        if len(content) > limit:
            raise too_large(where, limit, " once it is unpacked")
    return bytes(content)


def recognise(data: bytes) -> str:
    """The format's name (see the module's docstring); empty if it is none of them."""
    if data.startswith(BYTECODE):
        return "portable" if PORTABLE_PRODUCER in data[: 32 + len(BYTECODE)] else "bytecode"
    module = flatbuffer_bytes(data, EXPORT_MODULE_SLOT)
    if module is not None and bytes(module[: len(BYTECODE)]) == BYTECODE:
        return "jax.export"
    if is_text(data):
        return "hlo-text" if _HLO_START.match(data) else "stablehlo"
    return "hlo-proto" if hlo_module_proto(data) is not None else ""


def is_text(data: bytes) -> bool:
    """True if the bytes are UTF-8 text."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def hlo_module_proto(data: bytes | memoryview, wrappers: int = 3) -> bytes | None:
    """The HloModuleProto in a proto that is one or that wraps one, in at most so many messages; None when there is
    none.

    Computations identify it. A message that wraps one has the module in the field in which a module has its name.
    """
    fields = message_fields(data) or []
    for field in fields if wrappers else ():
        module = hlo_module_proto(field.payload, wrappers - 1) if field.tag == PROTO_WRAPPED else None
        if module is not None:
            return module
    has_computations = any(field.tag == PROTO_COMPUTATIONS and message_fields(field.payload) for field in fields)
    return bytes(data) if has_computations else None


def parse_here(data: bytes, where: str) -> tuple[str, Any]:
    """The format's name and the `ir.Module` (in a context of its own) of a program of any of the formats, parsed in
    this process.

    A damaged or hostile program may end the process; `loading.parse` parses in a child first. Raises `InputError` at
    `where` (with line and column for text) with the first thing that is wrong.
    """
    kind = recognise(data)
    if kind == "stablehlo":
        return kind, _parse_text(data, where)
    if kind == "":
        raise InputError("this is not a program toast can read", where=where, hint=FORMATS_HINT)
    module = _parse_bytecode(_converted(kind, data, where), where)
    if kind.startswith("hlo"):
        in_creation_order(module)
    if kind == "jax.export":
        _name_arguments(module)
    return kind, module


def _name_arguments(module: Any) -> None:
    """Names arguments of the entry function like those of the function that it passes them to: where JAX wraps the
    user's function, for symbolic shapes or for several platforms, only that function's arguments have names."""
    functions = {view.name.value: view for view in module.body.operations if view.operation.name == "func.func"}
    for argument in functions["main"].arguments if "main" in functions else ():
        calls = [use for use in argument.uses if use.owner.operation.name == "func.call"]
        if len(calls) == 1 and not location_name(argument.location):
            call, position = calls[0].owner.operation, calls[0].operand_number
            callee = functions.get(ir.FlatSymbolRefAttr(call.attributes["callee"]).value)
            if callee is not None and position < len(callee.arguments):
                argument.set_location(callee.arguments[position].location)


def hint_for(kind: str) -> str:
    """A hint for a program of this format that cannot be read."""
    return {
        "jax.export": "export it again, with this jax or an older one",
        "hlo-proto": "is it an HloModuleProto or HloProto, and complete?",
        "hlo-text": "is it HLO as this version of XLA prints it?",
        "stablehlo": "is the file complete, and written by JAX 0.7 or newer, or with as new a StableHLO?",
        "bytecode": OTHER_VERSION,
    }.get(kind, "is the file complete, and not written by a newer StableHLO than this jaxlib has?")


def _converted(kind: str, data: bytes, where: str) -> bytes:
    """Plain MLIR bytecode of a program that is not MLIR text. Raises `InputError` at `where` with the first error."""
    hint = hint_for(kind)
    if kind == "jax.export":
        data = bytes(flatbuffer_bytes(data, EXPORT_MODULE_SLOT) or b"")
        kind = "portable" if recognise(data) == "portable" else "bytecode"
    elif kind == "hlo-proto":
        data = hlo_module_proto(data) or b""
    try:
        return CONVERSIONS[kind](data.removeprefix(_MARK))
    except (ir.MLIRError, RuntimeError, ValueError, TypeError) as error:
        place, message = first_error(error)
        raise InputError(message, where=f"{where}:{place}" if place else where, hint=hint) from None


def _parse_bytecode(bytecode: bytes, where: str) -> Any:
    try:
        return dense_module(_parse_known(bytecode))
    except ir.MLIRError as error:
        raise InputError(first_error(error)[1], where=where, hint=OTHER_VERSION) from None


def _parse_known(program: bytes) -> Any:
    """Parses bytecode; drops attributes of unregistered dialects."""
    try:
        return parse_module(make_context(), program)
    except ir.MLIRError as error:
        message = first_error(error)[1]
        if UNREGISTERED not in message or "quant" in message:
            raise
        try:
            return parse_without_foreign_attributes(program)
        except ir.MLIRError as left:  # its location refers to a copy, if an operation or a type is of the dialect
            raise error if UNREGISTERED in first_error(left)[1] else left from None


def _parse_text(data: bytes, where: str) -> Any:
    data = data.removeprefix(_MARK)
    if not data or data.isspace():
        raise InputError("the program is empty", where=where, hint="was it written completely?")
    try:
        return _parse_known(with_dense_constants(data))
    except ir.MLIRError as error:
        if not _MLIR_WORD.search(data):
            raise InputError("this is not a program toast can read", where=where, hint=FORMATS_HINT) from None
        today = with_byte_booleans(data)
        if today != data:
            return _parse_text(today, where)
        place, message = first_error(error)
        hint = foreign_hint(message) or hint_for("stablehlo")
        raise InputError(message, where=f"{where}:{place}" if place else where, hint=hint) from None


# ---------------------------------------------------------------- older text
# Constants of booleans have a byte for each element. The syntax before 2026 has a bit for each, the lowest first: any
# program with a mask of more than 100 elements (JAX up to 0.8, TensorFlow up to 2.21, PyTorch/XLA up to 2.9).

_BOOLEANS = re.compile(rb'dense<"0x([0-9A-Fa-f]+)"> ?: ?tensor<((?:\d+x)+)i1>')


def with_byte_booleans(text: bytes) -> bytes:
    """The text with a byte for each boolean."""
    return _BOOLEANS.sub(_byte_for_each, text)


def _byte_for_each(match: re.Match[bytes]) -> bytes:
    elements = prod(int(size) for size in match[2].split(b"x") if size)
    digits = match[1]
    if len(digits) % 2 or len(digits) // 2 != -(-elements // 8):
        return match[0]
    packed = np.frombuffer(bytes.fromhex(digits.decode()), np.uint8)
    each = np.unpackbits(packed, count=elements, bitorder="little").tobytes().hex().encode()
    return match[0].replace(digits, each, 1)


# ---------------------------------------------------------------- foreign dialects
# Handles dialects that XLA does not accept: drops their attributes, refuses their operations with a hint.

# XLA's conversion to HLO accepts the operations of `shape` and `tensor`, and constants, if shapes are static.
DIALECTS = frozenset({"builtin", "func", "stablehlo", "chlo", "mhlo", "sdy", "shape", "tensor"})
TAKEN = frozenset({"arith.constant"})
# Attributes that a custom call keeps: names without a dialect prefix, and MHLO's.
READ = frozenset({"api_version", "backend_config", "call_target_name", "called_computations", "mhlo"})
LOWER = (
    "lower the program to StableHLO first, e.g. with torch-mlir's or IREE's passes that end in StableHLO, "
    "or stablehlo-opt"
)


EXPORT_AGAIN = "export the program again with JAX 0.7 or newer, whose partitioner is Shardy"
GSPMD_BOUNDARY = frozenset({"SPMDFullToShardShape", "SPMDShardToFullShape"})
UNREGISTERED = "unregistered dialect"


def parse_without_foreign_attributes(program: bytes) -> Any:
    """The module without the attributes of unregistered dialects (`tt.device = #tt.device<…>`), which XLA ignores.
    Attributes that a custom call reads stay.

    Raises `ir.MLIRError` if operations or types are of such dialects.
    """
    context = make_context()
    context.allow_unregistered_dialects = True
    module = parse_module(context, program)
    strict = make_context()

    @cache
    def is_unregistered(text: str) -> bool:
        try:
            ir.Attribute.parse(text, strict)
        except ir.MLIRError:
            return True
        except (TypeError, ValueError):  # an attribute that Python cannot represent
            pass
        return False

    def is_foreign(value: Any) -> bool:
        text = str(value) if not isinstance(value, ir.StringAttr | ir.DenseElementsAttr) else ""
        return ("#" in text or "!" in text) and is_unregistered(text)

    def without_foreign(entries: Any) -> Any:
        """The argument or result dictionaries without foreign attributes."""
        kept = ({item.name: item.attr for item in entry if not is_foreign(item.attr)} for entry in entries)
        return ir.ArrayAttr.get(list(map(ir.DictAttr.get, kept)))

    with context:
        for operation in operations_in(module):
            attributes = operation.attributes
            for name in list(attributes):
                if operation.name == "func.func" and name in ("arg_attrs", "res_attrs"):
                    attributes[name] = without_foreign(attributes[name])
                elif not (operation.name == CUSTOM_CALL and name.partition(".")[0] in READ) and is_foreign(
                    _value(attributes, name)
                ):
                    del attributes[name]
    # As text: the reader of bytecode ends the process at an unregistered type.
    return parse_module(strict, module.operation.get_asm(enable_debug_info=True, binary=True))


def _value(attributes: Any, name: str) -> Any:
    try:
        return attributes[name]
    except (TypeError, ValueError):  # complex numbers, which Python cannot represent
        return ""


def drop_declarations(module: Any) -> None:
    """Removes top-level operations of other dialects that have no symbol name (`llvm.module_flags`)."""
    for view in list(module.body.operations):
        if not is_known(view.operation.name) and "sym_name" not in view.operation.attributes:
            view.operation.erase()


def refuse_foreign(module: Any, path: str) -> None:
    """Raises `InputError` at the first operation that XLA does not accept, or that only older exporters write: MHLO
    that has a twin in StableHLO, and the boundary of a manual region in GSPMD's form."""
    for operation in operations_in(module):
        name, what, hint = operation.name, "", EXPORT_AGAIN
        if not is_known(name):
            what, hint = f"{name} is not StableHLO", LOWER
        elif name.startswith("mhlo.") and module.context.is_registered_operation(name.replace("mhlo", "stablehlo", 1)):
            what = f"{name} is MHLO, the predecessor of StableHLO"
        elif name == CUSTOM_CALL and call_target(operation) in GSPMD_BOUNDARY:
            what = "a manual region (shard_map) in GSPMD's form"
        if what:
            raise InputError(what, where=place_of(operation, path), hint=hint)


def is_known(name: str) -> bool:
    """True if XLA accepts operations of that name, or they are removed."""
    return name.partition(".")[0] in DIALECTS or name in TAKEN


def foreign_hint(message: str) -> str:
    """A hint for a parser message about an unknown dialect; empty for other messages."""
    if "quant" in message and UNREGISTERED in message:
        return (
            "quantized types are not known here: write them as integers and scales, "
            "e.g. with stablehlo-legalize-quant-to-math"
        )
    if "not found for custom op" in message or UNREGISTERED in message:
        return LOWER
    return ""
