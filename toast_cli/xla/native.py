"""Imports jaxlib's native modules, checks them for the names that toast uses, and translates their exceptions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

from toast_cli.process import uninterrupted
from toast_cli.xla.versions import needed

_LIBRARIES = "jaxlib.mlir._mlir_libs"
_DIMENSIONS = ("DotDimensionNumbers.get", "GatherDimensionNumbers.get", "ScatterDimensionNumbers.get")
_ARTIFACTS = ("deserialize_portable_artifact", "get_current_version", "register_dialect")
_SHARDY = ("DimMappingAttr", "OpShardingRuleAttr", "TensorMappingAttr", "TensorShardingAttr", "register_dialect")
_CONVERSIONS = ("hlo_to_stablehlo", "mlir_module_to_xla_computation", "refine_polymorphic_shapes")
_RUNNING = ("CompileOptions", "DeviceAssignment.create", "DeviceList", "get_tfrt_cpu_client")
_HLO = ("HloSharding.from_string", "XlaComputation", "hlo_module_from_text")

with uninterrupted():  # an exception while a native module is loaded ends the process: std::terminate
    ir = needed("jaxlib.mlir.ir", "DenseResourceElementsAttr", "Module.parse", "WalkResult")
    PassManager = needed("jaxlib.mlir.passmanager", "PassManager.parse").PassManager
    jax_native = needed("jaxlib._jax", *_RUNNING, *(f"mlir.{name}" for name in _CONVERSIONS))
    hlo = needed("jaxlib._hlo", *_HLO) if find_spec("jaxlib._hlo") else needed("jaxlib._jax", *_HLO)  # up to 0.10.1
    chlo = needed(f"{_LIBRARIES}._chlo", "register_dialect")
    jax_mlir_ext = needed(f"{_LIBRARIES}._jax_mlir_ext", "inlined_func_call", "register_dialects")
    mhlo = needed(f"{_LIBRARIES}._mlirHlo", "register_mhlo_dialect")
    # Not `_sdy` itself: that imports this module on its way, which then lacks half its names (jaxlib 0.12).
    sdy = needed("jaxlib.mlir.dialects.sdy", *_SHARDY)
    stablehlo = needed(f"{_LIBRARIES}._stablehlo", *_DIMENSIONS, *_ARTIFACTS)
    tpu = needed(f"{_LIBRARIES}._tpu_ext", "register_dialect")

# Return values of visitors of `operation.walk`. An enumeration lookup takes as long as visiting an operation.
ADVANCE, INTERRUPT, SKIP = ir.WalkResult.ADVANCE, ir.WalkResult.INTERRUPT, ir.WalkResult.SKIP

__all__ = [
    "ADVANCE", "INTERRUPT", "SKIP", "PassManager", "chlo", "hlo", "ir", "jax_mlir_ext", "jax_native", "mhlo",
    "refusing", "sdy", "stablehlo", "tpu",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")


def refusing(native: Callable[P, T]) -> Callable[P, T]:
    """Wraps a native function so that its other exceptions become RuntimeError.

    The bindings map C++ exceptions to Python's nearest: `std::length_error` to ValueError, `std::out_of_range` to
    IndexError. For a reader they all mean that the input is malformed.
    """

    @wraps(native)
    def called(*arguments: P.args, **named: P.kwargs) -> T:
        try:
            return native(*arguments, **named)
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            raise RuntimeError(str(error)) from error

    return called
