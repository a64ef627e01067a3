"""Chip presets: a name in, the published figures of one device and of the wires between devices out; for XLA:GPU also
the description of the chip as a target. `chips.toml` has the figures, each beside its source: a new chip is a new
table there.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from toast_cli.base.errors import SpecError, UsageError
from toast_cli.base.yamltree import nearest
from toast_cli.hardware.model import Chip, GpuDeviceInfo, Nccl


@dataclass(frozen=True, slots=True)
class Wire:
    """One kind of connection: bandwidth per device in one direction, latency of one hop or message."""

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class Preset:
    """A chip with the known properties of its machines.

    Attributes:
        chip: figures of one device.
        devices_per_host, devices_per_chip: how XLA's devices are packed.
        wires: the kinds of connections, innermost first: "core" (between the devices of one chip, if it has several),
            "link" (a device's share of one torus link, or its link to the switch) and "network" (a device's share of
            its host's or slice's network).
        sources: wire -> where its figures were published.
        torus_rank: torus dimensions of the interconnect, 0 if a switch connects the devices.
        pod_chips: largest slice on one torus, in chips; 0 without a torus.
        wrap_edge: a torus dimension of exactly this many chips has wraparound; 0: every dimension has it when all are
            multiples of 4 (slices made of whole 4x4x4 cubes), none otherwise.
        slice_chips: chips of its slices; on a 3-D torus of those smaller than a cube of 4x4x4 (Cloud TPU docs).
        megacore: XLA counts the two cores of a TPU as one device.
        multiprocessors: of a GPU, that are enabled. device_info: its other properties for its compiler, if XLA:GPU of
            CUDA can compile for it. nccl: rates of its collectives.
        device_kind: what `jax.Device.device_kind` says. host_name, links_name: what a group of GPUs at one switch, and
            what connects them, is called.
    """

    chip: Chip
    devices_per_host: int
    wires: dict[str, Wire]
    sources: dict[str, str]
    devices_per_chip: int = 1
    torus_rank: int = 0
    pod_chips: int = 0
    wrap_edge: int = 0
    slice_chips: tuple[int, ...] = ()
    megacore: bool = False
    multiprocessors: int = 0
    device_info: GpuDeviceInfo | None = None
    nccl: Nccl | None = None
    device_kind: str = ""
    host_name: str = "host"
    links_name: str = "NVLink"


def presets() -> list[Preset]:
    """All presets, oldest first."""
    return list(_PRESETS.values())


def chip_names() -> list[str]:
    """Names of all presets, oldest first."""
    return list(_PRESETS)


def find_preset(name: str, *, where: str = "") -> Preset:
    """The preset of that name, in any case. Raises SpecError that lists the valid names and the nearest."""
    for preset_name, preset in _PRESETS.items():
        if preset_name.lower() == name.lower():
            return preset
    raise SpecError(f'unknown chip "{name}"', where=where, hint=nearest(name, _PRESETS))


def export_platform(chip: Chip) -> str:
    """The chip's platform as `jax.export` names it."""
    if chip.platform == "tpu":
        return "tpu"
    return "rocm" if chip.preset and find_preset(chip.preset).device_kind.startswith("AMD") else "cuda"


def matrix_rate(chip: Chip, dtype: str) -> float:
    """Peak FLOP/s of the matrix unit for operands of an MLIR element type (`bf16`, `f8E4M3FN`, `ui8`, `complex<f32>`).

    A type the chip does not list runs at the rate of the next wider one it does; one wider than all of them, at the
    rate of the widest times the ratio of the widths.
    """
    kind = _kind(dtype)
    if kind in chip.matrix_flops:
        return chip.matrix_flops[kind]
    bits = _bits(kind)
    wider = [listed for listed in chip.matrix_flops if _bits(listed) > bits]
    if wider:
        narrowest = min(_bits(listed) for listed in wider)
        return max(chip.matrix_flops[listed] for listed in wider if _bits(listed) == narrowest)
    widest = max(chip.matrix_flops, key=_bits)
    return chip.matrix_flops[widest] * _bits(widest) / bits


def _kind(dtype: str) -> str:
    """The key of `Chip.matrix_flops` an MLIR element type belongs to."""
    text = dtype.removeprefix("complex<").rstrip(">")
    if text.startswith("f8"):
        return "f8"
    return "i8" if text in ("ui8", "i1", "pred", "i4", "ui4", "i2", "ui2") else text.removeprefix("u")


def _bits(kind: str) -> int:
    digits = re.search(r"\d+", kind)
    return int(digits[0]) if digits else 32


