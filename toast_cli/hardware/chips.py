"""Chip presets: a name in, the published figures of one device and of the wires between devices out.

A *device* is what XLA counts as one: a core on v2, v3 and tpu7x (two a chip), a whole chip elsewhere (v4 and v5p as
"megacore"). Vendors publish figures per chip; this table divides them. Every figure names its source beside it, in
`Chip.sources` and `Preset.sources`; a figure nobody publishes is marked "estimate".
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from toast_cli.errors import SpecError
from toast_cli.hardware.model import Chip, Silicon

_GIB = 2**30
# jax-ml/scaling-book: "How to Think About TPUs", and for the latency of a hop "Sharded Matrices and How to Multiply
# Them".
_BOOK = "How to Scale Your Model"
_DOCS = "Google Cloud TPU docs"
# A Domain-Specific Supercomputer for Training Deep Neural Networks, CACM 63(7), 2020.
_PAPER = "Jouppi et al., CACM 63(7)"
# The usable memory that its own RESOURCE_EXHAUSTED message states ("exceeds available HBM").
_LIBTPU = "libtpu 0.0.42.1, out-of-memory message"
# xla/backends/gpu/target_config/specs/*.txtpb.
_TARGETS = "openxla/xla target_config"
_PTX = "PTX ISA, tensor core instruction (m, n)"
# src/graph/tuning.cc, hwLatencies: one step of a ring, simple protocol.
_NCCL = "NCCL tuning.cc"
# Major compute capability -> bandwidth of 16 PCIe lanes of its generation, one direction.
_PCIE = {6: 16e9, 7: 16e9, 8: 32e9, 9: 64e9, 10: 64e9}


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
        devices_per_chip, devices_per_host: how XLA's devices are packed.
        torus_rank: torus dimensions of the interconnect, 0 if a switch connects the devices.
        pod_chips: largest slice on one torus, in chips; 0 without a torus.
        wrap_edge: a torus dimension of exactly this many chips has wraparound; 0: every dimension has it when all are
            multiples of 4 (slices made of whole 4x4x4 cubes), none otherwise.
        link: one torus link (a device's share of it), or a device's link to the switch.
        core: between the devices of one chip; None if a chip is one device.
        network: a device's share of its host's or slice's network.
        sources: where the figures of `link`, `core` and `network` were published.
        megacore: XLA counts the two cores of a TPU as one device. silicon: properties of a GPU for its compiler.
    """

    chip: Chip
    devices_per_chip: int
    devices_per_host: int
    torus_rank: int
    pod_chips: int
    wrap_edge: int
    link: Wire
    core: Wire | None
    network: Wire
    sources: dict[str, str]
    megacore: bool = False
    silicon: Silicon | None = None

    @property
    def wires(self) -> dict[str, Wire]:
        """The kinds of connections, innermost first, under the keys of `sources`."""
        core = {"core": self.core} if self.core else {}
        return {**core, "link": self.link, "network": self.network}


def presets() -> list[Preset]:
    """All presets, oldest first."""
    return list(_PRESETS.values())


def chip_names() -> list[str]:
    """Names of all presets, oldest first."""
    return list(_PRESETS)


def find_preset(name: str, *, where: str = "") -> Preset:
    """The preset of that name, in any case. Raises SpecError that lists the valid names and the nearest."""
    for known, preset in _PRESETS.items():
        if known.lower() == name.lower():
            return preset
    near = difflib.get_close_matches(name.lower(), [known.lower() for known in _PRESETS], n=1)
    guess = f'did you mean "{next(k for k in _PRESETS if k.lower() == near[0])}"? ' if near else ""
    raise SpecError(f'unknown chip "{name}"', where=where, hint=f"{guess}known: {', '.join(_PRESETS)}")


