"""Compiling and running with XLA: devices, real or described, executables and their arrays; conversions between HLO
text, HLO proto and StableHLO, and parsing of HLO shardings.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from toast_cli.xla.modules import main_function, make_context, parse_module, write_bytecode
from toast_cli.xla.native import hlo, ir, jax_native, needed, refusing

_SOLVERS = ("geqrf", "gesvd", "getrf", "orgqr", "potrf", "syevd", "sytrd")
_GPU_SOLVERS = (
    *(f"cusolver_{name}_ffi" for name in (*_SOLVERS, "gesvdj", "gesvdp")),
    *(f"hipsolver_{name}_ffi" for name in _SOLVERS),
    *(f"{blas}_{name}_batched_ffi" for blas in ("cublas", "hipblas") for name in ("geqrf", "getrf")),
    "cu_lu_pivots_to_permutation",
    "hip_lu_pivots_to_permutation",
)


def cpu_devices(count: int) -> list[Any]:
    """This many virtual CPU devices of a new client. A failed assertion in the compiler aborts the process."""
    register_lapack()
    return list(jax_native.get_tfrt_cpu_client(num_devices=count).devices())


@cache
def register_lapack() -> None:
    """Registers LAPACK's custom calls on CPU, for running and partitioning: Cholesky, QR,
    eigenvalues, singular values. Of GPUs' solvers only the partitioning is registered, as JAX's GPU plugins do."""
    lapack = needed("jaxlib.lapack", "_lapack.initialize", "batch_partitionable_targets", "registrations")
    registering = ("custom_call_as_batch_partitionable", "custom_call_handler", "custom_call_target")
    xla_client = needed("jaxlib.xla_client", *(f"register_{name}" for name in registering))
    lapack._lapack.initialize()
    xla_client.register_custom_call_handler("cpu", jax_native.register_custom_call_target)
    for name, function, version in lapack.registrations()["cpu"]:
        xla_client.register_custom_call_target(name, function, platform="cpu", api_version=version)
    for name in (*lapack.batch_partitionable_targets(), *_GPU_SOLVERS):  # as in JAX: a batch of matrices may be split
        xla_client.register_custom_call_as_batch_partitionable(name)


def compile_program(
    program: bytes, devices: list[Any], *, shardy: bool, settings: Mapping[str, str | bool] | None = None
) -> Any:
    """A loaded executable of StableHLO (text or bytecode) over `devices`, one partition each. Raises RuntimeError.

    `settings` are XLA's debug options by name, e.g. `xla_dump_to`.
    """
    options = jax_native.CompileOptions()
    options.env_option_overrides = list((settings or {}).items())
    assignment = jax_native.DeviceAssignment.create(np.array([[device.id for device in devices]]))
    build = options.executable_build_options
    for target in (options, build):
        target.num_replicas = 1
        target.num_partitions = len(devices)
        target.device_assignment = assignment
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = shardy
    if devices[0].platform == "cpu" and b"memory_kind" in program:
        program = _in_one_memory(program)
    return devices[0].client.compile_and_load(program, jax_native.DeviceList(tuple(devices)), options)


def _in_one_memory(program: bytes) -> bytes:
    """The program with no arguments or results in host memory: XLA:CPU returns results in its only memory, and aborts
    where the program states another."""
    module = parse_module(make_context(), program)
    attributes = main_function(module).operation.attributes
    with module.context:
        for name in ("arg_attrs", "res_attrs"):
            if name in attributes:
                entries = [{item.name: item.attr for item in entry} for entry in attributes[name]]
                for entry in entries:
                    entry.pop("mhlo.memory_kind", None)
                attributes[name] = ir.ArrayAttr.get(list(map(ir.DictAttr.get, entries)))
    return write_bytecode(module)


def tpu_devices(topology: str, megacore: bool, slices: int = 1) -> list[Any]:
    """Devices of TPU slices that need not be present, e.g. each `v4:2x2x4`, for compiling ahead of time; one slice
    after the other. Imports jax; needs libtpu.
    """
    from jax.experimental import topologies

    options: dict[str, Any] = {"chip_config_name": "megacore"} if megacore else {}
    if slices > 1:
        options["num_slices"] = slices
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices
    return sorted(devices, key=lambda device: device.id)


def gpu_devices(topology: str, config: str) -> list[Any]:
    """GPUs that need not be present, e.g. `1x2x8` (slices x hosts x GPUs), of the kind that `config` (a
    `GpuTargetConfigProto` as text) describes.

    Imports jax; needs a CUDA plugin.
    """
    from jax.experimental import topologies

    facts = {"topology": topology, "target_config": config}
    return list(topologies.get_topology_desc(platform="cuda", topology_name="", **facts).devices)


def compile_ahead(
    program: bytes, devices: list[Any], *, shardy: bool, options: Mapping[str, str | bool] | None = None
) -> Any:
    """An executable of StableHLO for devices that are not present, with XLA's own `options` by name.

    Raises RuntimeError, also if it does not fit in their memory.
    """
    compiler = needed("jax._src.compiler", "get_compile_options")
    compile_options = compiler.get_compile_options(
        1,
        len(devices),
        device_assignment=np.array([[device.id for device in devices]]),
        backend=devices[0].client,
        env_options_overrides=dict(options or {}),
    )
    compile_options.executable_build_options.use_shardy_partitioner = shardy
    module = parse_module(make_context(), program)
    return devices[0].client.compile(module, jax_native.DeviceList(tuple(devices)), compile_options)


def compiled_text(executable: Any) -> str:
    """The HLO text of the compiled modules: one device's program."""
    return "\n".join(module.to_string() for module in executable.hlo_modules())


