"""Refuses programs in dialects that XLA does not take, early and with a hint.

Enters: a parsed module, or what the parser said of a file. Leaves: nothing, or an `InputError`; a hint.
"""

from __future__ import annotations

from typing import Any

from toast_cli.errors import InputError
from toast_cli.frontend.diagnostics import place_of
from toast_cli.xla import ADVANCE, INTERRUPT, ir

# XLA's conversion to HLO takes what stands in `shape` and `tensor`, and constants, where shapes are known.
DIALECTS = frozenset({"builtin", "func", "stablehlo", "chlo", "mhlo", "sdy", "shape", "tensor"})
TAKEN = frozenset({"arith.constant"})
LOWER = (
    "lower the program to StableHLO first, e.g. with torch-mlir's or IREE's passes that end in StableHLO, "
    "or stablehlo-opt"
)


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
    if "quant" in message and "unregistered dialect" in message:
        return (
            "quantized types are not known here: write them as integers and scales, "
            "e.g. with stablehlo-legalize-quant-to-math"
        )
    if "not found for custom op" in message or "unregistered dialect" in message:
        return LOWER
    return ""
