"""Target descriptions for XLA:GPU: a chip in, the text of a `GpuTargetConfigProto` out.

XLA compiles for a GPU that is not present if it gets a description. Memory and its bandwidth are the chip's own (so a
specification can override them); the rest is the preset's `GpuDeviceInfo`, published figures of the part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from toast_cli.errors import UsageError
from toast_cli.hardware.chips import presets
from toast_cli.hardware.model import Chip, GpuDeviceInfo

_KIB = 1024


GPU_DEVICES: Mapping[str, GpuDeviceInfo] = {
    preset.chip.name: preset.device_info for preset in presets() if preset.device_info
}
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
    device_info = GPU_DEVICES.get(chip.name)
    if device_info is None:
        raise UsageError(
            f"XLA's GPU compiler has no target description of {chip.name}", where="--compiler gpu",
            hint=f"known: {', '.join(GPU_DEVICES)}; --compiler cpu works for any",
        )  # fmt: skip
    return "\n".join(_lines(chip, device_info)) + "\n"


def _lines(chip: Chip, device_info: GpuDeviceInfo) -> Iterator[str]:
    major, minor = device_info.capability
    feature = "ACCELERATED_FEATURES" if device_info.capability >= _ACCELERATED else "NONE"
    figures: dict[str, int | float | str] = {
        **_COMMON,
        "core_count": device_info.multiprocessors,
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
    yield "gpu_device_info {"
    yield from (f"  {name}: {value}" for name, value in figures.items())
    yield f"  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}"
    yield "}"
    yield 'platform_name: "CUDA"'
    yield "dnn_version_info {{ major: {} minor: {} patch: {} }}".format(*_CUDNN)
    yield f'device_description_str: "{device_info.part}"'
