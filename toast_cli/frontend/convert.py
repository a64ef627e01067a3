"""Converts programs of every binary format, and HLO, to MLIR bytecode.

jaxlib's readers may raise anything, or end the process, so this runs in a child (see `loading`).
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from toast_cli import xla
from toast_cli.base.errors import InputError
from toast_cli.frontend.attributes import place_of
from toast_cli.program.ops import CONSTANT, CUSTOM_CALL
from toast_cli.xla import (
    call_target,
    holds_resource,
    ir,
    main_function,
    operations_in,
    parse_module,
    run_passes,
    walk_ops,
)

# ---------------------------------------------------------------- order of creation
# Sorts the operations of a program read from HLO into the order in which they were created.
#
# XLA prints instructions in depth-first order of its results: all that the first result needs first, which for a
# training step is the forward pass and the gradient of one weight through all layers, and every other gradient after
# that. Liveness along that order overestimated peak memory by up to a factor of two. XLA numbers the instructions of
# each name as it creates them (`add.17`, `add.18`): this sorts those of one name by number, each after its operands.

_NUMBERED = re.compile(r"(.*)\.(\d+)")


def in_creation_order(module: Any) -> None:
    """Sorts the operations of every block of every function."""
    functions = [function for function in module.body.operations if function.operation.name == "func.func"]
    operations = [operation for function in functions for operation in operations_in(function)]
    for block in [block for operation in operations for region in operation.regions for block in region.blocks]:
        sort_block(block)


def sort_block(block: Any) -> None:
    """Sorts the operations of one block by the numbers in their names, each after those whose results it reads; the
    terminator stays last. `add.2`, `dot.7`, `add.1` become `add.1`, `add.2`, `dot.7` if none reads another."""
    *operations, last = [view.operation for view in block.operations]
    if len(operations) < 2:
        return
    places = {operation: place for place, operation in enumerate(operations)}
    needed = []
    for operation in operations:  # what it and its regions read
        inside = operations_in(operation) if len(operation.regions) else [operation]
        read = [operand for inner in inside for operand in inner.operands]
        makers = [operand.owner.operation for operand in read if not isinstance(operand, ir.BlockArgument)]
        needed.append([places[maker] for maker in makers if maker in places])
    created_before: list[list[int]] = [[] for _ in operations]
    for earlier, later in pairs_of_one_name(operations):
        created_before[later].append(earlier)
    order = sorted_after(range(len(needed)), [a + b for a, b in zip(created_before, needed, strict=True)])
    order = sorted_after(order, needed)  # ignores numbers that contradict the data dependences
    if order != list(range(len(order))):
        for place in order:
            operations[place].move_before(last)


def pairs_of_one_name(operations: list[Any]) -> list[tuple[int, int]]:
    """Pairs of positions of successively created operations, for each name."""
    named: dict[str, list[tuple[int, int]]] = {}
    for place, operation in enumerate(operations):
        match = _NUMBERED.fullmatch(xla.location_name(operation.location))
        if match:
            named.setdefault(match[1], []).append((int(match[2]), place))
    ordered = [[place for _, place in sorted(numbered)] for numbered in named.values()]
    return [pair for places in ordered for pair in itertools.pairwise(places)]


def sorted_after(places: Iterable[int], before: list[list[int]]) -> list[int]:
    """Depth-first topological order of the places, each after those in its `before`. Cycles are broken somewhere."""
    order: list[int] = []
    begun = [False] * len(before)
    for first in places:
        stack = [] if begun[first] else [(first, iter(before[first]))]
        begun[first] = True
        while stack:
            place, remaining = stack[-1]
            nearest = next((number for number in remaining if not begun[number]), None)
            if nearest is None:
                order.append(place)
                stack.pop()
            else:
                begun[nearest] = True
                stack.append((nearest, iter(before[nearest])))
    return order


# ---------------------------------------------------------------- values that a file omits
# Handles constants whose values a file omits.
#
# XLA prints large constants as `constant({...})` by default, and reads that back as values of its own choice. MLIR
# prints `dense_resource<name>` and may omit the resource. Both become a `stablehlo.constant` of a missing resource:
# planning does not need the values, and writing or running the program is refused.

# Custom call target that replaces a constant while HLO is converted; its line and column follow.
MARKER = "toast.left_out."
_START = "constant("
HINT = (
    "give the program with its constants: StableHLO of `jax.jit(f).lower(…).as_text()`, or HLO printed with "
    "`print_large_constants` or `--xla_dump_large_constants`; `toast inspect` and `--format specs` do without them"
)

WORD = b"dense_resource"
_NAME = rb'("(?:[^"\\]|\\.)*"|[\w.$-]+)'
_SECTION = re.compile(rb"\n?\{-#.*?#-\}", re.DOTALL)
_RESOURCE = re.compile(_NAME + rb'\s*:\s*"0x([0-9A-Fa-f]*)"')
_USE = re.compile(WORD + rb"\s*<\s*" + _NAME + rb"\s*>")
_ALIGNMENT_DIGITS = 8  # a resource begins with its alignment, four bytes


def with_markers(text: str) -> str:
    """HLO text with a custom call in place of each constant whose values are omitted."""
    pieces: list[str] = []
    done, dots = 0, text.find("...")
    while dots >= 0:
        start = text.rfind(_START, done, dots)
        end = _end_of(text, start + len(_START), dots) if start >= 0 else -1
        if end >= 0:
            line, column = text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)
            pieces += [text[done:start], f'custom-call(), custom_call_target="{MARKER}{line}.{column}"']
            done = end
        dots = text.find("...", max(dots + 3, end))
    return "".join([*pieces, text[done:]])


def _end_of(text: str, start: int, dots: int) -> int:
    """The end of the constant whose value begins at `start`, if the dots are part of it; else -1."""
    before = text[start:dots]
    if '"' in before or before.count("(") < before.count(")") or before.rfind("/*") > before.rfind("*/"):
        return -1
    level = 1 + before.count("(") - before.count(")")
    for position in range(dots, len(text)):
        level += (text[position] == "(") - (text[position] == ")")
        if not level:
            return position + 1
    return -1


def take_markers(module: Any) -> None:
    """Replaces the custom calls of `with_markers` by constants of a missing resource."""
    for call in walk_ops(module, CUSTOM_CALL):
        if not call_target(call).startswith(MARKER):
            continue
        line, column = map(int, call_target(call).removeprefix(MARKER).split("."))
        kind = call.results[0].type
        with module.context:
            place = ir.Location.file("-", line, column)
            value = ir.Attribute.parse(f"dense_resource<left_out> : {kind}")
            constant = ir.Operation.create(
                CONSTANT, [kind], attributes={"value": value}, loc=place, ip=ir.InsertionPoint(call)
            )
        call.results[0].replace_all_uses_with(constant.results[0])
        call.erase()


def left_out(module: Any) -> list[Any]:
    """The constants with omitted values."""
    return [operation for operation in walk_ops(module, CONSTANT) if holds_resource(operation)]


def refuse_left_out(module: Any, path: str) -> None:
    """Raises `InputError` at the first constant whose values are omitted."""
    needed = left_out(module)
    if needed:
        count = "" if len(needed) == 1 else f" (and of {len(needed) - 1} more)"
        what = f"the numbers of a constant {needed[0].results[0].type}{count} are left out of the file"
        raise InputError(what, where=place_of(needed[0], path), hint=HINT)


def left_out_notices(module: Any) -> list[str]:
    """Notices for a report about constants with omitted values; drops those that nothing reads."""
    if left_out(module):
        run_passes(module, "func.func(trivial-dce)")
    count = len(left_out(module))
    what = "the numbers of 1 constant are" if count == 1 else f"the numbers of {count} constants are"
    return [f"{what} left out of the file: it can be planned for, and not written"] if count else []


def with_dense_constants(text: bytes) -> bytes:
    """MLIR text with constants inlined."""
    section = _SECTION.search(text, max(text.rfind(b"{-#"), 0))
    if section is None or WORD not in text:
        return text
    digits = {name: value[_ALIGNMENT_DIGITS:] for name, value in _RESOURCE.findall(section[0])}

    def written(use: re.Match[bytes]) -> bytes:
        value = digits.get(use[1])
        if value is None:
            return use[0]
        return b'dense<"0x' + value + b'">' if value else b"dense<>"

    return _USE.sub(written, text[: section.start()]) + text[section.end() :]


def dense_module(module: Any) -> Any:
    """A module with constants inlined; the one given if there is nothing to do."""
    if not any(map(holds_resource, walk_ops(module, CONSTANT, "mhlo.constant", "arith.constant"))):
        return module
    text = module.operation.get_asm(enable_debug_info=True, binary=True)
    return parse_module(module.context, with_dense_constants(text))


# ---------------------------------------------------------------- binary encodings
# Just enough of three binary encodings to recognise a file and read a few fields: protocol buffers, FlatBuffers, MLIR
# bytecode.
#
# The first two are stable by design, so a field number is all one needs to know; neither library has to be installed.
# Encodings: protobuf.dev/programming-guides/encoding, flatbuffers.dev/internals, mlir.llvm.org/docs/BytecodeFormat.

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
    position = 0
    try:
        while position < len(view):
            key, position = _varint(view, position)
            kind, tag = key & 7, key >> 3
            if tag == 0:
                return None
            value, payload = 0, view[0:0]
            if kind == VARINT:
                value, position = _varint(view, position)
            elif kind == LENGTH:
                size, position = _varint(view, position)
                payload, position = view[position : position + size], position + size
            elif kind in (FIXED64, FIXED32):
                size = 8 if kind == FIXED64 else 4
                payload, position = view[position : position + size], position + size
            else:
                return None
            if position > len(view):
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
    position = 0
    while position < len(field.payload):
        number, position = _varint(field.payload, position)
        numbers.append(number)
    return numbers


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    """The number that starts at `at` and the position after it; IndexError past the end or past ten bytes."""
    number = 0
    for shift in range(0, 70, 7):
        byte = view[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise IndexError(position)


def flatbuffer_bytes(data: bytes | memoryview, slot: int) -> memoryview | None:
    """The byte vector in field number `slot` of the root table of a FlatBuffer; None when there is no such thing."""
    view = memoryview(data)
    try:
        vector = flatbuffer_vector(view, struct.unpack_from("<I", view, 0)[0], slot)
    except struct.error:
        return None
    start, size = vector or (0, 0)
    return view[start : start + size] if vector and start + size <= len(view) else None


def flatbuffer_vector(view: memoryview, table: int, slot: int) -> tuple[int, int] | None:
    """(place of the first element, number of elements) of the vector in field number `slot` of the table at `table`;
    None if the table has no such field. Raises struct.error outside the buffer."""
    vtable = table - struct.unpack_from("<i", view, table)[0]
    entry = 4 + 2 * slot
    if vtable < 0 or entry + 2 > struct.unpack_from("<H", view, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", view, vtable + entry)[0]
    if offset == 0:
        return None
    field = table + offset
    vector = field + struct.unpack_from("<I", view, field)[0]
    return vector + 4, struct.unpack_from("<I", view, vector)[0]


def strings_are_text(bytecode: bytes) -> bool:
    """True if every string in MLIR bytecode is UTF-8; False also if the string section cannot be found."""
    try:
        position = bytecode.index(b"\0", 4) + 1  # magic, version, and the producer's name
        while True:
            section, position = bytecode[position], position + 1
            size, position = _mlir_varint(bytecode, position)
            if section & 0x80:
                alignment, position = _mlir_varint(bytecode, position)
                position += -position % alignment
            if section & 0x7F == 0:
                return _string_data(bytecode, position, position + size)
            position += size
    except (IndexError, ValueError, ZeroDivisionError):
        return False


def _string_data(bytecode: bytes, position: int, end: int) -> bool:
    """True if the strings of the string section at [at, end) are UTF-8.

    The section holds their number, their lengths, then the strings.
    """
    count, position = _mlir_varint(bytecode, position)
    for _ in range(min(count, end - position)):
        _, position = _mlir_varint(bytecode, position)
    try:
        bytecode[position:end].decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _mlir_varint(data: bytes, position: int) -> tuple[int, int]:
    """MLIR's variable-width integer: the zeros at the low end of the first byte say how many bytes follow it."""
    first = data[position]
    if first == 0:
        return int.from_bytes(data[position + 1 : position + 9], "little"), position + 9
    width = (first & -first).bit_length()
    return int.from_bytes(data[position : position + width], "little") >> width, position + width


