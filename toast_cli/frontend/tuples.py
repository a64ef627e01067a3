"""Flattens tuples: HLO passes several arrays as one value; the result has only arrays."""

from __future__ import annotations

from typing import Any

from toast_cli.xla import attributes_of, create, ir, operations_in

# Attributes that describe one argument's buffer and do not apply to each array of a tuple.
PER_BUFFER = frozenset({"tf.aliasing_output", "mhlo.sharding", "sdy.sharding"})


def flatten_tuples(module: Any, *, inside: bool) -> None:
    """Removes every tuple. Call this after `legalize`: then no operation with regions takes or returns one.

    inside: True if any operation returns a tuple; function signatures are checked here.
    """
    functions = [op for op in module.body.operations if op.operation.name == "func.func"]
    boundary = [
        function for function in functions if any(map(is_tuple, (*function.type.inputs, *function.type.results)))
    ]
    if not boundary and not inside:
        return
    with module.context, ir.Location.unknown():
        for function in boundary:
            flatten_boundary(function)
        for function in functions:
            flatten_body(function)


def is_tuple(kind: Any) -> bool:
    return isinstance(kind, ir.TupleType)


def leaf_types(kind: Any) -> list[Any]:
    """The array types in a type, depth first."""
    if not is_tuple(kind):
        return [kind]
    return [leaf for k in range(kind.num_types) for leaf in leaf_types(kind.get_type(k))]


def tuple_operations(function: Any) -> list[Any]:
    """Operations that take or return a tuple, in program order."""
    return [
        operation
        for operation in operations_in(function)
        if any(is_tuple(value.type) for value in (*operation.results, *operation.operands))
    ]


def flatten_boundary(function: Any) -> None:
    """Flattens arguments and results of a function; inside, tuples are rebuilt from them and taken apart again."""
    kind = function.type
    inputs = [leaf_types(entry) for entry in kind.inputs]
    results = [leaf_types(entry) for entry in kind.results]
    split_attributes(function, "arg_attrs", inputs)
    split_attributes(function, "res_attrs", results)
    flat = ir.FunctionType.get([t for leaves in inputs for t in leaves], [t for leaves in results for t in leaves])
    function.operation.attributes["function_type"] = ir.TypeAttr.get(flat)
    if function.is_external:
        return
    block = function.entry_block
    old = list(block.arguments)
    start = block.operations[0].operation
    for argument, leaves in zip(old, inputs, strict=True):
        fresh = [block.add_argument(leaf, argument.location) for leaf in leaves]
        argument.replace_all_uses_with(packed(argument.type, fresh, start))
    for _ in old:
        block.erase_argument(0)


def split_attributes(function: Any, name: str, leaves: list[list[Any]]) -> None:
    """Gives each array of an argument (or result) the attributes of the whole."""
    attributes = function.operation.attributes
    if name not in attributes:
        return
    split = []
    for entry, arrays in zip(attributes[name], leaves, strict=True):
        kept = {item.name: item.attr for item in entry if len(arrays) == 1 or item.name not in PER_BUFFER}
        split += [ir.DictAttr.get(kept)] * len(arrays)
    attributes[name] = ir.ArrayAttr.get(split)


def packed(kind: Any, arrays: list[Any], before: Any) -> Any:
    """Builds a value of type `kind` from its arrays, which it removes from the front of the list."""
    if not is_tuple(kind):
        return arrays.pop(0)
    parts = [packed(kind.get_type(k), arrays, before) for k in range(kind.num_types)]
    return create("stablehlo.tuple", parts, [kind], {}, before)[0]


def flatten_body(function: Any) -> None:
    """Replaces tuples by their arrays everywhere in a function, definitions before uses."""
    arrays: dict[Any, list[Any]] = {}  # tuple value -> its arrays
    dead: list[Any] = []

    def leaves(value: Any) -> list[Any]:
        return arrays[value] if is_tuple(value.type) else [value]

    for operation in tuple_operations(function):
        operands = [leaf for value in operation.operands for leaf in leaves(value)]
        if operation.name in ("stablehlo.tuple", "mhlo.copy"):
            outcome = operands
        elif operation.name == "stablehlo.get_tuple_element":
            outcome = element(operation, operands)
        else:
            outcome = rebuilt(operation, operands)
        for result in operation.results:
            leaf_values = [outcome.pop(0) for _ in leaf_types(result.type)]
            if is_tuple(result.type):
                arrays[result] = leaf_values
            else:
                result.replace_all_uses_with(leaf_values[0])
        dead.append(operation)
    for operation in reversed(dead):
        operation.erase()


def element(operation: Any, arrays: list[Any]) -> list[Any]:
    """The arrays of one element of a tuple."""
    kind = operation.operands[0].type
    index = ir.IntegerAttr(operation.attributes["index"]).value
    before = sum(len(leaf_types(kind.get_type(k))) for k in range(index))
    return arrays[before : before + len(leaf_types(kind.get_type(index)))]


def rebuilt(operation: Any, operands: list[Any]) -> list[Any]:
    """Rebuilds an operation (a custom call, a call, a return) with arrays for tuples; returns its results."""
    types = [leaf for result in operation.results for leaf in leaf_types(result.type)]
    attributes = attributes_of(operation)
    attributes.pop("xla_shape", None)
    return create(operation.name, operands, types, attributes, operation)