def execute(executable: Any, devices: list[Any], inputs: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    """Runs an executable of `compile_program` once: whole numpy arrays in, which the program's shardings split, and
    whole numpy arrays of these shapes out. Imports jax. Raises RuntimeError."""
    import jax

    with jax.enable_x64(True):
        return [np.asarray(array) for array in run_sharded(executable, devices, inputs, shapes)]


def run_sharded(
    executable: Any,
    devices: list[Any],
    inputs: list[Any],
    shapes: list[tuple[int, ...]],
) -> list[Any]:
    """The same as `execute`, with jax arrays as results."""
    import jax

    gspmd_sharding = needed("jax._src.sharding_impls", "GSPMDSharding").GSPMDSharding

    def shardings(stated: Any, count: int) -> list[Any]:
        replicated = gspmd_sharding.get_replicated(devices)
        return [gspmd_sharding(devices, s) for s in stated] if stated else [replicated] * count

    ways_in = shardings(executable.get_parameter_shardings(), len(inputs))
    placed = [jax.device_put(array, sharding) for array, sharding in zip(inputs, ways_in, strict=True)]
    pieces = executable.execute_sharded(placed).disassemble_into_single_device_arrays()
    ways_out = shardings(executable.get_output_shardings(), len(shapes))[: len(shapes)]  # no results have one, too
    return [
        jax.make_array_from_single_device_arrays(shape, sharding, parts)
        for shape, sharding, parts in zip(shapes, ways_out, pieces, strict=True)
    ]


# ---------------------------------------------------------------- conversions
# Conversions by XLA: between HLO text, HLO proto and StableHLO; shape refinement; parsing of HLO shardings.


@refusing
def hlo_text_to_proto(text: str) -> bytes:
    """A serialized HloModuleProto.

    Raises RuntimeError (`was parsing 3:19: error: …`); hostile text may abort the process.
    """
    return bytes(hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())


@refusing
def hlo_proto_to_stablehlo(proto: bytes) -> bytes:
    """StableHLO (with some mhlo ops) as bytecode.

    Raises RuntimeError, `ir.MLIRError`; hostile bytes may abort the process.
    """
    return bytes(jax_native.mlir.hlo_to_stablehlo(proto))


@refusing
def stablehlo_to_hlo_text(bytecode: bytes) -> str:
    """HLO text, constants in full, of a StableHLO module, with GSPMD's shardings beside Shardy's, and those that
    `mhlo.sharding` strings state.

    Raises RuntimeError for what HLO cannot hold. A string that does not parse is dropped without a word.
    """
    computation = jax_native.mlir.mlir_module_to_xla_computation(bytecode, use_tuple_args=False, return_tuple=False)
    return str(computation.as_hlo_text(print_large_constants=True))


def hlo_boundary(proto: bytes) -> tuple[list[Any], Any]:
    """Parameters and result of a serialized HloModuleProto's entry: tuples as nested lists, for each array whether it
    is in host memory."""

    def tree(shape: Any) -> Any:
        return [tree(part) for part in shape.tuple_shapes()] if shape.is_tuple() else ":S(5)" in repr(shape)

    shape = hlo.XlaComputation(proto).program_shape()
    return [tree(parameter) for parameter in shape.parameter_shapes()], tree(shape.result_shape())


@refusing
def refine_shapes(bytecode: bytes, *, assertions: bool = False) -> bytes:
    """Refines the dynamic shapes inside a program whose arguments are static.

    Args:
        assertions: True to check what the program asserts about its shapes.

    Raises RuntimeError or `ir.MLIRError`.
    """
    refine = jax_native.mlir.refine_polymorphic_shapes
    return bytes(refine(bytecode, enable_shape_assertions=assertions, validate_static_shapes=True))


def kept_arguments(lowered: Any) -> tuple[int, ...]:
    """Leaves of a `jax.stages.Lowered` function's arguments that are arguments of the program
    (it drops unused ones)."""
    return tuple(sorted(lowered._lowering.compile_args["kept_var_idx"]))


def sharding_devices(text: str) -> int:
    """Number of devices of a GSPMD sharding; 1 if it states none (`{replicated}`)."""
    return max(1, len(hlo.HloSharding.from_string(text).tile_assignment_devices()))


def mesh_sharding(tiles: list[int], axis_sizes: tuple[int, ...], order: list[int]) -> str:
    """A GSPMD sharding string, as XLA prints it. tiles: shards of each dimension, then devices along axes that are
    manual, and along those that are not used. order: the mesh's axes as the tiles use them."""
    kinds = [hlo.OpSharding.Type.MANUAL, hlo.OpSharding.Type.REPLICATED]
    return str(hlo.HloSharding.iota_tile(tiles, axis_sizes, order, kinds))