# Field numbers of HloModuleProto and, inside the entries, of its alias and donor messages (xla/service/hlo.proto).
INPUT_OUTPUT_ALIAS, BUFFER_DONOR = 8, 18
OUTPUT_INDEX, ALIAS_PARAMETER, ALIAS_INDEX = 1, 2, 3
DONOR_PARAMETER, DONOR_INDEX = 1, 2

Path = tuple[int, ...]


def mark_donations(module: Any, proto: bytes, parameters: list[Any], result: Any) -> None:
    """Sets the attributes on the arguments of `main`; ignores an entry that does not name a single array. parameters,
    result: see `hlo_boundary`."""
    aliases, donors = donations(proto)
    if not aliases and not donors:
        return
    with module.context:
        marks: dict[int | None, dict[str, Any]] = {}
        for (number, path), output in aliases.items():
            place = leaf_number(result, output)
            if place is not None:
                number_attribute = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), place)
                marks[leaf_number(parameters, (number, *path))] = {"tf.aliasing_output": number_attribute}
        for number, path in donors:
            marks.setdefault(leaf_number(parameters, (number, *path)), {"jax.buffer_donor": ir.BoolAttr.get(True)})
        _mark(module, "arg_attrs", [marks.get(k, {}) for k in range(len(main_function(module).arguments))])


