"""Converts MHLO, the predecessor of StableHLO, to StableHLO.

Enters: a module that may hold MHLO's operations: older versions of JAX, TensorFlow, torch-mlir and IREE write them.
Leaves: the same module with StableHLO's operations of the same names. Operations that only MHLO has stay.
"""

from __future__ import annotations

import re
from typing import Any

from toast_cli.errors import InputError
from toast_cli.frontend.diagnostics import first_error
from toast_cli.frontend.older_text import arrays_of_numbers
from toast_cli.xla import ADVANCE, ir, parse_module

# In MLIR's generic form: `"mhlo.gather"(%0) <{dimension_numbers = #mhlo.gather<…>}>`, `!mhlo.…`.
_OPERATION = re.compile(rb'"mhlo\.(\w+)"(?=\()')
# The attributes that StableHLO has, too.
_ATTRIBUTE = re.compile(
    rb"#mhlo(?=\.(?:channel_handle|conv|dot|dot_algorithm|gather|output_operand_alias|result_accuracy|scatter)<"
    rb"|<(?:comparison_direction|comparison_type|fft_type|precision|rng_algorithm|rng_distribution|transpose) )"
)


def in_stablehlo(module: Any, path: str) -> Any:
    """The module, or a copy with MHLO operations converted to StableHLO.

    Raises `InputError` if StableHLO refuses an operation that MHLO accepts.
    """
    twins = {name[5:].encode() for name in mhlo_names(module) if has_twin(name, module.context)}
    if not twins:
        return module

    def renamed(operation: re.Match[bytes]) -> bytes:
        return operation[0].replace(b"mhlo", b"stablehlo", 1) if operation[1] in twins else operation[0]

    text = module.operation.get_asm(print_generic_op_form=True, enable_debug_info=True, binary=True)
    text = _ATTRIBUTE.sub(b"#stablehlo", _OPERATION.sub(renamed, text))
    try:
        return parse_module(module.context, arrays_of_numbers(text))
    except ir.MLIRError as error:
        hint = "convert it to StableHLO with what wrote it (mlir-hlo-opt --hlo-legalize-to-stablehlo)"
        raise InputError(f"MHLO that is not known here: {first_error(error)[1]}", where=path, hint=hint) from None


def mhlo_names(module: Any) -> set[str]:
    """Names of the MHLO operations in a module."""
    found: set[str] = set()

    def visit(operation: Any) -> Any:
        if operation.name.startswith("mhlo."):
            found.add(operation.name)
        return ADVANCE

    module.operation.walk(visit)
    return found


def has_twin(name: str, context: Any) -> bool:
    """True if StableHLO has an operation of the same name as this MHLO operation."""
    return bool(context.is_registered_operation(name.replace("mhlo", "stablehlo", 1)))
