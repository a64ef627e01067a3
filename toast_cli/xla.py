"""The one seam to jaxlib: contexts, parsing, passes and conversions. Every private jaxlib name the project uses lives
here.

Importing this module loads `jaxlib.mlir` (about 0.15 s) but not jax; import it lazily from anything the command line
loads at start. `ir` and Shardy's attribute classes (`sdy`) are re-exported so that no other module needs to import
jaxlib.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from toast_cli.process import uninterrupted

with uninterrupted():  # an exception while a native module is loaded ends the process: std::terminate
    from jaxlib import _jax
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _chlo, _jax_mlir_ext, _mlirHlo, _sdy, _stablehlo
    from jaxlib.mlir.passmanager import PassManager

    try:
        from jaxlib import _hlo  # from 0.10.2 on
    except ImportError:
        _hlo = _jax

sdy = _sdy
# What a visitor of `operation.walk` says. To look one up in the enumeration takes as long as to visit an operation.
ADVANCE, INTERRUPT, SKIP = ir.WalkResult.ADVANCE, ir.WalkResult.INTERRUPT, ir.WalkResult.SKIP

__all__ = ["ADVANCE", "INTERRUPT", "SKIP", "ir", "sdy"]

P = ParamSpec("P")
T = TypeVar("T")


def _refusing(native: Callable[P, T]) -> Callable[P, T]:
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


def make_context() -> Any:
    """A fresh `ir.Context` with every dialect a JAX program may hold: func, stablehlo, chlo, sdy, mhlo and upstream
    ones.
    """
    context = ir.Context()
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    _sdy.register_dialect(context)
    _mlirHlo.register_mhlo_dialect(context)
    _chlo.register_dialect(context)
    _stablehlo.register_dialect(context)
    return context


@_refusing
def parse_module(context: Any, program: bytes | str) -> Any:
    """An `ir.Module` from MLIR text or bytecode.

    Raises `ir.MLIRError` (with `error_diagnostics`) when it does not parse, RuntimeError where its sizes are absurd.
    """
    return ir.Module.parse(program, context)


@_refusing
def parse_portable_artifact(context: Any, artifact: bytes) -> Any:
    """An `ir.Module` from a StableHLO portable artifact. Raises `ir.MLIRError`; hostile bytes may abort the process."""
    return _stablehlo.deserialize_portable_artifact(context, artifact)


def stablehlo_version() -> str:
    """The version of StableHLO that this jaxlib writes, `1.17.0`."""
    return str(_stablehlo.get_current_version())


def write_portable_artifact(bytecode: bytes) -> bytes:
    """A StableHLO portable artifact, of this jaxlib's version, of MLIR text or bytecode; Shardy's shardings stay in
    it.
    """
    module = parse_module(make_context(), bytecode)
    return bytes(_jax.mlir.serialize_portable_artifact(module, stablehlo_version(), True))


def kept_arguments(lowered: Any) -> tuple[int, ...]:
    """Of a `jax.stages.Lowered`: which leaves of the function's arguments are arguments of the program (it drops
    unused ones).
    """
    return tuple(sorted(lowered._lowering.compile_args["kept_var_idx"]))


def write_bytecode(module: Any) -> bytes:
    """A module, or its operation, as MLIR bytecode, locations included."""
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


@_refusing
def hlo_text_to_proto(text: str) -> bytes:
    """A serialized HloModuleProto.

    Raises RuntimeError (`was parsing 3:19: error: …`); hostile text may abort the process.
    """
    return bytes(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())


@_refusing
def full_hlo_text(text: str) -> str:
    """HLO text in the long form in which compilers print it: `%` before names, types before operands.

    Raises RuntimeError as `hlo_text_to_proto` does.
    """
    return str(_hlo.hlo_module_from_text(text).to_string())


@_refusing
def hlo_proto_to_stablehlo(proto: bytes) -> bytes:
    """StableHLO (with some mhlo ops) as bytecode.

    Raises RuntimeError, `ir.MLIRError`; hostile bytes may abort the process.
    """
    return bytes(_jax.mlir.hlo_to_stablehlo(proto))


@_refusing
def stablehlo_to_hlo_text(bytecode: bytes) -> str:
    """HLO text, constants in full, of a StableHLO module whose `mhlo.sharding` strings become GSPMD shardings.

    Raises RuntimeError for what HLO cannot hold. A sharding that does not parse is dropped without a word.
    """
    computation = _jax.mlir.mlir_module_to_xla_computation(bytecode, use_tuple_args=False, return_tuple=False)
    return str(computation.as_hlo_text(print_large_constants=True))


def hlo_boundary_leaves(proto: bytes) -> tuple[list[Any], Any]:
    """Parameters and result of a serialized HloModuleProto's entry, tuples as nested lists, arrays as None."""

    def tree(shape: Any) -> Any:
        return [tree(part) for part in shape.tuple_shapes()] if shape.is_tuple() else None

    shape = _hlo.XlaComputation(proto).program_shape()
    return [tree(parameter) for parameter in shape.parameter_shapes()], tree(shape.result_shape())