def matrix_rate(chip: Chip, dtype: str) -> float:
    """Peak FLOP/s of the matrix unit for operands of an MLIR element type (`bf16`, `f8E4M3FN`, `ui8`, `complex<f32>`).

    A type the chip does not list runs at the rate of the next wider one it does; one wider than all of them, at the
    rate of the widest times the ratio of the widths.
    """
    kind = _kind(dtype)
    if kind in chip.matrix_flops:
        return chip.matrix_flops[kind]
    bits = _bits(kind)
    wider = [known for known in chip.matrix_flops if _bits(known) > bits]
    if wider:
        narrowest = min(_bits(known) for known in wider)
        return max(chip.matrix_flops[known] for known in wider if _bits(known) == narrowest)
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


def _usable(memory_gib: float, usable_gib: float) -> int:
    """Reserved bytes: the memory of a device minus the part that a program may use."""
    return round((memory_gib - usable_gib) * _GIB)


def _tpu(
    name: str,
    *,
    cores: int,
    flops: dict[str, float],
    flops_source: str,
    vector: float,
    vector_source: str,
    tile: int,
    memory_gib: float,
    usable_gib: float,
    bandwidth: float,
    rank: int,
    pod: int,
    wrap_edge: int,
    hosts: int,
    link: float,
    link_source: str,
    network: float,
    network_source: str,
    clock: float,
    core: float = 0.0,
    core_source: str = "",
    megacore: bool = False,
) -> Preset:
    """A TPU from figures per chip (`usable_gib` and `core`: per device); `cores` devices share it."""
    chip = Chip(
        name=name,
        platform="tpu",
        matrix_flops={dtype: rate / cores for dtype, rate in flops.items()},
        vector_flops=vector / cores,
        matrix_tile=(tile, tile),
        memory_bytes=round(memory_gib / cores * _GIB),
        reserved_bytes=_usable(memory_gib / cores, usable_gib),
        memory_bytes_per_second=bandwidth / cores,
        sources={
            "matrix_flops": f"{flops_source}; f32 is one bf16 pass by default, at the same rate: libtpu "
            "0.0.42.1 estimates 98 % of the peak for f32 products within programs",
            "vector_flops": vector_source,
            "matrix_tile": f"{_BOOK}, MXU size" if name != "tpu7x" else "estimate: as v6e",
            "memory_bytes": f"{_DOCS} ({name})" if name != "v2" else _PAPER,
            "reserved_bytes": _LIBTPU,
            "memory_bytes_per_second": f"{_DOCS} ({name})" if name != "v2" else _PAPER,
            "clock_hertz": "the clock of vector_flops: 8192^3 products then take the published peak and 8 to 12 % more",
            "host_bytes_per_second": f"{_BOOK}, PCIe of v4" if name == "v4" else "estimate: as v4",
        },
        clock_hertz=clock,
        host_bytes_per_second=16e9 / cores,
        preset=name,
    )
    sources = {
        "link": _BOOK if link_source == _BOOK else f"{link_source}; latency: {_BOOK}",
        "network": f"{network_source}; latency: estimate",
    }
    if core:
        sources["core"] = f"{core_source}; latency: estimate"
    return Preset(
        chip=chip,
        devices_per_chip=cores,
        devices_per_host=hosts * cores,
        torus_rank=rank,
        pod_chips=pod,
        wrap_edge=wrap_edge,
        link=Wire(link / cores, 1e-6),
        core=Wire(core, 1e-6) if core else None,
        network=Wire(network / cores, 10e-6),
        sources=sources,
        megacore=megacore,
    )


