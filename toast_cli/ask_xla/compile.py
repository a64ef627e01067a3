"""Asks XLA what it makes of a program for a machine: `compile_for(program, form, target)` -> `Answer` or `Failure`.

The target is a machine of TPUs or GPUs that need not be there (needs the compiler's own package: `libtpu`, or
`jax-cuda12-pjrt` with its plugin), or virtual CPU devices. The answer is the program of one device in the end, or right
after XLA's partitioner. XLA:CPU has no 16-bit arithmetic and no reduce-scatter, and joins and splits collectives, so
that its final module differs much from the communication of a TPU or GPU. The module after partitioning still has the
program's own types, is mostly the same for every backend, and takes seconds. XLA:TPU, however, simplifies a program
before it propagates and partitions it, which can change the propagation: its own partitioner can be asked as well.
"""

from __future__ import annotations

import importlib.util
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from toast_cli import xla
from toast_cli.ask_xla.child import Failure, ask
from toast_cli.ask_xla.collectives import CompiledCollective, partitioned_collectives
from toast_cli.ask_xla.hlo_text import cycles_of, graphs
from toast_cli.base.errors import MissingExtraError, UsageError
from toast_cli.frontend.convert import leaves_of, mark_host_memory
from toast_cli.frontend.formats import parse_here
from toast_cli.frontend.trips import state_trips
from toast_cli.hardware import Spec, gpu_target_text

Dialect = Literal["stablehlo", "hlo"]
Platform = Literal["cpu", "tpu", "gpu"]

# Without a GPU no kernels can be timed: XLA takes its default tiles.
GPU_OPTIONS = {"xla_gpu_autotune_level": "0"}
# For some shapes Triton has no default tiles (a product of 3,152 or 3,136 rows, as vision transformers have on 8 H100).
# On the real machine XLA would find the product faster without Triton, as here.
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": "False"}
_NO_TILES = "Couldn't find output tile sizes"

# Packages that contain a platform's compiler; any one suffices.
_PACKAGES: dict[str, tuple[str, ...]] = {"tpu": ("libtpu",), "gpu": ("jax_cuda12_plugin", "jax_cuda13_plugin")}

# Names of passes: the partitioner of CPUs and GPUs, that of TPUs, and what follows.
_PASS, _TPU_PASS, _NEXT = "spmd-partitioning", "tpu-spmd-partitioning", "pipeline-start"
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class CompilationTarget:
    """A machine that XLA can compile for.

    `topology`: libtpu's name of one slice (`v4:2x2x4`), or slices x hosts x GPUs (`1x2x8`). `chip`: a GPU's name;
    `config`: its properties, as XLA reads them. `slices`: of TPUs, joined by the data-center network.
    `partitions_only`: whether XLA stops after its partitioner, as it always does for virtual CPU devices.
    """

    platform: Platform
    topology: str
    devices: int
    megacore: bool = False
    chip: str = ""
    config: str = ""
    slices: int = 1
    partitions_only: bool = False

    @property
    def label(self) -> str:
        """`v4:2x2x4`, `2xv5e:4x4`, `H100:1x1x8`."""
        before = f"{self.chip}:" if self.chip else f"{self.slices}x" if self.slices > 1 else ""
        return before + self.topology

    def find_devices(self) -> list[Any]:
        """XLA's descriptions of its devices; imports jax."""
        if self.platform == "cpu":
            return xla.cpu_devices(self.devices)
        if self.platform == "gpu":
            return xla.gpu_devices(self.topology, self.config)
        return xla.tpu_devices(self.topology, self.megacore, self.slices)[: self.devices]


def virtual_devices(count: int) -> CompilationTarget:
    """CPU devices of this process."""
    return CompilationTarget("cpu", "", count, partitions_only=True)


