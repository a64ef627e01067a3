"""Other dialects than those XLA takes: their attributes are taken off, their operations refused with a hint.

Enters: a program, a parsed module, or what the parser said of a file. Leaves: a module without their attributes;
nothing, or an `InputError`; a hint.
"""

from __future__ import annotations

from typing import Any

from toast_cli.errors import InputError
from toast_cli.frontend.diagnostics import place_of
from toast_cli.xla import ADVANCE, INTERRUPT, ir, make_context, parse_module

# XLA's conversion to HLO takes what stands in `shape` and `tensor`, and constants, where shapes are known.
DIALECTS = frozenset({"builtin", "func", "stablehlo", "chlo", "mhlo", "sdy", "shape", "tensor"})
TAKEN = frozenset({"arith.constant"})
CUSTOM_CALL = "stablehlo.custom_call"
# Of a custom call's attributes, those that are its own or that it is handed: names without a dialect's, and MHLO's.
READ = frozenset({"api_version", "backend_config", "call_target_name", "called_computations", "mhlo"})
LOWER = (
    "lower the program to StableHLO first, e.g. with torch-mlir's or IREE's passes that end in StableHLO, "
    "or stablehlo-opt"
)


UNREGISTERED = "unregistered dialect"


def parse_without_foreign_attributes(program: bytes) -> Any:
    """The module without the attributes of dialects that are not known here (`tt.device = #tt.device<…>`): they say
    nothing to XLA. What a custom call reads stays.

    Raises `ir.MLIRError` where other things than attributes are of such dialects.
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
            except (TypeError, ValueError):  # one that exists and that Python cannot hold
                verdicts[text] = False
            else:
                verdicts[text] = False
        return verdicts[text]

    def own(entries: Any) -> Any:
        """The dictionaries of arguments or results."""
        return ir.ArrayAttr.get(
            [ir.DictAttr.get({one.name: one.attr for one in each if not is_foreign(one.attr)}) for each in entries]
        )

    def visit(operation: Any) -> Any:
        attributes = operation.attributes
        for name in list(attributes):
            if operation.name == "func.func" and name in ("arg_attrs", "res_attrs"):
                attributes[name] = own(attributes[name])
            elif not (operation.name == CUSTOM_CALL and name.partition(".")[0] in READ) and is_foreign(
                _value(attributes, name)
            ):
                del attributes[name]
        return ADVANCE

    with context:
        module.operation.walk(visit)
    # As text: the reader of bytecode ends the process at a type that nobody has registered.
    return parse_module(known, module.operation.get_asm(enable_debug_info=True, binary=True))


def _value(attributes: Any, name: str) -> Any:
    try:
        return attributes[name]
    except (TypeError, ValueError):  # complex numbers, which Python cannot hold
        return ""


def drop_declarations(module: Any) -> None:
    """Takes out what stands beside the functions of a module, has no name to refer to it by, and is of another dialect
    (`llvm.module_flags`)."""
    for view in list(module.body.operations):
        if not is_known(view.operation.name) and "sym_name" not in view.operation.attributes:
            view.operation.erase()


def refuse_foreign(module: Any, path: str) -> None:
    """Raises `InputError` at the first operation that XLA would not know."""
    found: list[Any] = []

    def visit(operation: Any) -> Any:
        if is_known(operation.name):
            return ADVANCE
        found.append(operation)
        return INTERRUPT

    module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    if found:
        raise InputError(f"{found[0].name} is not StableHLO", where=place_of(found[0], path), hint=LOWER)


def is_known(name: str) -> bool:
    """Whether XLA knows operations of that name, or they are taken out."""
    return name.partition(".")[0] in DIALECTS or name in TAKEN


def foreign_hint(message: str) -> str:
    """What to try where the parser does not know a dialect; empty where that is not what it complains of."""
    if "quant" in message and UNREGISTERED in message:
        return (
            "quantized types are not known here: write them as integers and scales, "
            "e.g. with stablehlo-legalize-quant-to-math"
        )
    if "not found for custom op" in message or UNREGISTERED in message:
        return LOWER
    return ""
