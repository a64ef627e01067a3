"""Operations with side effects: infeeds and outfeeds, transfers to and from the host, custom calls with side effects.

XLA's partitioner must know on which device each of them runs. In: a module. Out: the same, in which each outside
manual regions is bound to device 0, as JAX binds host callbacks, unless the program states another device.
"""

from __future__ import annotations

from typing import Any

from toast_cli.errors import UsageError
from toast_cli.program.ops import kind_of
from toast_cli.xla import declare_mesh, free_symbol, ir, operations_in

CUSTOM_CALL, REGION = "stablehlo.custom_call", "sdy.manual_computation"
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
    found = [
        operation
        for operation in operations_in(module, outside=REGION)
        if operation.name in EFFECTS and has_effect(operation) and SHARDING not in operation.attributes
    ]
    if not found:
        return
    name = free_symbol(module, "maximal_mesh_0")
    with module.context:
        declare_mesh(module, name, ir.Attribute.parse("#sdy.mesh<[], device_ids=[0]>"))
        for operation in found:
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
    return not _target(operation).startswith(PLACELESS)


def refuse_unpartitionable(module: Any, place: Any, *, shardy: bool) -> None:
    """Raises `UsageError` at the first operation outside manual regions that XLA's partitioner refuses. shardy: True if
    Shardy reads the program; it loses the device of a custom call and, in jaxlib 0.12, that of an infeed or outfeed."""
    for operation in operations_in(module, outside=REGION):
        name, hint = operation.name.removeprefix("stablehlo."), "write it with --format hlo"
        if kind_of(operation.name).per_device:
            asks = operation.name in NUMBERS
            what = f"{name} asks on which device it runs" if asks else f"{name} communicates outside manual regions"
            hint = BEFORE
        elif shardy and name in ("infeed", "outfeed"):
            what = f"{name} needs a device, which Shardy forgets"
        elif shardy and operation.name == CUSTOM_CALL and has_effect(operation) and CALLBACK not in _target(operation):
            what = f"the custom call {_target(operation)} has side effects"
        else:
            continue
        raise UsageError(f"{what}; XLA's partitioner refuses it here", where=place(operation), hint=hint)


def _target(operation: Any) -> str:
    return bytes(ir.StringAttr(operation.attributes["call_target_name"]).value_bytes).decode("utf-8", "replace")