def mark_host_memory(module: Any, arguments: list[bool], results: list[bool]) -> None:
    """Sets `mhlo.memory_kind` on the arguments and results of `main` that are in host memory."""
    kind = main_function(module).type
    with module.context:
        host = {"mhlo.memory_kind": ir.StringAttr.get("pinned_host")}
        for name, flags, types in (("arg_attrs", arguments, kind.inputs), ("res_attrs", results, kind.results)):
            if any(flags) and len(flags) == len(types):
                _mark(module, name, [host if on_host else {} for on_host in flags])


def _mark(module: Any, name: str, marks: list[dict[str, Any]]) -> None:
    """Adds attributes to each argument or result of `main`; name: of their list."""
    attributes = main_function(module).attributes
    present = list(attributes[name]) if name in attributes else [{}] * len(marks)
    merged = [
        ir.DictAttr.get({**{item.name: item.attr for item in old}, **new})
        for old, new in zip(present, marks, strict=True)
    ]
    attributes[name] = ir.ArrayAttr.get(merged)


def donations(proto: bytes) -> tuple[dict[tuple[int, Path], Path], list[tuple[int, Path]]]:
    """(parameter, place in it) -> place in the result for aliased buffers; and the donated ones."""
    aliases: dict[tuple[int, Path], Path] = {}
    donors: list[tuple[int, Path]] = []
    for field in message_fields(proto) or []:
        if field.tag == INPUT_OUTPUT_ALIAS:
            for entry in _entries(field):
                key = (_number(entry, ALIAS_PARAMETER), _path(entry, ALIAS_INDEX))
                aliases[key] = _path(entry, OUTPUT_INDEX)
        elif field.tag == BUFFER_DONOR:
            donors += [(_number(entry, DONOR_PARAMETER), _path(entry, DONOR_INDEX)) for entry in _entries(field)]
    return aliases, donors


