"""Handles dialects that XLA does not accept: drops their attributes, refuses their operations with a hint.

In: a program, a parsed module, or a parser message. Out: a module without such attributes; nothing, or an
`InputError`; a hint.
"""

from __future__ import annotations

from typing import Any

from toast_cli.errors import InputError
from toast_cli.frontend.diagnostics import place_of
from toast_cli.xla import ir, make_context, operations_in, parse_module

# XLA's conversion to HLO accepts the operations of `shape` and `tensor`, and constants, if shapes are static.
DIALECTS = frozenset({"builtin", "func", "stablehlo", "chlo", "mhlo", "sdy", "shape", "tensor"})
TAKEN = frozenset({"arith.constant"})
CUSTOM_CALL = "stablehlo.custom_call"
# Attributes that a custom call keeps: names without a dialect prefix, and MHLO's.
READ = frozenset({"api_version", "backend_config", "call_target_name", "called_computations", "mhlo"})
LOWER = (
    "lower the program to StableHLO first, e.g. with torch-mlir's or IREE's passes that end in StableHLO, "
    "or stablehlo-opt"
)


UNREGISTERED = "unregistered dialect"


def parse_without_foreign_attributes(program: bytes) -> Any:
    """The module without the attributes of unregistered dialects (`tt.device = #tt.device<…>`), which XLA ignores.
    Attributes that a custom call reads stay.

    Raises `ir.MLIRError` if operations or types are of such dialects.
    """
    context = make_context()
    context.allow_unregistered_dialects = True
    module = parse_module(context, program)
    known = make_context()
    verdicts: dict[str, bool] = {}

    def is_foreign(value: Any) -> bool:
        text = str(value) if not isinstance(value, ir.StringAttr | ir.DenseElementsAttr) else ""
        if "#" not in text and "!" not in text:
            return False
        if text not in verdicts:
            try:
                ir.Attribute.parse(text, known)
            except ir.MLIRError:
                verdicts[text] = True
            except (TypeError, ValueError):  # an attribute that Python cannot represent
                verdicts[text] = False
            else:
                verdicts[text] = False
        return verdicts[text]

    def own(entries: Any) -> Any:
        """The argument or result dictionaries without foreign attributes."""
        return ir.ArrayAttr.get(
            [ir.DictAttr.get({one.name: one.attr for one in each if not is_foreign(one.attr)}) for each in entries]
        )

    with context:
        for operation in operations_in(module):
            attributes = operation.attributes
            for name in list(attributes):
                if operation.name == "func.func" and name in ("arg_attrs", "res_attrs"):
                    attributes[name] = own(attributes[name])
                elif not (operation.name == CUSTOM_CALL and name.partition(".")[0] in READ) and is_foreign(
                    _value(attributes, name)
                ):
                    del attributes[name]
    # As text: the reader of bytecode ends the process at an unregistered type.
    return parse_module(known, module.operation.get_asm(enable_debug_info=True, binary=True))


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
    """Raises `InputError` at the first operation that XLA does not accept."""
    found = next((one for one in operations_in(module) if not is_known(one.name)), None)
    if found is not None:
        raise InputError(f"{found.name} is not StableHLO", where=place_of(found, path), hint=LOWER)


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
