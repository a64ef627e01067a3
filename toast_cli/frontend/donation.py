"""Donated buffers of an HLO module: in StableHLO they are attributes of the entry function's arguments.

Enters: a converted module and the HloModuleProto it came from. Leaves: the same module with `tf.aliasing_output` (the
argument's buffer becomes that result) or `jax.buffer_donor` (it may be reused for anything) on the arguments concerned.
The proto gives a path into a parameter's tuple; StableHLO flattens tuples, depth first.
"""

from __future__ import annotations

from typing import Any

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