def _preset(name: str, keys: dict[str, Any]) -> Preset:
    """The preset of one table: figures are [value, source], wires [bytes per second, latency, source]."""
    keys = {**keys, "slice_chips": tuple(keys.get("slice_chips", ()))}
    figures = {key: value for key, value in keys.items() if isinstance(value, list) and len(value) == 2}
    wires = {key: value for key, value in keys.items() if isinstance(value, list) and len(value) == 3}
    tables = {"platform", "device_info", "nccl"}
    packing: dict[str, Any] = {key: keys[key] for key in keys.keys() - {*figures, *wires} - tables}
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, (value, _) in figures.items()
    }
    sources = {key: source for key, (_, source) in figures.items()}
    chip = Chip(name, keys["platform"], sources=sources, preset=name, **values)
    device_info = keys.get("device_info")
    return Preset(
        chip,
        wires={key: Wire(rate, latency) for key, (rate, latency, _) in wires.items()},
        sources={key: source for key, (_, _, source) in wires.items()},
        device_info=GpuDeviceInfo(**{**device_info, "capability": tuple(device_info["capability"])})
        if device_info
        else None,
        nccl=Nccl(**keys["nccl"]) if "nccl" in keys else None,
        **packing,
    )


_TEXT = (files("toast_cli.hardware") / "chips.toml").read_text("utf-8")
_PRESETS = {name: _preset(name, keys) for name, keys in tomllib.loads(_TEXT).items()}


# ---------------------------------------------------------------- targets for XLA:GPU
# Target descriptions for XLA:GPU: a chip in, the text of a `GpuTargetConfigProto` out.
#
# XLA compiles for a GPU that is not present if it gets a description. Memory and its bandwidth are the chip's own (so
# a specification can override them); the rest is the preset's `GpuDeviceInfo`, published figures of the part.

_KIB = 1024


GPU_DEVICES: Mapping[str, Preset] = {preset.chip.name: preset for preset in presets() if preset.device_info}
# The same on every part above: CUDA C++ Programming Guide, technical specifications per compute capability.
_COMMON = {
    "threads_per_block_limit": 1024, "threads_per_warp": 32, "threads_per_core_limit": 2048,
    "block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535,
    "thread_dim_limit_x": 1024, "thread_dim_limit_y": 1024, "thread_dim_limit_z": 64,
    "registers_per_core_limit": 64 * _KIB, "registers_per_block_limit": 64 * _KIB,
    "shared_memory_per_block": 48 * _KIB, "device_address_bits": 64,
}  # fmt: skip
# Features of one architecture alone (`sm_90a`) exist from Hopper on.
_ACCELERATED = (9, 0)
# XLA picks rewrites by these versions: CUDA 12.9, its compiler's, and a cuDNN of that time.
_CUDA, _CUDNN = "12.9.0", (9, 10, 0)


def gpu_target_text(chip: Chip) -> str:
    """The argument of `topologies.get_topology_desc(target_config=…)` for a chip.

    Raises UsageError for an unknown chip.
    """
    preset = GPU_DEVICES.get(chip.name)
    if preset is None or preset.device_info is None:
        raise UsageError(
            f"XLA's GPU compiler has no target description of {chip.name}", where="--compiler gpu",
            hint=f"known: {', '.join(GPU_DEVICES)}; --compiler cpu works for any",
        )  # fmt: skip
    device_info = preset.device_info
    major, minor = device_info.capability
    feature = "ACCELERATED_FEATURES" if device_info.capability >= _ACCELERATED else "NONE"
    figures: dict[str, int | float | str] = {
        **_COMMON,
        "core_count": preset.multiprocessors,
        "fpus_per_core": device_info.lanes,
        "clock_rate_ghz": device_info.clock_ghz,
        "shared_memory_per_core": device_info.shared_kib * _KIB,
        "shared_memory_per_block_optin": device_info.block_kib * _KIB,
        "l2_cache_size": device_info.cache_bytes,
        "memory_bandwidth": round(chip.memory_bytes_per_second),
        "device_memory_size": chip.memory_bytes - chip.reserved_bytes,
        "name": f'"{device_info.part}"',
        "device_vendor": '"NVIDIA Corporation"',
        "runtime_version": f'"{_CUDA}"',
        "compile_time_toolkit_version": f'"{_CUDA}"',
        "dnn_version": f'"{".".join(map(str, _CUDNN))}"',
    }
    lines = [
        "gpu_device_info {",
        *(f"  {name}: {value}" for name, value in figures.items()),
        f"  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}",
        "}",
        'platform_name: "CUDA"',
        "dnn_version_info {{ major: {} minor: {} patch: {} }}".format(*_CUDNN),
        f'device_description_str: "{device_info.part}"',
    ]
    return "\n".join(lines) + "\n"
