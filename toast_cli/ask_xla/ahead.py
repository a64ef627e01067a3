"""Compiles a program with XLA:TPU or XLA:GPU ahead of time, on a machine that has neither.

In: the bytes of a StableHLO or HLO file and a `CompilationTarget`. Out: `AheadFacts`, or the reason why there
are none. Needs the compiler's own package (`libtpu` for TPUs, `jax-cuda12-pjrt` with its plugin for GPUs).
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from toast_cli.ask_xla.child import Failure, ask
from toast_cli.ask_xla.hlo_text import cycles_of, graphs
from toast_cli.errors import MissingExtraError, UsageError
from toast_cli.frontend.convert import mark_host_memory
from toast_cli.hardware import Spec, gpu_target_text

Dialect = Literal["stablehlo", "hlo"]
PROGRAM, COMPILED = "program", "compiled.txt"

# Without a GPU no kernels can be timed: XLA takes its default tiles.
GPU_OPTIONS = {"xla_gpu_autotune_level": "0"}
# For some shapes Triton has no default tiles (a product of 3,152 or 3,136 rows, as vision transformers have on 8 H100).
# On the real machine XLA would find the product faster without Triton, as here.
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": "False"}
_NO_TILES = "Couldn't find output tile sizes"
_GET_ASSEMBLER = "pip install nvidia-cuda-nvcc-cu12 (part of toast's extra gpu)"

Platform = Literal["tpu", "gpu"]
# Packages that contain a platform's compiler; any one suffices.
_PACKAGES: dict[Platform, tuple[str, ...]] = {"tpu": ("libtpu",), "gpu": ("jax_cuda12_plugin", "jax_cuda13_plugin")}


def as_stablehlo(content: bytes, form: str) -> bytes:
    """StableHLO of a program in StableHLO or HLO."""
    from toast_cli import xla

    if form != "hlo":
        return content
    proto = xla.hlo_text_to_proto(content.decode())
    program = xla.hlo_proto_to_stablehlo(proto)
    on_host = xla.hlo_on_host(proto)
    if not any(map(any, on_host)):
        return program
    module = xla.parse_module(xla.make_context(), program)
    mark_host_memory(module, *on_host)
    return xla.write_bytecode(module)


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


def without_tools(failure: Failure) -> Failure:
    """The failure, shortened to one line if CUDA's assembler failed."""
    if "ptxas too old" in failure.reason:
        return Failure(f"the ptxas found here is of a CUDA that does not support this chip: {_GET_ASSEMBLER}")
    if "version of ptxas" in failure.reason:
        return Failure(f"no ptxas, CUDA's assembler, was found: {_GET_ASSEMBLER}")
    return failure


@dataclass(frozen=True)
class CompilationTarget:
    """A machine that XLA can compile for.

    `topology`: libtpu's name of one slice (`v4:2x2x4`), or slices x hosts x GPUs (`1x2x8`). `chip`: a GPU's name;
    `config`: its properties, as XLA reads them. `slices`: of TPUs, joined by the data-center network.
    """

    platform: Platform
    topology: str
    devices: int
    megacore: bool = False
    chip: str = ""
    config: str = ""
    slices: int = 1

    @property
    def label(self) -> str:
        """`v4:2x2x4`, `2xv5e:4x4`, `H100:1x1x8`."""
        before = f"{self.chip}:" if self.chip else f"{self.slices}x" if self.slices > 1 else ""
        return before + self.topology

    def find_devices(self) -> list[Any]:
        """XLA's descriptions of its devices; imports jax."""
        from toast_cli import xla

        if self.platform == "gpu":
            return xla.gpu_devices(self.topology, self.config)
        return xla.tpu_devices(self.topology, self.megacore, self.slices)[: self.devices]