def target_of(spec: Spec, name: str | None = None, option: str = "--compiler") -> CompilationTarget:
    """The target that a specification describes. name: "cpu" for virtual devices, or the platform's; None for that.
    option: that which chooses.

    Raises `MissingExtraError` or `UsageError` if XLA cannot compile for it here.
    """
    platform: Platform = spec.chip.platform
    if name == "cpu":
        return virtual_devices(spec.devices)
    if name not in (None, platform):
        raise UsageError(
            f"{option} {name} cannot compile for {spec.chip.name}",
            where=f"--mesh {spec.name}",
            hint=f"use {option} {platform}",
        )
    packages = _PACKAGES[platform]
    if not any(importlib.util.find_spec(package) for package in packages):
        raise MissingExtraError(
            f"compiling for {spec.chip.name} needs {packages[0]}", where=f"{option} {platform}",
            hint=f"pip install '.[{platform}]' in a clone of toast",
        )  # fmt: skip
    if platform == "gpu":
        return CompilationTarget(
            platform, gpu_topology(spec), spec.devices, chip=spec.chip.name, config=gpu_target_text(spec.chip)
        )
    name, preset = spec.chip.name, spec.preset
    if preset is None or name != preset.chip.name:
        raise UsageError(f"libtpu has no topology for {spec.name}", where="--mesh", hint=f"use {option} cpu")
    sizes = [d.size for d in spec.dimensions if d.kind in ("ring", "line") and d.name != "core"]
    # A topology's name has all dimensions of the chip's torus, even those that the slice does not use.
    sizes += [1] * (preset.torus_rank - len(sizes))
    slices = prod(d.size for d in spec.dimensions if d.kind == "network")
    topology = f"{name}:{'x'.join(map(str, sizes))}"
    return CompilationTarget(platform, topology, spec.devices, preset.megacore, slices=slices)


def gpu_topology(spec: Spec) -> str:
    """slices x hosts x GPUs of a host: `1x2x8`. Raises `UsageError` for GPUs that are not connected by a switch."""
    if any(dimension.kind not in ("switch", "network") for dimension in spec.dimensions):
        raise UsageError(
            f"XLA:GPU knows hosts of GPUs at a switch, not the torus of {spec.name}",
            where="--mesh",
            hint="use --compiler cpu",
        )
    sizes = {kind: prod(d.size for d in spec.dimensions if d.kind == kind) for kind in ("network", "switch")}
    return f"1x{sizes['network']}x{sizes['switch']}"


@dataclass(frozen=True)
class Answer:
    """What XLA makes of a program: that of one device. Bytes per device; 0 right after partitioning.

    `peak_bytes` is the peak of live arrays, arguments and results included, in any memory: XLA:TPU keeps some in
    on-chip memory (VMEM, on v4 CMEM), which `temp_bytes` does not include. If memory is plentiful, XLA:TPU leaves gaps
    between temporaries: `allocated_bytes` can be twice the live bytes in device memory, and shrinks when the program
    would not fit. `cycles` are the compiler's own estimate of all computing, loops counted; 0 from XLA:GPU, which gives
    none. `host_bytes` are in the host's memory; if they are more than the temporaries in device memory, XLA:TPU's
    `peak_bytes` has them instead of these. `log` has the compiler's warnings.
    """

    hlo_text: str
    seconds: float = 0.0
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    peak_bytes: int = 0
    cycles: float = 0.0
    host_bytes: int = 0
    log: str = ""

    @property
    def device_bytes(self) -> int:
        """Device memory needed, as far as known: without arrays in on-chip memory and avoidable gaps."""
        # Arguments, results that do not alias an argument's buffer, and temporaries.
        allocated_bytes = self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes
        return min(self.peak_bytes, allocated_bytes)


def compile_for(
    content: bytes,
    form: Dialect | Literal["any"],
    target: CompilationTarget,
    *,
    options: dict[str, str] | None = None,
    timeout_seconds: float = 3600.0,
) -> Answer | Failure:
    """Compiles a program with shardings, in a child process. Out of memory is a `Failure` that says so.

    A program for which XLA:GPU has no Triton tiles is compiled without Triton.

    Args:
        form: "any" is any of the formats that toast reads. options: XLA's own, by name.
    """
    program, options = (content, form, target), options or {}
    reply = ask(compile_here, *program, options, timeout_seconds=timeout_seconds)
    if isinstance(reply, Failure) and target.platform == "gpu" and _NO_TILES in reply.reason:
        reply = ask(compile_here, *program, {**WITHOUT_TRITON, **options}, timeout_seconds=timeout_seconds)
    if isinstance(reply, Failure):
        return reply
    answer: Answer = reply[0]
    return replace(answer, log=reply[1])


