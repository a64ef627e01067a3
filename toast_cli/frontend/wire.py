"""Just enough of three binary encodings to recognise a file and read a few fields: protocol buffers, FlatBuffers, MLIR
bytecode.

The first two are stable by design, so a field number is all one needs to know; neither library has to be installed.
Encodings: protobuf.dev/programming-guides/encoding, flatbuffers.dev/internals, mlir.llvm.org/docs/BytecodeFormat.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a protocol buffer message:

    `value` of an integer, `payload` of anything else; the other one is empty.
    """

    tag: int
    value: int
    payload: memoryview


def message_fields(data: bytes | memoryview) -> list[Field] | None:
    """The top-level fields of a protocol buffer message in file order; None when the bytes are no such message."""
    view = memoryview(data)
    fields: list[Field] = []
    at = 0
    try:
        while at < len(view):
            key, at = _varint(view, at)
            kind, tag = key & 7, key >> 3
            if tag == 0:
                return None
            value, payload = 0, view[0:0]
            if kind == VARINT:
                value, at = _varint(view, at)
            elif kind == LENGTH:
                size, at = _varint(view, at)
                payload, at = view[at : at + size], at + size
            elif kind in (FIXED64, FIXED32):
                size = 8 if kind == FIXED64 else 4
                payload, at = view[at : at + size], at + size
            else:
                return None
            if at > len(view):
                return None
            fields.append(Field(tag, value, payload))
    except IndexError:
        return None
    return fields


def packed_varints(field: Field) -> list[int]:
    """The numbers of a repeated integer field, which writers may pack into one payload or write one by one."""
    if not len(field.payload):
        return [field.value]
    numbers: list[int] = []
    at = 0
    while at < len(field.payload):
        number, at = _varint(field.payload, at)
        numbers.append(number)
    return numbers


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """The number that starts at `at` and the position after it; IndexError past the end or past ten bytes."""
    number = 0
    for shift in range(0, 70, 7):
        byte = view[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise IndexError(at)


def flatbuffer_bytes(data: bytes | memoryview, slot: int) -> memoryview | None:
    """The byte vector in field number `slot` of the root table of a FlatBuffer; None when there is no such thing."""
    view = memoryview(data)
    try:
        table = struct.unpack_from("<I", view, 0)[0]
        vtable = table - struct.unpack_from("<i", view, table)[0]
        if vtable < 0:
            return None
        vtable_size = struct.unpack_from("<H", view, vtable)[0]
        entry = 4 + 2 * slot
        if entry + 2 > vtable_size:
            return None
        offset = struct.unpack_from("<H", view, vtable + entry)[0]
        if offset == 0:
            return None
        field = table + offset
        vector = field + struct.unpack_from("<I", view, field)[0]
        size = struct.unpack_from("<I", view, vector)[0]
    except struct.error:
        return None
    start = vector + 4
    return view[start : start + size] if start + size <= len(view) else None


def strings_are_text(bytecode: bytes) -> bool:
    """True if every string in MLIR bytecode is UTF-8; False also if the string section cannot be found."""
    try:
        at = bytecode.index(b"\0", 4) + 1  # magic, version, and the producer's name
        while True:
            section, at = bytecode[at], at + 1
            size, at = _mlir_varint(bytecode, at)
            if section & 0x80:
                alignment, at = _mlir_varint(bytecode, at)
                at += -at % alignment
            if section & 0x7F == 0:
                return _string_data(bytecode, at, at + size)
            at += size
    except (IndexError, ValueError, ZeroDivisionError):
        return False


def _string_data(bytecode: bytes, at: int, end: int) -> bool:
    """True if the strings of the string section at [at, end) are UTF-8.

    The section holds their number, their lengths, then the strings.
    """
    count, at = _mlir_varint(bytecode, at)
    for _ in range(min(count, end - at)):
        _, at = _mlir_varint(bytecode, at)
    try:
        bytecode[at:end].decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _mlir_varint(data: bytes, at: int) -> tuple[int, int]:
    """MLIR's variable-width integer: the zeros at the low end of the first byte say how many bytes follow it."""
    first = data[at]
    if first == 0:
        return int.from_bytes(data[at + 1 : at + 9], "little"), at + 9
    width = (first & -first).bit_length()
    return int.from_bytes(data[at : at + width], "little") >> width, at + width