@dataclass(frozen=True)
class AheadFacts:
    """A program compiled for a real chip. Bytes per device.

    `peak_bytes` is the peak of live arrays, arguments and results included, in any memory: XLA:TPU keeps some in
    on-chip memory (VMEM, on v4 CMEM), which `temp_bytes` does not include. If memory is plentiful, XLA:TPU leaves gaps
    between temporaries: `allocated_bytes` can be twice the live bytes in device memory, and shrinks when the program
    would not fit. `cycles` are the compiler's own estimate of all computing, loops counted; 0 from XLA:GPU, which gives
    none. `host_bytes` are in the host's memory; if they are more than the temporaries in device memory, XLA:TPU's
    `peak_bytes` has them instead of these.
    """

    hlo_text: str
    seconds: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int
    cycles: float
    host_bytes: int = 0

    @property
    def allocated_bytes(self) -> int:
        """Arguments, results that do not alias an argument's buffer, and temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @property
    def device_bytes(self) -> int:
        """Device memory needed, as far as known: without arrays in on-chip memory and avoidable gaps."""
        return min(self.peak_bytes, self.allocated_bytes)


def target_of(spec: Spec) -> CompilationTarget:
    """The target that a specification describes. Raises `MissingExtraError` or `UsageError` if XLA cannot compile for
    it here."""
    platform: Platform = spec.chip.platform
    packages = _PACKAGES[platform]
    if not any(importlib.util.find_spec(package) for package in packages):
        raise MissingExtraError(
            f"compiling for {spec.chip.name} needs {packages[0]}", where=f"--compiler {platform}",
            hint=f"pip install '.[{platform}]' in a clone of toast",
        )  # fmt: skip
    if platform == "gpu":
        return CompilationTarget(
            platform, gpu_topology(spec), spec.devices, chip=spec.chip.name, config=gpu_target_text(spec.chip)
        )
    name, preset = spec.chip.name, spec.preset
    if preset is None or name != preset.chip.name:
        raise UsageError(f"libtpu has no topology for {spec.name}", where="--mesh", hint="use --compiler cpu")
    sizes = [d.size for d in spec.dimensions if d.kind in ("ring", "line") and d.name != "core"]
    # A topology's name has all dimensions of the chip's torus, even those that the slice does not use.
    sizes += [1] * (preset.torus_rank - len(sizes))
    topology, slices = (
        f"{name}:{'x'.join(map(str, sizes))}",
        prod(d.size for d in spec.dimensions if d.kind == "network"),
    )
    return CompilationTarget(platform, topology, spec.devices, preset.megacore, slices=slices)


def compile_ahead(
    content: bytes,
    form: Dialect,
    target: CompilationTarget,
    *,
    shardy: bool = True,
    options: dict[str, str] | None = None,
    timeout_seconds: float = 3600.0,
) -> AheadFacts | Failure:
    """Compiles a partitioned program for a target, in a child process, with XLA's own `options` by name. Out of memory
    is a `Failure` that says so. A program for which XLA:GPU has no Triton tiles is compiled without Triton."""
    request = {"form": form, "shardy": shardy, "target": asdict(target), "options": options or {}}
    answer = ask("ahead", request, {PROGRAM: content}, timeout_seconds=timeout_seconds)
    if isinstance(answer, Failure) and target.platform == "gpu" and _NO_TILES in answer.reason:
        request["options"] = {**WITHOUT_TRITON, **(options or {})}
        answer = ask("ahead", request, {PROGRAM: content}, timeout_seconds=timeout_seconds)
    if isinstance(answer, Failure):
        return without_tools(answer) if target.platform == "gpu" else answer
    return AheadFacts(hlo_text=answer.files[COMPILED].decode(), **answer.facts)


# -- in the child -----------------------------------------------------------------------------------------------------


def ahead_task(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Writes the compiled text into the folder; returns the other facts."""
    from toast_cli import xla

    target = CompilationTarget(**request["target"])
    program = as_stablehlo((folder / PROGRAM).read_bytes(), request["form"])
    devices, options = target.find_devices(), GPU_OPTIONS if target.platform == "gpu" else {}
    start = time.monotonic()
    options = {**options, **request["options"]}
    executable = xla.compile_ahead(program, devices, shardy=request["shardy"], options=options)
    seconds = time.monotonic() - start
    text = xla.compiled_text(executable)
    (folder / COMPILED).write_text(text)
    memory = executable.get_compiled_memory_stats()
    return {
        "seconds": seconds,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "cycles": estimated_cycles(text),
        "host_bytes": memory.host_argument_size_in_bytes
        + memory.host_output_size_in_bytes
        - memory.host_alias_size_in_bytes
        + memory.host_temp_size_in_bytes,
    }


def estimated_cycles(text: str) -> float:
    """Sum of XLA:TPU's estimated cycles of its fusions, each multiplied by its computation's run count."""
    return sum(graph.runs * sum(cycles_of(node.rest) for node in graph.nodes.values()) for graph in graphs(text))


@dataclass(frozen=True)
class Judge:
    """target: the machine to compile for; None for virtual CPU devices. unasked: for those, how to use the chips' own
    compiler, or why it cannot be used; empty if the chips are unknown. by_name: the user chose this compiler."""

    target: CompilationTarget | None = None
    unasked: str = ""
    by_name: bool = False


def choose_judge(spec: Spec | None, asked: str | None, option: str) -> Judge:
    """The compiler that checks a program for this machine.

    Args:
        spec: None if the machine is unknown. asked: "cpu" or the platform of `spec`; None for the default.
        option: the command-line option that selects a compiler.

    Raises `MissingExtraError` or `UsageError` if the user asks for the chips' own compiler and it cannot be used.
    """
    if spec is None:
        return Judge(by_name=asked is not None)
    platform = spec.chip.platform
    try:
        target = target_of(spec)
    except (MissingExtraError, UsageError) as error:
        if asked == platform:
            raise
        missing = isinstance(error, MissingExtraError)
        return Judge(None, f"{option} {platform} asks the real one" if missing else error.what, asked is not None)
    if asked == "cpu":
        return Judge(None, f"{option} {platform} asks the real one", True)
    return Judge(target, "", asked is not None)
