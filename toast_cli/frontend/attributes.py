"""Reads attributes that a program brings along (`mhlo.sharding`, `tf.aliasing_output`, `jax.result_info`), finds
operations with side effects, and extracts the place in the file from jaxlib's error messages.

MLIR verifies only the attributes that an operation defines. These are discardable attributes, so each may be missing
or of any kind. The functions here return a plain value, or None if the attribute is missing. They raise `InputError`
with the source location if an attribute is of the wrong kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from toast_cli import xla
from toast_cli.base.errors import InputError, UsageError
from toast_cli.base.units import printable
from toast_cli.program.ops import BROADCAST_IN_DIM, CONSTANT, CUSTOM_CALL, MANUAL_REGION, kind_of
from toast_cli.xla import call_target, declare_mesh, free_symbol, ir, operations_in, string_of

# Returns the location of an attribute for error messages. It is called only if something is wrong.
Locator = Callable[[], str]
_SHOWN = 60


def text(attributes: Mapping[str, Any] | Any, name: str, place: Locator) -> str | None:
    """A string. Bytes that are no UTF-8 become replacement characters."""
    if name not in attributes:
        return None
    return string_value(attributes[name], name, place)


def string_value(attribute: Any, name: str, place: Locator) -> str:
    """The string that an attribute called `name` must be."""
    if not isinstance(attribute, ir.StringAttr):
        raise wrong_kind(attribute, name, "a text", place)
    return string_of(attribute)


def integer(attributes: Mapping[str, Any] | Any, name: str, place: Locator, *, least: int, most: int) -> int | None:
    """A whole number from `least` to `most`."""
    if name not in attributes:
        return None
    attribute = attributes[name]
    if not isinstance(attribute, ir.IntegerAttr):
        raise wrong_kind(attribute, name, "a whole number", place)
    number = int(attribute.value)
    if not least <= number <= most:
        raise wrong_kind(attribute, name, f"a number from {least} to {most}", place)
    return number


def entries(attributes: Mapping[str, Any] | Any, name: str, place: Locator) -> dict[str, Any]:
    """The entries of a dictionary; none where the attribute is missing."""
    if name not in attributes:
        return {}
    if not isinstance(attributes[name], ir.DictAttr):
        raise wrong_kind(attributes[name], name, "a dictionary", place)
    return {str(item.name): item.attr for item in attributes[name]}


def parsed(written: str, name: str, kind: Any, place: Locator) -> Any:
    """Parses a text into an attribute that must be of a given class (`sdy.TensorShardingAttr`).

    Uses the current context.
    """
    if not written.strip() or "\0" in written:
        raise InputError(f"{name} is empty", where=place(), hint=_hint(name))
    try:
        attribute = ir.Attribute.parse(written)
    except ir.MLIRError as error:
        what = f"{name} cannot be read: {first_error(error)[1]}"
        raise InputError(what, where=place(), hint=_hint(name)) from None
    return of_kind(attribute, name, kind, place)


def of_kind(attribute: Any, name: str, kind: Any, place: Locator) -> Any:
    """The attribute as one of Shardy's or MLIR's classes."""
    matches = kind.isinstance(attribute) if hasattr(kind, "isinstance") else isinstance(attribute, kind)
    if not matches:
        raise wrong_kind(attribute, name, f"an attribute of class {kind.__name__}", place)
    return kind(attribute)


def wrong_kind(attribute: Any, name: str, wanted: str, place: Locator) -> InputError:
    shown = printable(str(attribute))
    shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 1]}…"
    return InputError(f"{name} is {shown}, not {wanted}", where=place(), hint=_hint(name))


def _hint(name: str) -> str:
    return f"correct {name}, or take it out of the program"


# ---------------------------------------------------------------- side effects
# Operations with side effects: infeeds and outfeeds, transfers to and from the host, custom calls with side effects.
#
# XLA's partitioner must know on which device each of them runs.

EFFECTS = frozenset({"stablehlo.infeed", "stablehlo.outfeed", "stablehlo.recv", "stablehlo.send", CUSTOM_CALL})
SHARDING = "sdy.sharding"
NUMBERS = ("stablehlo.partition_id", "stablehlo.replica_id")
# XLA removes these itself, so they need no device.
PLACELESS = ("annotate_device_placement", "LayoutConstraint", "MoveTo", "Sharding", "shape_assertion", "xla.sdy.")
CALLBACK = "callback"  # in the names of all targets that Shardy leaves on their device
BEFORE = (
    "give the program as it was before it was partitioned: without pmap, or lowered for one device; "
    "`toast inspect` and `--format specs` read this one"
)


def bind_effects(module: Any) -> None:
    """Binds every operation with effects and without a device to device 0."""
    unplaced = [
        operation
        for operation in operations_in(module, outside=MANUAL_REGION)
        if operation.name in EFFECTS and has_effect(operation) and SHARDING not in operation.attributes
    ]
    if not unplaced:
        return
    name = free_symbol(module, "maximal_mesh_0")
    with module.context:
        declare_mesh(module, name, ir.Attribute.parse("#sdy.mesh<[], device_ids=[0]>"))
        for operation in unplaced:
            places = ", ".join([f"<@{name}, []>"] * max(1, len(operation.results)))
            operation.attributes[SHARDING] = ir.Attribute.parse(f"#sdy.sharding_per_value<[{places}]>")


def is_placed(operation: Any) -> bool:
    """True if an operation with effects is bound to one device."""
    return operation.name in EFFECTS and SHARDING in operation.attributes


def has_effect(operation: Any) -> bool:
    """True if an operation of `EFFECTS` needs a device of its own."""
    if operation.name != CUSTOM_CALL:
        return True
    attributes = operation.attributes
    if "has_side_effect" not in attributes or not ir.BoolAttr(attributes["has_side_effect"]).value:
        return False
    return not call_target(operation).startswith(PLACELESS)


def refuse_unpartitionable(module: Any, place: Any, *, shardy: bool) -> None:
    """Raises `UsageError` at the first operation outside manual regions that XLA's partitioner refuses. shardy: True if
    Shardy reads the program; it loses the device of a custom call and, in jaxlib 0.12, that of an infeed or outfeed."""
    for operation in operations_in(module, outside=MANUAL_REGION):
        name, hint = operation.name.removeprefix("stablehlo."), "write it with --format hlo"
        is_call = operation.name == CUSTOM_CALL and has_effect(operation)
        if kind_of(operation.name).per_device:
            asks = operation.name in NUMBERS
            what = f"{name} asks on which device it runs" if asks else f"{name} communicates outside manual regions"
            hint = BEFORE
        elif shardy and name in ("infeed", "outfeed"):
            what = f"{name} needs a device, which Shardy forgets"
        elif shardy and is_call and CALLBACK not in call_target(operation):
            what = f"the custom call {call_target(operation)} has side effects"
        else:
            continue
        raise UsageError(f"{what}; XLA's partitioner refuses it here", where=place(operation), hint=hint)


# ---------------------------------------------------------------- messages of jaxlib
# Extracts the place in the file and one sentence from jaxlib's error messages.

# `"-":3:12` in an MLIR location; `was parsing 3:19: error: expects opcode` in XLA's HLO parser.
_MLIR_PLACE = re.compile(r'"-":([1-9]\d*):(\d+)')
_HLO_ERROR = re.compile(r"was parsing (\d+):(\d+): error: (.*)")
_STATUS = re.compile(r"^[A-Z_]+: ")
_FILE_PLACE = re.compile(r'"((?:[^"\\]|\\.)+)":(\d+)(?::(\d+))?')


def first_error(error: Exception) -> tuple[str, str]:
    """Place (`3:19`, or empty) and message of the first thing wrong, from an `ir.MLIRError` or an XLA status."""
    diagnostics = getattr(error, "error_diagnostics", None)
    if diagnostics:
        place = _MLIR_PLACE.search(str(diagnostics[0].location))
        return (f"{place[1]}:{place[2]}" if place else "", _one_line(str(diagnostics[0].message)))
    text = str(error)
    errors = _HLO_ERROR.findall(text)
    if errors:
        # The parser reports its attempts; one that ends in a colon only introduces the next.
        line, column, message = next((f for f in errors if not f[2].endswith(":")), errors[0])
        return f"{line}:{column}", message.split(", error: ")[-1]
    if "conversion error" in text:  # how the bindings put it
        return "", "a name in it is not text"
    return "", _one_line(_STATUS.sub("", text))


def _one_line(text: str) -> str:
    """The first line, without a full stop, short enough for a terminal."""
    line = text.strip().splitlines()[0].rstrip(".:; ") if text.strip() else "no reason given"
    return printable(line if len(line) <= 300 else line[:299] + "…")


def place_of(operation: Any, path: str) -> str:
    """The location of an operation:
    `model.py:12:4` if the program records it, else its line in the file, else the file.
    """
    match = _FILE_PLACE.search(str(operation.location))
    if not match:
        return path
    file = path if match[1] == "-" else match[1]
    return printable(":".join(part for part in (file, match[2], match[3]) if part))


# ---------------------------------------------------------------- splat constants
# Makes splat constants, and duplicates them: one copy for each op that reads one. Scalars are merged.

_DISTINGUISHING = frozenset(["value", "comparison_direction", "compare_type"])  # attributes of scalars that are merged


def merge_scalars(root: Any) -> None:
    """Makes equal scalar operations of a block one. Constants, and bias corrections that an optimizer computes for each
    weight, are a fifth of the operations of a training step, and have no dimension that a plan could split."""
    scalars: dict[Any, Any] = {}
    for operation in operations_in(root):
        constant = operation.name == CONSTANT
        if not (constant or kind_of(operation.name).elementwise) or len(operation.results) != 1:
            continue
        kind = operation.results[0].type
        if not isinstance(kind, ir.RankedTensorType) or kind.rank or len(operation.regions):
            continue
        if isinstance(kind.element_type, ir.ComplexType):  # whose constants jaxlib's Python cannot read
            continue
        names = tuple(operation.attributes)
        if not _DISTINGUISHING.issuperset(names):
            continue
        attributes = tuple([operation.attributes[name] for name in names])
        key = (operation.block, operation.name, kind, tuple(operation.operands), names, attributes)
        first = scalars.setdefault(key, operation)
        if first is not operation:
            operation.results[0].replace_all_uses_with(first.results[0])
            operation.erase()


def copy_splats(function: Any) -> None:
    """Gives each op that reads a splat constant a copy in front of it."""
    makers = xla.walk_ops(function, BROADCAST_IN_DIM, CONSTANT, inner_first=True)
    for operation in [maker for maker in makers if maker.results[0].type.rank and is_splat(maker)]:
        readers = list(dict.fromkeys(use.owner.operation for use in operation.results[0].uses))
        if readers and readers[0].block != operation.block:
            operation.move_before(readers[0])
        for reader in readers[1:]:
            copy = operation.clone(ip=ir.InsertionPoint(reader))
            for place, operand in enumerate(reader.operands):
                if operand == operation.results[0]:
                    reader.operands[place] = copy.results[0]


def is_splat(operation: Any) -> bool:
    """True if an operation makes an array with one constant value."""
    if operation.name == BROADCAST_IN_DIM:
        scalar = operation.operands[0]
        return not scalar.type.rank and not isinstance(scalar, ir.BlockArgument) and scalar.owner.name == CONSTANT
    return operation.name == CONSTANT and xla.constant_number(operation) is not None


def splat_of(number: str, kind: Any, ip: Any) -> Any:
    """A constant at an insertion point; every element is one number, given as text (see `xla.constant_number`)."""
    constant = ir.Operation.parse(f'"{CONSTANT}"() {{value = dense<{number}> : {kind}}} : () -> {kind}')
    ip.insert(constant)
    return constant.results[0]
