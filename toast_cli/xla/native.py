"""The native modules of jaxlib, under one name each; and how their exceptions are taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from toast_cli.process import uninterrupted

with uninterrupted():  # an exception while a native module is loaded ends the process: std::terminate
    from jaxlib import _jax as jax_native
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _chlo as chlo
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext as jax_mlir_ext
    from jaxlib.mlir._mlir_libs import _mlirHlo as mhlo
    from jaxlib.mlir._mlir_libs import _sdy as sdy
    from jaxlib.mlir._mlir_libs import _stablehlo as stablehlo
    from jaxlib.mlir.passmanager import PassManager

    try:
        from jaxlib import _hlo as hlo  # from 0.10.2 on
    except ImportError:
        hlo = jax_native

# What a visitor of `operation.walk` says. To look one up in the enumeration takes as long as to visit an operation.
ADVANCE, INTERRUPT, SKIP = ir.WalkResult.ADVANCE, ir.WalkResult.INTERRUPT, ir.WalkResult.SKIP

__all__ = [
    "ADVANCE", "INTERRUPT", "SKIP", "PassManager", "chlo", "hlo", "ir", "jax_mlir_ext", "jax_native", "mhlo",
    "refusing", "sdy", "stablehlo",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")


def refusing(native: Callable[P, T]) -> Callable[P, T]:
    """A function of native code, whose other exceptions become RuntimeError.

    The bindings pass on what the C++ libraries throw as Python's nearest: `std::length_error` as ValueError,
    `std::out_of_range` as IndexError. For a reader they are all one: the input is not what it says.
    """

    @wraps(native)
    def called(*arguments: P.args, **named: P.kwargs) -> T:
        try:
            return native(*arguments, **named)
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            raise RuntimeError(str(error)) from error

    return called