def collectives_after_partitioning(
    content: bytes,
    form: Dialect,
    axes: dict[str, int],
    *,
    target: CompilationTarget | None = None,
    timeout_seconds: float = 600.0,
) -> list[CompiledCollective] | Failure:
    """The collectives XLA's partitioner adds to a program for a mesh, by kind, axes and bytes, loops counted; None for
    virtual CPU devices. See `collectives`."""
    target = replace(target or virtual_devices(prod(axes.values())), partitions_only=True)
    answer = compile_for(content, form, target, timeout_seconds=timeout_seconds)
    if isinstance(answer, Failure):
        return answer
    return partitioned_collectives(answer.hlo_text, tuple(axes), tuple(axes.values()))


# -- in the child -----------------------------------------------------------------------------------------------------


def compile_here(content: bytes, form: str, target: CompilationTarget, options: dict[str, str]) -> Answer:
    """The answer, in this process. GSPMD propagates in HLO, unless that says that Shardy is to, Shardy in all else."""
    program = as_stablehlo(content, form)
    if form == "any":
        form, module = parse_here(program, "the program")
    else:
        module = xla.parse_module(xla.make_context(), program)
    shardy = not form.startswith("hlo") or b"xla.sdy.meshes" in program
    state_trips(module)
    program, devices = xla.write_bytecode(module), target.find_devices()
    options = {**(GPU_OPTIONS if target.platform == "gpu" else {}), **options}

    def compiled(more: dict[str, str | bool]) -> Any:
        if target.platform == "cpu":
            return xla.compile_program(program, devices, shardy=shardy, settings=more)
        return xla.compile_ahead(program, devices, shardy=shardy, options={**options, **more})

    if target.partitions_only:
        done = _TPU_PASS if target.platform == "tpu" else _PASS
        return Answer(_after_pass(done, compiled, Path(tempfile.mkdtemp())))
    start = time.monotonic()
    executable = compiled({})
    seconds = time.monotonic() - start
    text = xla.compiled_text(executable)
    memory = executable.get_compiled_memory_stats()
    return Answer(
        text,
        seconds,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.peak_memory_in_bytes,
        estimated_cycles(text),
        memory.host_argument_size_in_bytes
        + memory.host_output_size_in_bytes
        - memory.host_alias_size_in_bytes
        + memory.host_temp_size_in_bytes,
    )


def _after_pass(done: str, compiled: Callable[[dict[str, str | bool]], Any], dumps: Path) -> str:
    """The text after a pass, as soon as a later one has begun: the rest of the compilation is abandoned with the
    process. Raises what the compiler raised before that."""
    settings: dict[str, str | bool] = {
        "xla_dump_to": str(dumps), "xla_dump_hlo_as_text": True, "xla_dump_large_constants": True,
        "xla_dump_hlo_pass_re": f"^({done}|{_NEXT})$",
    }  # fmt: skip
    raised: list[Exception] = []

    def compile_it() -> None:
        try:
            compiled(settings)
        except Exception as error:  # passed to the waiting thread
            raised.append(error)

    worker = threading.Thread(target=compile_it, daemon=True)
    worker.start()
    while True:
        ended = not worker.is_alive()
        numbered = sorted(dumps.glob("module_*.*.*.after_*.txt"))
        for place, path in enumerate(numbered):
            if f".after_{done}." in path.name and (ended or place + 1 < len(numbered)):
                return path.read_text()
        if raised:
            raise raised[0]
        if ended:
            raise RuntimeError("this jaxlib does not show the program after partitioning")
        time.sleep(_POLL_SECONDS)


def as_stablehlo(content: bytes, form: str) -> bytes:
    """StableHLO of a program in StableHLO or HLO."""
    if form != "hlo":
        return content
    proto = xla.hlo_text_to_proto(content.decode())
    program = xla.hlo_proto_to_stablehlo(proto)
    on_host = [leaves_of(tree) for tree in xla.hlo_boundary(proto)]
    if not any(map(any, on_host)):
        return program
    module = xla.parse_module(xla.make_context(), program)
    mark_host_memory(module, *on_host)
    return xla.write_bytecode(module)


def estimated_cycles(text: str) -> float:
    """Sum of XLA:TPU's estimated cycles of its fusions, each multiplied by its computation's run count."""
    return sum(graph.runs * sum(cycles_of(node.rest) for node in graph.nodes.values()) for graph in graphs(text))
