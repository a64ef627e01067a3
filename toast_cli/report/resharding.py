"""What moves when arrays that are sharded by one plan take their shardings by another: for a checkpoint that is loaded
on another mesh, weights that go from a trainer to a server, a job that grows or shrinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.text import Text

from toast_cli.hardware import load_spec, needs_no_file
from toast_cli.program.quantities import format_bytes, format_plural, format_seconds, type_bytes
from toast_cli.report import style
from toast_cli.report.model import ArgumentFacts, MeshFacts, Report


@dataclass(frozen=True)
class Resharding:
    """Bytes to move. Devices are numbered along the mesh, the last axis fastest.

    Attributes:
        arrays, bytes: arguments that both programs have, by name and type: how many, and their size as a whole.
        moved_bytes, moved_bytes_of_all: what a device receives, at most, and all together, if the device of a number is
            the same in both meshes.
        moved_seconds: of the first over all links of the device at once, a lower bound; None for a mesh of one's own.
        copied_bytes, copied_bytes_of_all, copied_seconds: the same if the second mesh has other devices, behind a
            network.
        held_bytes: what a device holds at most while arrays move one after the other: shards of both shardings.
    """

    arrays: int
    bytes: int
    moved_bytes: int
    moved_bytes_of_all: int
    moved_seconds: float | None
    copied_bytes: int
    copied_bytes_of_all: int
    copied_seconds: float | None
    held_bytes: int


def resharding(before: Report, now: Report) -> Resharding | None:
    """What moves from the shardings of one report to those of the other; None if they share no argument or agree."""
    first = {(a.name, a.type): a for a in before.arguments if _is_stated(a, before.mesh)}
    pairs = [(first[a.name, a.type], a) for a in now.arguments if (a.name, a.type) in first and _is_stated(a, now.mesh)]
    if not pairs or (
        [*before.mesh.axes.items()] == [*now.mesh.axes.items()] and all(a.sharding == b.sharding for a, b in pairs)
    ):
        return None
    devices = prod(now.mesh.axes.values())
    common = min(devices, prod(before.mesh.axes.values()))
    received, copied = np.zeros(devices), np.zeros(devices)
    held = most = sum(_largest(old, before.mesh) for old, _ in pairs)
    for old, new in pairs:
        have, want = _tiles(old, before.mesh), _tiles(new, now.mesh)
        size = type_bytes(new.type) / max(prod(_shape(new.type)), 1)
        volume = size * np.prod(want[1] - want[0], axis=1)
        low, high = np.maximum(have[0][:common], want[0][:common]), np.minimum(have[1][:common], want[1][:common])
        kept = size * np.prod(np.maximum(high - low, 0), axis=1)
        received += volume - np.pad(kept, (0, devices - common))
        copied += volume
        most = max(most, held + _largest(new, now.mesh))
        held += _largest(new, now.mesh) - _largest(old, before.mesh)
    links, network = _rates(now.mesh)
    return Resharding(
        arrays=len(pairs),
        bytes=sum(type_bytes(new.type) for _, new in pairs),
        moved_bytes=round(received.max()),
        moved_bytes_of_all=round(received.sum()),
        moved_seconds=received.max() / links if links else None,
        copied_bytes=round(copied.max()),
        copied_bytes_of_all=round(copied.sum()),
        copied_seconds=copied.max() / network if network else None,
        held_bytes=round(most),
    )


def _is_stated(argument: ArgumentFacts, mesh: MeshFacts) -> bool:
    """True if the report states a sharding of every dimension, by axes of the mesh."""
    axes = [axis for dimension in argument.sharding for axis in dimension]
    return len(argument.sharding) == len(_shape(argument.type)) and set(axes) <= mesh.axes.keys()


def _shape(array_type: str) -> list[int]:
    return [int(size) for size in array_type.partition("[")[2].rstrip("]").split(",") if size]


def _tiles(argument: ArgumentFacts, mesh: MeshFacts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[devices, dimensions] first element of each device's shard, and the one behind its last."""
    sizes = tuple(mesh.axes.values())
    places = dict(zip(mesh.axes, np.unravel_index(np.arange(prod(sizes)), sizes), strict=True))
    starts, stops = [], []
    for size, axes in zip(_shape(argument.type), argument.sharding, strict=True):
        part = np.zeros(prod(sizes), np.int64)
        for axis in axes:
            part = part * mesh.axes[axis] + places[axis]
        tile = -(-size // prod(mesh.axes[axis] for axis in axes))
        starts.append(np.minimum(part * tile, size))
        stops.append(np.minimum((part + 1) * tile, size))
    shape = (len(starts), prod(sizes))
    return np.array(starts, np.int64).reshape(shape).T, np.array(stops, np.int64).reshape(shape).T


def _largest(argument: ArgumentFacts, mesh: MeshFacts) -> float:
    """Bytes of the largest shard."""
    start, stop = _tiles(argument, mesh)
    elements = np.prod(stop - start, axis=1).max()
    return type_bytes(argument.type) / max(prod(_shape(argument.type)), 1) * float(elements)


def _rates(mesh: MeshFacts) -> tuple[float, float]:
    """Bytes per second that a device receives over all of its links in a slice or host, and over the network; 0 where
    unknown."""
    if not needs_no_file(mesh.name):
        return 0.0, 0.0
    spec = load_spec(mesh.name)
    links = sum(d.bytes_per_second * (2 if d.kind == "ring" else 1) for d in spec.dimensions if d.kind != "network")
    return links, spec.preset.wires["network"].bytes_per_second if spec.preset else 0.0


def block(facts: Resharding) -> RenderableType:
    """The section of a terminal's report."""

    def line(receiver: str, most: int, of_all: int, seconds: float | None, over: str) -> Text:
        least = f", at least {format_seconds(seconds)} over {over}" if seconds else ""
        return Text(f"{receiver}: a device receives at most {format_bytes(most)}, all {format_bytes(of_all)}{least}")

    return style.section(
        f"from the first sharding to the second: {format_plural(facts.arrays, 'array')} that both programs have, "
        f"{format_bytes(facts.bytes)}",
        line("to the same devices", facts.moved_bytes, facts.moved_bytes_of_all, facts.moved_seconds, "its links"),
        line("to other devices", facts.copied_bytes, facts.copied_bytes_of_all, facts.copied_seconds, "the network"),
        Text(f"array by array, a device holds at most {format_bytes(facts.held_bytes)} of them meanwhile"),
    )