def _gpu(
    name: str,
    *,
    flops: dict[str, float],
    vector: float,
    tile: tuple[int, int],
    memory_gib: float,
    reserved: int,
    bandwidth: float,
    sheet: str,
    target: str,
    link: float,
    link_source: str,
    network: float,
    network_source: str,
    silicon: Silicon,
    reserved_source: str = "",
) -> Preset:
    """An eight-GPU host of one NVLink domain; dense rates, one device a chip."""
    chip = Chip(
        name=name,
        platform="gpu",
        matrix_flops=flops,
        vector_flops=vector,
        matrix_tile=tile,
        memory_bytes=round(memory_gib * _GIB),
        reserved_bytes=reserved,
        memory_bytes_per_second=bandwidth,
        sources={
            "matrix_flops": f"{sheet}, dense; f32 is TF32 from Ampere on",
            "vector_flops": f"{sheet}, fp32 outside the tensor cores",
            "matrix_tile": _PTX if tile != (1, 1) else "no tensor cores",
            "memory_bytes": sheet,
            "reserved_bytes": reserved_source or f"{_TARGETS}, {target}: device_memory_size",
            "memory_bytes_per_second": sheet,
            "clock_hertz": "not needed: XLA:GPU estimates no cycles",
            "host_bytes_per_second": f"{sheet}, PCIe, one direction",
        },
        host_bytes_per_second=_PCIE[silicon.capability[0]],
        preset=name,
    )
    return Preset(
        chip=chip,
        devices_per_chip=1,
        devices_per_host=8,
        torus_rank=0,
        pod_chips=0,
        wrap_edge=0,
        link=Wire(link, 3.4e-6),
        core=None,
        network=Wire(network, 14e-6),
        sources={"link": f"{link_source}; latency: {_NCCL}", "network": f"{network_source}; latency: {_NCCL}"},
        silicon=silicon,
    )


_VPU = f"{_BOOK}, appendix C"
_HBM_COPY = "estimate: HBM bandwidth / 4 (both halves read and write)"
_HOST_NETWORK = f"{_BOOK}: about 25 GB/s a host, shared by its chips"

