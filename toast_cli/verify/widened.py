"""Widens a program's narrow floating-point types, so that rounding does not hide errors of a plan.

Reordered sums of 16-bit numbers differ by percents, and by more where gradients cancel out, so a comparison says little
about a plan. In the same program on 32-bit numbers a wrong plan is as wrong, and rounding errors are below 1e-5.

Enters: a parsed module. Leaves: its text on f32, or None if that changes the program (it reads the bits of a narrow
number).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from toast_cli import xla

_NARROW = r"bf16|f16|f8E[0-9A-Z]+|f6E[0-9A-Z]+|f4E[0-9A-Z]+"
_TYPE = re.compile(rf"(tensor<(?:\d+x)*|complex<)(?:{_NARROW})(?=[>,])")
_CONSTANT = re.compile(rf'dense<("0x[0-9A-F]*"|[^">]*)>( : tensor<(?:\d+x)*)({_NARROW})>')
# A conversion that has become an identity. XLA removes it, and takes a sharding on it for that of all results of a
# barrier before it.
_NOTHING = re.compile(r'(= stablehlo\.convert %\S+) \{mhlo\.sharding = "[^"]*"\} (: \((tensor<[^>]*>)\) -> \3)')
_HEX = re.compile(r"0x[0-9A-F]+")
_BITS = "stablehlo.bitcast_convert"


def widened(module: Any) -> str | None:
    """Text of the module with every floating-point type below 32 bits replaced by f32; the module stays as it is."""
    for cast in xla.walk_ops(module, _BITS):
        kinds = [xla.shape_and_element_type(value.type) for value in (cast.operands[0], cast.results[0])]
        if any(kind is not None and re.fullmatch(_NARROW, kind[1]) for kind in kinds):
            return None
    text = module.operation.get_asm(enable_debug_info=False)
    return _NOTHING.sub(r"\1 \2", _TYPE.sub(r"\1f32", _CONSTANT.sub(_wide_constant, text)))


def is_narrow(elements: set[str]) -> bool:
    """True if some element type, as MLIR prints it, is widened."""
    return any(re.fullmatch(_NARROW, element) for element in elements)


def _wide_constant(found: re.Match[str]) -> str:
    """Rewrites a constant that is written as bits (a long list, infinities) to the bits of f32;
    others stay as printed."""
    numbers, shape, element = found.groups()
    narrow = _dtype(element)
    if numbers.startswith('"'):
        wide = np.frombuffer(bytes.fromhex(numbers[3:-1]), narrow).astype(np.float32)
        numbers = f'"0x{wide.tobytes().hex().upper()}"'
    else:
        numbers = _HEX.sub(lambda bits: _wide_bits(bits[0], narrow), numbers)
    return f"dense<{numbers}>{shape}f32>"


def _wide_bits(bits: str, narrow: np.dtype[Any]) -> str:
    raw = int(bits, 16).to_bytes(narrow.itemsize, "little")
    return f"0x{int(np.frombuffer(raw, narrow).astype(np.float32).view(np.uint32)[0]):08X}"


def _dtype(element: str) -> np.dtype[Any]:
    import ml_dtypes

    names = {"bf16": "bfloat16", "f16": "float16"}
    name = names.get(element) or f"float{element[1]}_{element[2:].lower()}"
    return np.dtype(getattr(ml_dtypes, name, name))
