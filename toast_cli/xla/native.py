"""jaxlib's native modules: imports them, checks that they have the names that toast uses, and translates their
exceptions.

The names of jaxlib and jax that toast uses are not all public: a new version may lack one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

from toast_cli.base.children import uninterrupted
from toast_cli.base.errors import MissingExtraError

# ---------------------------------------------------------------- versions
# The versions of jaxlib that toast is tested with, and warnings about others.
#
# The names of jaxlib and jax that toast uses are not all public: a new version may lack one.

OLDEST, NEWEST = "0.10.1", "0.12"
_TESTED = f"toast is tested with jaxlib {OLDEST} to {NEWEST}"


def needed(module: str, *names: str) -> Any:
    """A module of jaxlib or jax, after checking that it has these names (`mlir.hlo_to_stablehlo`).

    Raises `MissingExtraError` at the first that it lacks.
    """
    name = ""
    try:
        imported = import_module(module)
        for name in names:
            attrgetter(name)(imported)
    except (ImportError, AttributeError) as error:
        package = module.partition(".")[0]
        hint = f"{_TESTED}: pip install 'jax<{_after(NEWEST)}'"
        try:
            installed = f"{package} {version(package)}"
        except PackageNotFoundError:
            raise MissingExtraError(f"{package} is not installed", hint=hint) from None
        lacking = f"has no {module}" + (f".{name}" if name else "")
        raise MissingExtraError(f"{installed} {lacking}, which toast needs ({error})", hint=hint) from None
    return imported


def untested(installed: str) -> str:
    """A warning about a version of jaxlib that toast is not tested with; empty if it is."""
    if _numbers(installed) < _numbers(OLDEST):
        return f"jaxlib {installed} is older than what toast needs; {_TESTED}"
    if _numbers(installed)[:2] > _numbers(NEWEST):
        return f"jaxlib {installed} is newer than what toast knows; {_TESTED}"
    return ""


def untested_here() -> str:
    """The same for the installed jaxlib."""
    return untested(version("jaxlib"))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _after(text: str) -> str:
    """The next minor version."""
    major, minor = _numbers(text)
    return f"{major}.{minor + 1}"


_LIBRARIES = "jaxlib.mlir._mlir_libs"
_DIMENSIONS = ("DotDimensionNumbers.get", "GatherDimensionNumbers.get", "ScatterDimensionNumbers.get")
_ARTIFACTS = ("deserialize_portable_artifact", "get_current_version", "register_dialect")
_SHARDY = ("DimMappingAttr", "OpShardingRuleAttr", "TensorMappingAttr", "TensorShardingAttr", "register_dialect")
_CONVERSIONS = ("hlo_to_stablehlo", "mlir_module_to_xla_computation", "refine_polymorphic_shapes")
_RUNNING = ("CompileOptions", "DeviceAssignment.create", "DeviceList", "get_tfrt_cpu_client")
_HLO = (
    "HloSharding.from_string", "HloSharding.iota_tile", "OpSharding.Type", "XlaComputation", "hlo_module_from_text",
)  # fmt: skip

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
ADVANCE, SKIP = ir.WalkResult.ADVANCE, ir.WalkResult.SKIP


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