_TPUS = (
    _tpu(
        "v2", cores=2, flops={"bf16": 46e12, "f32": 46e12}, clock=0.7e9, flops_source=_PAPER,
        vector=2 * 2048 * 0.7e9, vector_source=f"estimate: 2 cores x 2048 ALUs as v4 x 0.7 GHz ({_PAPER})",
        tile=128, memory_gib=16, usable_gib=7.48, bandwidth=700e9,
        rank=2, pod=256, wrap_edge=16, hosts=4, link=62e9, link_source=f"{_PAPER}: 496 Gb/s",
        network=6.25e9, network_source=_HOST_NETWORK, core=175e9, core_source=_HBM_COPY,
    ),
    _tpu(
        "v3", cores=2, flops={"bf16": 123e12, "f32": 123e12}, clock=0.94e9, flops_source=f"{_DOCS} (v3)",
        vector=2 * 2048 * 0.94e9, vector_source=f"estimate: 2 cores x 2048 ALUs as v4 x 0.94 GHz ({_PAPER})",
        tile=128, memory_gib=32, usable_gib=15.48, bandwidth=900e9,
        rank=2, pod=1024, wrap_edge=32, hosts=4, link=100e9, link_source=_BOOK,
        network=6.25e9, network_source=_HOST_NETWORK, core=225e9, core_source=_HBM_COPY,
    ),
    _tpu(
        "v4", cores=1, megacore=True, flops={"bf16": 275e12, "f32": 275e12, "i8": 275e12}, clock=1.05e9,
        flops_source=f"{_DOCS} (v4)",
        vector=2 * 2048 * 1.05e9, vector_source=f"2 cores x 2048 ALUs ({_VPU}) x 1.05 GHz",
        tile=128, memory_gib=32, usable_gib=30.75, bandwidth=1200e9,
        rank=3, pod=4096, wrap_edge=0, hosts=4, link=45e9, link_source=_BOOK,
        network=6.25e9, network_source=_HOST_NETWORK,
    ),
    _tpu(
        "v5e", cores=1, flops={"bf16": 197e12, "f32": 197e12, "i8": 394e12}, clock=1.5e9,
        flops_source=f"{_DOCS} (v5e), {_BOOK}",
        vector=4096 * 1.5e9, vector_source=f"1 core x 4096 ALUs ({_VPU}) x 1.5 GHz (from 197 TFLOP/s on 4 MXUs)",
        tile=128, memory_gib=16, usable_gib=15.75, bandwidth=819e9,
        rank=2, pod=256, wrap_edge=16, hosts=8, link=45e9, link_source=_BOOK,
        network=3.125e9, network_source=f"{_DOCS} (v5e): 2 x 100 Gb/s NICs a host of 8",
    ),
    _tpu(
        "v5p", cores=1, megacore=True, flops={"bf16": 459e12, "f32": 459e12, "i8": 918e12}, clock=1.75e9,
        flops_source=f"{_DOCS} (v5p), {_BOOK}",
        vector=2 * 4096 * 1.75e9, vector_source=f"2 cores x 4096 ALUs ({_VPU}) x 1.75 GHz (from 459 TFLOP/s on 8 MXUs)",
        tile=128, memory_gib=96, usable_gib=95.74, bandwidth=2765e9,
        rank=3, pod=8960, wrap_edge=0, hosts=4, link=90e9, link_source=_BOOK,
        network=6.25e9, network_source=f"{_DOCS} (v5p): 50 Gb/s a chip",
    ),
    _tpu(
        "v6e", cores=1, flops={"bf16": 918e12, "f32": 918e12, "i8": 1836e12}, clock=1.75e9,
        flops_source=f"{_DOCS} (v6e)",
        vector=4096 * 1.75e9, vector_source="estimate: 4096 ALUs as v5e, 1.75 GHz",
        tile=256, memory_gib=32, usable_gib=31.25, bandwidth=1638e9,
        rank=2, pod=256, wrap_edge=16, hosts=8, link=90e9, link_source=_BOOK,
        network=12.5e9, network_source="Google Cloud: 100 Gb/s a chip",
    ),
    _tpu(
        "tpu7x", cores=2, flops={"bf16": 2307e12, "f32": 2307e12, "f8": 4614e12}, clock=2.2e9,
        flops_source=f"{_DOCS} (TPU7x)",
        vector=2 * 4096 * 2.2e9, vector_source="estimate: 2 cores x 4096 ALUs as v5e, 2.2 GHz",
        tile=256, memory_gib=192, usable_gib=94.75, bandwidth=7380e9,
        rank=3, pod=9216, wrap_edge=0, hosts=4, link=90e9,
        link_source=f"estimate: v5p's rate, whose 1200 GB/s a chip both ways {_DOCS} (TPU7x) gives too",
        network=12.5e9, network_source=f"{_DOCS} (TPU7x): 100 Gb/s a chip",
        core=540e9, core_source=f"{_DOCS} (TPU7x): die to die six times one ICI link",
    ),
)  # fmt: skip