@_refusing
def refine_shapes(bytecode: bytes) -> bytes:
    """Works out the dynamic shapes inside a program whose arguments are static.

    Raises RuntimeError or `ir.MLIRError`.
    """
    return bytes(
        _jax.mlir.refine_polymorphic_shapes(bytecode, enable_shape_assertions=False, validate_static_shapes=True)
    )


@_refusing
def run_passes(module: Any, pipeline: str) -> None:
    """Runs a pass pipeline, e.g. `func.func(sdy-populate-op-sharding-rules)`, on the module, in place.

    The module is verified once, before, and not again after each pass, which takes a third of the time.
    Raises `ir.MLIRError` when the module is malformed or a pass fails. A failed internal check aborts the process: see
    `docs` of the pass before use.
    """
    manager = PassManager.parse(f"builtin.module({pipeline})", module.context)
    manager.enable_verifier(False)
    module.operation.verify()
    manager.run(module.operation)


def walk_ops(root: Any, *names: str) -> list[Any]:
    """All operations with one of these names under `root`, nested ones included, in program order."""
    found: list[Any] = []

    def visit(operation: Any) -> Any:
        if operation.name in names:
            found.append(operation)
        return ADVANCE

    root.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found


def inline_function(function: Any, arguments: Iterator[Any] | list[Any], call: Any) -> list[Any]:
    """Clones the body of `function` (one block) in front of `call`; returns the values it returned.

    Locations of the clones keep the call's name in front (`call/op`). The call itself stays as it is.
    """
    with ir.InsertionPoint(call), call.location:
        return list(_jax_mlir_ext.inlined_func_call(function.operation, list(arguments)))


# -- reading ----------------------------------------------------------------------------------------------------------


def sharding_rule(attribute: Any) -> tuple[Any, ...]:
    """A populated `sdy.sharding_rule` as plain data: sizes, operand and result factors, reduction, need-replication,
    permutation.
    """
    rule = _sdy.OpShardingRuleAttr(attribute)

    def mappings(tensors: Any) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(
            tuple(tuple(_sdy.DimMappingAttr(d).factor_indices) for d in _sdy.TensorMappingAttr(t).dim_mappings)
            for t in tensors
        )

    return (
        tuple(rule.factor_sizes),
        mappings(rule.operand_mappings),
        mappings(rule.result_mappings),
        frozenset(rule.reduction_factors),
        frozenset(rule.need_replication_factors),
        frozenset(rule.permutation_factors),
    )


def is_custom_rule(attribute: Any) -> bool:
    """Whether a sharding rule was written by whoever made the program, for a custom call, rather than populated by
    Shardy.
    """
    return bool(_sdy.OpShardingRuleAttr(attribute).is_custom)


def dot_dimensions(attribute: Any) -> tuple[list[int], list[int], list[int], list[int]]:
    """Of `#stablehlo.dot`: batching dimensions of left and right, contracting dimensions of left and right."""
    dims = _stablehlo.DotDimensionNumbers(attribute)
    return (
        list(dims.lhs_batching_dimensions), list(dims.rhs_batching_dimensions),
        list(dims.lhs_contracting_dimensions), list(dims.rhs_contracting_dimensions),
    )  # fmt: skip


