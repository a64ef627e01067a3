"""Conversions by XLA: between HLO text, HLO proto and StableHLO; shape refinement; parsing of HLO shardings."""

from __future__ import annotations

from typing import Any

from toast_cli.xla.native import hlo, jax_native, refusing


@refusing
def hlo_text_to_proto(text: str) -> bytes:
    """A serialized HloModuleProto.

    Raises RuntimeError (`was parsing 3:19: error: …`); hostile text may abort the process.
    """
    return bytes(hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())


@refusing
def full_hlo_text(text: str) -> str:
    """HLO text in the long form in which compilers print it: `%` before names, types before operands.

    Raises RuntimeError as `hlo_text_to_proto` does.
    """
    return str(hlo.hlo_module_from_text(text).to_string())


@refusing
def hlo_proto_to_stablehlo(proto: bytes) -> bytes:
    """StableHLO (with some mhlo ops) as bytecode.

    Raises RuntimeError, `ir.MLIRError`; hostile bytes may abort the process.
    """
    return bytes(jax_native.mlir.hlo_to_stablehlo(proto))


@refusing
def stablehlo_to_hlo_text(bytecode: bytes) -> str:
    """HLO text, constants in full, of a StableHLO module whose `mhlo.sharding` strings become GSPMD shardings.

    Raises RuntimeError for what HLO cannot hold. A sharding that does not parse is dropped without a word.
    """
    computation = jax_native.mlir.mlir_module_to_xla_computation(bytecode, use_tuple_args=False, return_tuple=False)
    return str(computation.as_hlo_text(print_large_constants=True))


def hlo_boundary_leaves(proto: bytes) -> tuple[list[Any], Any]:
    """Parameters and result of a serialized HloModuleProto's entry, tuples as nested lists, arrays as None."""

    def tree(shape: Any) -> Any:
        return [tree(part) for part in shape.tuple_shapes()] if shape.is_tuple() else None

    shape = hlo.XlaComputation(proto).program_shape()
    return [tree(parameter) for parameter in shape.parameter_shapes()], tree(shape.result_shape())


def hlo_on_host(proto: bytes) -> tuple[list[bool], list[bool]]:
    """True for each array of a serialized HloModuleProto's parameters, and of its result, that is in host memory."""

    def arrays(shape: Any) -> list[bool]:
        if shape.is_tuple():
            return [there for part in shape.tuple_shapes() for there in arrays(part)]
        return [":S(5)" in repr(shape)]

    shape = hlo.XlaComputation(proto).program_shape()
    return [there for one in shape.parameter_shapes() for there in arrays(one)], arrays(shape.result_shape())


@refusing
def refine_shapes(bytecode: bytes) -> bytes:
    """Refines the dynamic shapes inside a program whose arguments are static.

    Raises RuntimeError or `ir.MLIRError`.
    """
    return bytes(
        jax_native.mlir.refine_polymorphic_shapes(bytecode, enable_shape_assertions=False, validate_static_shapes=True)
    )


def kept_arguments(lowered: Any) -> tuple[int, ...]:
    """Leaves of a `jax.stages.Lowered` function's arguments that are arguments of the program
    (it drops unused ones)."""
    return tuple(sorted(lowered._lowering.compile_args["kept_var_idx"]))


def sharding_devices(text: str) -> int:
    """Number of devices of a GSPMD sharding; 1 if it states none (`{replicated}`)."""
    return max(1, len(hlo.HloSharding.from_string(text).tile_assignment_devices()))


def reads_sharding(text: str) -> bool:
    """True if XLA can parse a GSPMD sharding string."""
    try:
        hlo.HloSharding.from_string(text)
    except RuntimeError:
        return False
    return True


def hlo_sharding_devices(text: str) -> tuple[list[int], list[int], bool]:
    """A GSPMD sharding string as XLA reads it: tile dimensions, device numbers tile by tile, True if the last dimension
    is replicated."""
    sharding = hlo.HloSharding.from_string(text)
    dimensions = list(sharding.tile_assignment_dimensions())
    return dimensions, list(sharding.tile_assignment_devices()), bool(sharding.replicate_on_last_tile_dim())