# Shared memory and lanes: CUDA C++ Programming Guide, "Compute Capabilities", tables of technical specifications and of
# arithmetic throughput.
_MIB = 2**20
_A100 = Silicon((8, 0), 108, 64, 1.41, 164, 163, 40 * _MIB, "NVIDIA A100-SXM4-80GB", "NVIDIA A100 whitepaper")
_CUBE_MESH = "hybrid cube mesh taken as a switch: all of a device's links at once, one direction"
_H100 = {"bf16": 989e12, "f16": 989e12, "f32": 494.5e12, "f64": 67e12, "f8": 1979e12, "i8": 1979e12}
_GPUS = (
    _gpu(
        "P100",
        silicon=Silicon((6, 0), 56, 64, 1.48, 64, 48, 4 * _MIB, "Tesla P100-SXM2-16GB", "NVIDIA P100 whitepaper"),
        flops={"f16": 21.2e12, "f32": 10.6e12, "f64": 5.3e12}, vector=10.6e12, tile=(1, 1),
        memory_gib=16, reserved=16 * _GIB - 17066885120, bandwidth=732e9, sheet="NVIDIA P100 data sheet", target="p100",
        link=80e9, link_source=f"NVLink 1, 4 x 20 GB/s; {_CUBE_MESH}",
        network=6.25e9, network_source="DGX-1: 4 x 100 Gb/s InfiniBand for 8 GPUs",
    ),
    _gpu(
        "V100",
        silicon=Silicon((7, 0), 80, 64, 1.53, 96, 96, 6 * _MIB, "Tesla V100-SXM2-32GB", "NVIDIA V100 whitepaper"),
        flops={"f16": 125e12, "f32": 15.7e12, "f64": 7.8e12}, vector=15.7e12, tile=(16, 16),
        memory_gib=32, reserved=16 * _GIB - 16935682048, bandwidth=900e9, sheet="NVIDIA V100 data sheet", target="v100",
        reserved_source=f"estimate: as the 16 GB part ({_TARGETS}, v100)",
        link=150e9, link_source=f"NVLink 2, 6 x 25 GB/s; {_CUBE_MESH}",
        network=6.25e9, network_source="DGX-1: 4 x 100 Gb/s InfiniBand for 8 GPUs",
    ),
    *(
        _gpu(
            f"A100-{size}",
            silicon=_A100,
            flops={"bf16": 312e12, "f16": 312e12, "f32": 156e12, "f64": 19.5e12, "i8": 624e12},
            vector=19.5e12, tile=(16, 8), memory_gib=size, reserved=size * _GIB - usable, bandwidth=bandwidth,
            sheet="NVIDIA A100 data sheet", target=f"a100_sxm_{size}", link=300e9, link_source="NVLink 3, 12 x 25 GB/s",
            network=25e9, network_source="DGX A100: 200 Gb/s InfiniBand for each GPU",
        )
        for size, usable, bandwidth in ((40, 42331013120, 1555e9), (80, 85100068864, 2039e9))
    ),
    _gpu(
        "H100",
        silicon=Silicon(
            (9, 0), 132, 128, 1.98, 228, 227, 50 * _MIB, "NVIDIA H100 80GB HBM3", "NVIDIA H100 whitepaper"
        ),
        flops=_H100, vector=67e12, tile=(64, 8), memory_gib=80, reserved=80 * _GIB - 84942979072,
        bandwidth=3350e9, sheet="NVIDIA H100 SXM data sheet", target="h100_sxm",
        link=450e9, link_source="NVLink 4, 18 x 25 GB/s",
        network=50e9, network_source="DGX H100: 400 Gb/s InfiniBand for each GPU",
    ),
    _gpu(
        "H200",
        silicon=Silicon(
            (9, 0), 132, 128, 1.98, 228, 227, 60 * _MIB, "NVIDIA H200", "as H100; the driver reports the cache"
        ),
        flops=_H100, vector=67e12, tile=(64, 8), memory_gib=141, reserved=_usable(141, 139.75),
        bandwidth=4800e9, sheet="NVIDIA H200 SXM data sheet", target="h200",
        reserved_source="estimate: about 139.75 GiB of 141 are reported as present",
        link=450e9, link_source="NVLink 4, 18 x 25 GB/s",
        network=50e9, network_source="DGX H200: 400 Gb/s InfiniBand for each GPU",
    ),
    _gpu(
        "B200",
        silicon=Silicon(
            (10, 0), 148, 128, 1.965, 228, 227, 132644864, "NVIDIA B200", "the driver (openxla/xla target_config, b200)"
        ),
        vector=75e12, tile=(128, 8),
        flops={"bf16": 2250e12, "f16": 2250e12, "f32": 1125e12, "f64": 37e12, "f8": 4500e12, "i8": 4500e12},
        memory_gib=180, reserved=180 * _GIB - 191514411008, bandwidth=8000e9,
        sheet="NVIDIA DGX B200 data sheet", target="b200", link=900e9, link_source="NVLink 5, 18 x 50 GB/s",
        network=50e9, network_source="DGX B200: 400 Gb/s InfiniBand for each GPU",
    ),
)  # fmt: skip

_PRESETS: dict[str, Preset] = {preset.chip.name: preset for preset in (*_TPUS, *_GPUS)}
