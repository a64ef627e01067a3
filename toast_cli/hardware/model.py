"""The hardware model of the rest of the tool: a chip, a logical mesh on physical links, and groups of its devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LinkKind = Literal["ring", "line", "switch", "network"]


@dataclass(frozen=True, slots=True)
class Chip:
    """One device (what XLA counts as one), with published figures.

    Attributes:
        matrix_flops: peak FLOP/s of the matrix unit by element type ("bf16", "f32", "f16", "f8", "i8"); the type a chip
            does not list runs at the rate of the next wider one it does.
        vector_flops: peak FLOP/s of the vector unit (elementwise work, reductions), f32.
        matrix_tile: edge of the matrix unit's array in elements: (rows, columns).
        memory_bytes: device memory. reserved_bytes: the part the runtime keeps for itself.
        memory_bytes_per_second: memory bandwidth.
        host_bytes_per_second: between this memory and the host's, one direction; 0: not known, takes no time.
        clock_hertz: of the compute cores, 0 where nothing depends on it.
        sustained: factor on the rate of products, also hand-written ones, in a whole training run, in which a chip at
            its power limit lowers its clock.
        preset: name of the preset that the figures come from, by which `price.profiles` knows the chip; empty for a
            chip of one's own.
        sources: figure name -> where it was published.
    """

    name: str
    platform: Literal["tpu", "gpu"]
    matrix_flops: dict[str, float] = field(hash=False)
    vector_flops: float
    matrix_tile: tuple[int, int]
    memory_bytes: int
    reserved_bytes: int
    memory_bytes_per_second: float
    sources: dict[str, str] = field(hash=False)
    clock_hertz: float = 0.0
    sustained: float = 1.0
    host_bytes_per_second: float = 0.0
    preset: str = ""


@dataclass(frozen=True, slots=True)
class Nccl:
    """What the library of collectives attains between GPUs of one kind.

    attained: fraction of the link's peak. sharp: bus bandwidth of an all-reduce in the switch, as a multiple of a
    ring's; 0: the switch does not add up. low_latency: bytes per second of the LL protocol in a node. channels:
    multiprocessors that a collective occupies.
    """

    attained: float
    sharp: float
    low_latency: float
    channels: int


@dataclass(frozen=True, slots=True)
class GpuDeviceInfo:
    """Properties of a GPU that its compiler needs besides memory.

    Attributes:
        capability: compute capability, major and minor.
        lanes: f32 units in a multiprocessor.
        clock_ghz: highest boost clock.
        shared_kib: shared memory of a multiprocessor. block_kib: its part that one block of threads may use.
        cache_bytes: level-2 cache.
        part: the driver's name for it.
        source: where clock, cache and the preset's multiprocessors were published.
    """

    capability: tuple[int, int]
    lanes: int
    clock_ghz: float
    shared_kib: int
    block_kib: int
    cache_bytes: int
    part: str
    source: str


@dataclass(frozen=True, slots=True)
class Link:
    """One physical dimension as one mesh axis sees it.

    Attributes:
        kind: "ring" (torus dimension with wraparound), "line" (torus dimension without it), "switch" (all-to-all inside
            a host or NVLink domain), "network" (between hosts or slices).
        size: devices along this dimension that the axis covers.
        bytes_per_second: per device, one direction (ring and line: of one link; switch and network: into the fabric).
        latency_seconds: of one hop (ring, line) or one message (switch, network).
        dimension: name of the physical dimension this is a piece of; empty when it stands alone.
        stride: how many devices of that dimension lie between neighbours of this piece, 1 for adjacent ones. The
            figures above already allow for it: a hop of a strided piece crosses `stride` links and shares each with
            `stride` groups.
    """

    kind: LinkKind
    size: int
    bytes_per_second: float
    latency_seconds: float
    dimension: str = ""
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Axis:
    """One logical mesh axis; `links` are the physical dimensions it covers, innermost first (product of sizes =
    size)."""

    name: str
    size: int
    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class Mesh:
    """A logical mesh. Device d has coordinates of d in row-major order over `axes`, the first axis slowest."""

    name: str
    chip: Chip
    axes: tuple[Axis, ...]
    limit_bytes: int
    """Device memory a plan may use: (memory - reserved) x usable fraction, or what the user set."""
    hour_price: float = 0.0
    """Price of the whole machine by the hour, in the user's currency; 0 if it is not known."""

    @property
    def devices(self) -> int:
        return prod(self.sizes)

    @property
    def slice_devices(self) -> int:
        """Number of devices that no network separates."""
        return self.devices // prod(link.size for axis in self.axes for link in axis.links if link.kind == "network")

    @property
    def sizes(self) -> tuple[int, ...]:
        """[axes] number of devices along each axis."""
        return tuple(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def shape(self) -> dict[str, int]:
        """Axis -> its size, in order."""
        return {axis.name: axis.size for axis in self.axes}

    def __str__(self) -> str:
        return " x ".join(f"{axis.name}={axis.size}" for axis in self.axes)


# ---------------------------------------------------------------- groups of devices
# Groups of devices that communicate with each other, and the mesh axes that make the same groups.
#
# Devices are numbered as in `Mesh`: in row-major order over the axes, the first axis slowest.

Groups = tuple[tuple[int, ...], ...]
_GROUPS = "groups of "


def axes_of_groups(groups: Groups, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The fewest axes of a mesh of these sizes that make the groups, in mesh order; None when no set of axes does."""
    mesh = np.arange(prod(sizes)).reshape(sizes)
    wanted = {frozenset(group) for group in groups}
    real = [axis for axis, size in enumerate(sizes) if size > 1]
    for count in range(len(real) + 1):
        for chosen in combinations(real, count):
            if {frozenset(group) for group in along(mesh, list(chosen))} == wanted:
                return chosen
    return None


def crossed_axes(groups: Iterable[tuple[int, ...]], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Axes along which devices of one group differ; groups of two may be the source and the target of a permute."""
    crossed: set[int] = set()
    for group in groups:
        for other in group[1:]:
            first, second = (np.unravel_index(device, sizes) for device in (group[0], other))
            crossed.update(axis for axis in range(len(sizes)) if first[axis] != second[axis])
    return tuple(sorted(crossed))


def along(mesh: NDArray[np.int64], axes: list[int]) -> Groups:
    """The groups of devices that differ only in their coordinates on `axes`."""
    rest = [axis for axis in range(mesh.ndim) if axis not in axes]
    size = prod(mesh.shape[axis] for axis in axes)
    return as_groups(mesh.transpose([*rest, *axes]).reshape(-1, size))


def as_groups(rows: NDArray[np.int64]) -> Groups:
    return tuple(tuple(int(device) for device in row) for row in rows)


def groups_name(devices: int) -> str:
    """A name that replaces axes for groups of this size that no mesh axes make."""
    return f"{_GROUPS}{devices}"


def is_groups_name(name: str) -> bool:
    return name.startswith(_GROUPS)


def group_size(axes: Iterable[str], sizes: dict[str, int]) -> int:
    """Number of devices that communicate over these axes (name -> size), or in groups with such a name."""
    return prod(int(axis[len(_GROUPS) :]) if is_groups_name(axis) else sizes.get(axis, 1) for axis in axes)