def dot_dimension_numbers(dims: list[list[int]], context: Any) -> Any:
    """The attribute of these dimensions, in the order of `dot_dimensions`."""
    left, right, contracted_left, contracted_right = dims
    return _stablehlo.DotDimensionNumbers.get(left, right, contracted_left, contracted_right, context=context)


def shape_and_element_type(kind: Any) -> tuple[tuple[int, ...], str] | None:
    """Shape and printed element type of a ranked tensor type; None for a token."""
    if isinstance(kind, ir.RankedTensorType):
        return tuple(kind.shape), str(kind.element_type)
    return None


def element_types(module: Any) -> set[str]:
    """Element types, as MLIR prints them, of everything that operations in the module result in."""
    seen: set[str] = set()

    def visit(operation: Any) -> Any:
        for result in operation.results:
            seen.add(str(result.type))
        return ADVANCE

    module.operation.walk(visit)
    with module.context:
        kinds = [shape_and_element_type(ir.Type.parse(kind)) for kind in seen]
    return {kind[1] for kind in kinds if kind}


def location_name(location: Any) -> str:
    """The name in a `NameLoc` (`params['w']`), else an empty string."""
    text = str(location)
    return text[5:-2].replace('\\"', '"') if text.startswith('loc("') and text.endswith('")') else ""


def main_function(module: Any) -> Any:
    """The entry function."""
    return next(op for op in module.body.operations if op.operation.name == "func.func" and op.name.value == "main")


def module_name(module: Any) -> str:
    """The module's symbol name without jit's prefix; "main" where it has none."""
    attributes = module.operation.attributes
    name = str(attributes["sym_name"].value) if "sym_name" in attributes else ""
    return name.removeprefix("jit_").removeprefix("jit__") or "main"


def remove_sharding_rules(module: Any) -> None:
    """Takes every populated `sdy.sharding_rule` off again; one that the program itself brought (a custom call's)
    stays.
    """
    run_passes(module, "func.func(sdy-drop-sharding-rules)")


# -- compiling and running --------------------------------------------------------------------------------------------


def cpu_devices(count: int) -> list[Any]:
    """So many virtual CPU devices of a fresh client. A compiler that finds a fault in itself aborts the process."""
    register_lapack()
    return list(_jax.get_tfrt_cpu_client(num_devices=count).devices())


@cache
def register_lapack() -> None:
    """Lets this process run, and partition, what JAX leaves to LAPACK on CPU: Cholesky, QR, eigenvalues, singular
    values.
    """
    from jaxlib import lapack, xla_client

    lapack._lapack.initialize()
    xla_client.register_custom_call_handler("cpu", _jax.register_custom_call_target)
    for name, function, version in lapack.registrations()["cpu"]:
        xla_client.register_custom_call_target(name, function, platform="cpu", api_version=version)
    for name in lapack.batch_partitionable_targets():  # as JAX says too: a batch of matrices may be split
        xla_client.register_custom_call_as_batch_partitionable(name)


def compile_program(
    program: bytes, devices: list[Any], *, shardy: bool, settings: Mapping[str, str | bool] | None = None
) -> Any:
    """A loaded executable of StableHLO (text or bytecode) over `devices`, one partition each. Raises RuntimeError.

    `settings` are XLA's debug options by name, e.g. `xla_dump_to`.
    """
    options = _jax.CompileOptions()
    options.env_option_overrides = list((settings or {}).items())
    assignment = _jax.DeviceAssignment.create(np.array([[device.id for device in devices]]))
    build = options.executable_build_options
    for target in (options, build):
        target.num_replicas = 1
        target.num_partitions = len(devices)
        target.device_assignment = assignment
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = shardy
    return devices[0].client.compile_and_load(program, _jax.DeviceList(tuple(devices)), options)


