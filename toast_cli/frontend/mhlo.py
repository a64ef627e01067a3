"""Converts MHLO, the predecessor of StableHLO, to StableHLO.

In: a module that may hold MHLO's operations: older versions of JAX, TensorFlow, torch-mlir and IREE write them.
Out: the same module with StableHLO's operations of the same names. Operations that only MHLO has stay. Also text
that does not parse, of older MLIR, StableHLO and MHLO, to the syntax of the installed jaxlib, line by line:
* constants of booleans have a byte for each element. The syntax before 2026 has a bit for each, the lowest first: any
program with a mask of more than 100 elements (JAX up to 0.8, TensorFlow up to 2.21, PyTorch/XLA up to 2.9);
* lists of integers of StableHLO's operations are arrays. StableHLO before 0.17 writes them as tensors (`slice_sizes =
dense<[1, 512]> : tensor<2xi64>`: any gather of JAX up to 0.4.23).
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

from toast_cli.errors import InputError
from toast_cli.frontend.diagnostics import first_error
from toast_cli.xla import ir, operations_in, parse_module

_BOOLEANS = re.compile(rb'dense<"0x([0-9A-Fa-f]+)"> ?: ?tensor<((?:\d+x)+)i1>')
# StableHLO attributes that hold such a list.
_NUMBERS = (
    b"base_dilations", b"broadcast_dimensions", b"broadcast_sizes", b"dimensions", b"edge_padding_high",
    b"edge_padding_low", b"fft_length", b"interior_padding", b"known_expanding_dimensions",
    b"known_nonexpanding_dimensions", b"lhs_dilation", b"limit_indices", b"permutation", b"rhs_dilation",
    b"slice_sizes", b"start_indices", b"strides", b"window_dilations", b"window_dimensions", b"window_strides",
)  # fmt: skip
_LIST = re.compile(rb"\b(" + b"|".join(_NUMBERS) + rb"|window_reversal) = dense<([^>\"]*)> ?: ?tensor<(\d+)x(i64|i1)>")

# In MLIR's generic form: `"mhlo.gather"(%0) <{dimension_numbers = #mhlo.gather<…>}>`, `!mhlo.…`.
_OPERATION = re.compile(rb'"mhlo\.(\w+)"(?=\()')
# The attributes that StableHLO has, too.
_ATTRIBUTE = re.compile(
    rb"#mhlo(?=\.(?:channel_handle|conv|dot|dot_algorithm|gather|output_operand_alias|result_accuracy|scatter)<"
    rb"|<(?:comparison_direction|comparison_type|fft_type|precision|rng_algorithm|rng_distribution|transpose) )"
)


def in_todays_words(text: bytes) -> bytes:
    """The text with both rewritten; unchanged if it holds neither."""
    return arrays_of_numbers(_BOOLEANS.sub(_byte_for_each, text))


def arrays_of_numbers(text: bytes) -> bytes:
    """The text with the lists of StableHLO's operations written as arrays."""
    return _LIST.sub(_array, text)


def _byte_for_each(found: re.Match[bytes]) -> bytes:
    elements = prod(int(size) for size in found[2].split(b"x") if size)
    digits = found[1]
    if len(digits) % 2 or len(digits) // 2 != -(-elements // 8):
        return found[0]
    import numpy as np

    packed = np.frombuffer(bytes.fromhex(digits.decode()), np.uint8)
    each = np.unpackbits(packed, count=elements, bitorder="little").tobytes().hex().encode()
    return found[0].replace(digits, each, 1)


def _array(found: re.Match[bytes]) -> bytes:
    name, written, count, kind = found[1], found[2].strip(b"[] "), int(found[3]), found[4]
    numbers = [number.strip() for number in written.split(b",") if number.strip()]
    if len(numbers) == 1:  # a splat
        numbers *= count
    listed = b": " + b", ".join(numbers) if numbers else b""
    return name + b" = array<" + kind + listed + b">"


def in_stablehlo(module: Any, path: str) -> Any:
    """The module, or a copy with MHLO operations converted to StableHLO.

    Raises `InputError` if StableHLO refuses an operation that MHLO accepts.
    """
    names = {one.name.removeprefix("mhlo.") for one in operations_in(module) if one.name.startswith("mhlo.")}
    twins = {name.encode() for name in names if module.context.is_registered_operation(f"stablehlo.{name}")}
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