def leaf_number(tree: Any, path: Path) -> int | None:
    """Position of the array at `path` among all arrays of a nested tuple; None when there is a tuple, or nothing."""
    before = 0
    for step in path:
        if not isinstance(tree, list) or step >= len(tree):
            return None
        before += len(leaves_of(tree[:step]))
        tree = tree[step]
    return None if isinstance(tree, list) else before


def leaves_of(tree: Any) -> list[Any]:
    """What a nested tuple has for each of its arrays."""
    return [leaf for part in tree for leaf in leaves_of(part)] if isinstance(tree, list) else [tree]


def _entries(field: Field) -> list[list[Field]]:
    return [message_fields(entry.payload) or [] for entry in message_fields(field.payload) or [] if entry.tag == 1]


def _number(entry: list[Field], tag: int) -> int:
    return next((field.value for field in entry if field.tag == tag), 0)


def _path(entry: list[Field], tag: int) -> Path:
    return tuple(number for field in entry if field.tag == tag for number in packed_varints(field))


def from_hlo_proto(proto: bytes) -> bytes:
    """Converts a serialized HloModuleProto; donated buffers and host memory become attributes of the arguments and
    results."""
    module = xla.parse_module(xla.make_context(), xla.hlo_proto_to_stablehlo(proto))
    parameters, result = xla.hlo_boundary(proto)
    mark_donations(module, proto, parameters, result)
    mark_host_memory(module, leaves_of(parameters), leaves_of(result))
    take_markers(module)
    return xla.write_bytecode(module)


CONVERSIONS: dict[str, Callable[[bytes], bytes]] = {
    "bytecode": lambda data: data,  # the parser checks it later
    "portable": lambda data: xla.write_bytecode(xla.parse_portable_artifact(xla.make_context(), data)),
    "hlo-text": lambda data: from_hlo_proto(xla.hlo_text_to_proto(with_markers(data.decode("utf-8")))),
    "hlo-proto": from_hlo_proto,
}