def tpu_devices(topology: str, megacore: bool) -> list[Any]:
    """Devices of a TPU slice that need not be there, e.g.

    `v4:2x2x4`, for compiling ahead of time. Imports jax; needs libtpu.
    """
    from jax.experimental import topologies

    options = {"chip_config_name": "megacore"} if megacore else {}
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices)


def gpu_devices(topology: str, config: str) -> list[Any]:
    """GPUs that need not be there, e.g. `1x2x8` (slices x hosts x GPUs), of the kind `config` (a `GpuTargetConfigProto`
    as text) describes.

    Imports jax; needs a CUDA plugin.
    """
    from jax.experimental import topologies

    found = topologies.get_topology_desc(platform="cuda", topology_name="", topology=topology, target_config=config)
    return list(found.devices)


def compile_ahead(program: bytes, devices: list[Any], *, shardy: bool, options: dict[str, str] | None = None) -> Any:
    """An executable of StableHLO for devices that are not there, with XLA's own `options` by name.

    Raises RuntimeError, also when it cannot fit in their memory.
    """
    from jax._src import compiler

    count = len(devices)
    compile_options = compiler.get_compile_options(
        1,
        count,
        device_assignment=np.arange(count).reshape(1, count),
        backend=devices[0].client,
        env_options_overrides=options,
    )
    compile_options.executable_build_options.use_shardy_partitioner = shardy
    module = parse_module(make_context(), program)
    return devices[0].client.compile(module, _jax.DeviceList(tuple(devices)), compile_options)


def compiled_text(executable: Any) -> str:
    """The HLO text of the compiled modules: one device's program."""
    return "\n".join(module.to_string() for module in executable.hlo_modules())


def run_program(
    program: bytes, inputs: list[Any], shapes: list[tuple[int, ...]], devices: int, *, shardy: bool
) -> list[Any]:
    """Results [whole numpy arrays] of a program on whole inputs [numpy arrays], which are split as the program says.

    `shapes` [results] are of the whole arrays. Runs on virtual CPU devices of its own; imports jax. Raises
    RuntimeError.
    """
    chosen = cpu_devices(devices)
    return execute(compile_program(program, chosen, shardy=shardy), chosen, inputs, shapes)


def execute(executable: Any, devices: list[Any], inputs: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    """One run of what `compile_program` made for `devices`; see `run_program`."""
    import jax

    with jax.enable_x64(True):
        return [np.asarray(array) for array in run_sharded(executable, devices, inputs, shapes)]


def run_sharded(
    executable: Any,
    devices: list[Any],
    inputs: list[Any],
    shapes: list[tuple[int, ...]],
) -> list[Any]:
    """The same with jax arrays as results."""
    import jax
    from jax._src.sharding_impls import GSPMDSharding

    def shardings(found: Any, count: int) -> list[Any]:
        return [GSPMDSharding(devices, s) for s in found] if found else [GSPMDSharding.get_replicated(devices)] * count

    ways_in = shardings(executable.get_parameter_shardings(), len(inputs))
    placed = [jax.device_put(array, sharding) for array, sharding in zip(inputs, ways_in, strict=True)]
    pieces = executable.execute_sharded(placed).disassemble_into_single_device_arrays()
    ways_out = shardings(executable.get_output_shardings(), len(shapes))
    return [
        jax.make_array_from_single_device_arrays(shape, sharding, parts)
        for shape, sharding, parts in zip(shapes, ways_out, pieces, strict=True)
    ]


def sharding_devices(text: str) -> int:
    """For how many devices a GSPMD sharding is; 1 where it says nothing (`{replicated}`)."""
    return max(1, len(_hlo.HloSharding.from_string(text).tile_assignment_devices()))


def hlo_sharding_devices(text: str) -> tuple[list[int], list[int], bool]:
    """A GSPMD sharding string as XLA reads it: tile dimensions, device numbers tile by tile, whether the last
    dimension is copies.
    """
    sharding = _hlo.HloSharding.from_string(text)
    dimensions = list(sharding.tile_assignment_dimensions())
    return dimensions, list(sharding.tile_assignment_devices()), bool(sharding.replicate_on_last_tile_dim())
