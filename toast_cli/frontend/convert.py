"""Converts programs of every binary format, and HLO, to MLIR bytecode.

In: bytes of a known kind. Out: MLIR bytecode, or whatever jaxlib's readers raise. They may also end the process,
so this runs in a child (see `handover`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toast_cli import xla
from toast_cli.frontend.left_out import take_markers, with_markers
from toast_cli.frontend.wire import Field, message_fields, packed_varints
from toast_cli.xla import hlo_boundary_leaves, ir

# Field numbers of HloModuleProto and, inside the entries, of its alias and donor messages (xla/service/hlo.proto).
INPUT_OUTPUT_ALIAS, BUFFER_DONOR = 8, 18
OUTPUT_INDEX, ALIAS_PARAMETER, ALIAS_INDEX = 1, 2, 3
DONOR_PARAMETER, DONOR_INDEX = 1, 2

Path = tuple[int, ...]


def mark_donations(module: Any, proto: bytes) -> None:
    """Sets the attributes on the arguments of `main`; ignores an entry that does not name a single array."""
    aliases, donors = donations(proto)
    if not aliases and not donors:
        return
    parameters, result = hlo_boundary_leaves(proto)
    main = next(op for op in module.body.operations if op.operation.name == "func.func" and op.name.value == "main")
    with module.context:
        marks: dict[int | None, dict[str, Any]] = {}
        for (number, path), output in aliases.items():
            place = leaf_number(result, output)
            if place is not None:
                number_attribute = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), place)
                marks[leaf_number(parameters, (number, *path))] = {"tf.aliasing_output": number_attribute}
        for number, path in donors:
            marks.setdefault(leaf_number(parameters, (number, *path)), {"jax.buffer_donor": ir.BoolAttr.get(True)})
        count = len(main.arguments)
        present = list(main.attributes["arg_attrs"]) if "arg_attrs" in main.attributes else [{}] * count
        merged = [
            ir.DictAttr.get({**{item.name: item.attr for item in old}, **marks.get(k, {})})
            for k, old in enumerate(present)
        ]
        main.operation.attributes["arg_attrs"] = ir.ArrayAttr.get(merged)


def mark_host_memory(module: Any, arguments: list[bool], results: list[bool]) -> None:
    """Sets `mhlo.memory_kind` on the arguments and results of `main` that are in host memory."""
    main = next(op for op in module.body.operations if op.operation.name == "func.func" and op.name.value == "main")
    attributes = main.operation.attributes
    with module.context:
        for name, there in (("arg_attrs", arguments), ("res_attrs", results)):
            count = len(main.type.inputs if name == "arg_attrs" else main.type.results)
            if any(there) and len(there) == count:
                present = list(attributes[name]) if name in attributes else [{}] * count
                kind = {"mhlo.memory_kind": ir.StringAttr.get("pinned_host")}
                attributes[name] = ir.ArrayAttr.get(
                    [
                        ir.DictAttr.get({**{item.name: item.attr for item in old}, **(kind if on_host else {})})
                        for old, on_host in zip(present, there, strict=True)
                    ]
                )


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
        if tree is None or step >= len(tree):
            return None
        before += sum(_leaves(part) for part in tree[:step])
        tree = tree[step]
    return before if tree is None else None


def _leaves(tree: Any) -> int:
    return 1 if tree is None else sum(map(_leaves, tree))


def _entries(field: Field) -> list[list[Field]]:
    return [message_fields(entry.payload) or [] for entry in message_fields(field.payload) or [] if entry.tag == 1]


def _number(entry: list[Field], tag: int) -> int:
    return next((field.value for field in entry if field.tag == tag), 0)


def _path(entry: list[Field], tag: int) -> Path:
    return tuple(number for field in entry if field.tag == tag for number in packed_varints(field))


def from_portable(data: bytes) -> bytes:
    """Converts a StableHLO portable artifact."""
    return xla.write_bytecode(xla.parse_portable_artifact(xla.make_context(), data))


def from_hlo_text(data: bytes) -> bytes:
    """Converts HLO text as XLA prints it, in UTF-8."""
    return from_hlo_proto(xla.hlo_text_to_proto(with_markers(data.decode("utf-8"))))


def from_hlo_proto(proto: bytes) -> bytes:
    """Converts a serialized HloModuleProto; donated buffers and host memory become attributes of the arguments and
    results."""
    module = xla.parse_module(xla.make_context(), xla.hlo_proto_to_stablehlo(proto))
    mark_donations(module, proto)
    mark_host_memory(module, *xla.hlo_on_host(proto))
    take_markers(module)
    return xla.write_bytecode(module)


CONVERSIONS: dict[str, Callable[[bytes], bytes]] = {
    "bytecode": lambda data: data,  # the parser checks it later
    "portable": from_portable,
    "hlo-text": from_hlo_text,
    "hlo-proto": from_hlo_proto,
}
