"""What moves when arrays that are sharded by one plan take their shardings by another: for a checkpoint that is loaded
on another mesh, for weights that go from a trainer to a server, for a job that grows or shrinks, for caches that go
from prefill to decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.text import Text

from toast_cli.hardware import load_spec, needs_no_file
from toast_cli.program.quantities import format_bytes, format_plural, format_seconds, type_bytes
from toast_cli.report import style
from toast_cli.report.model import ArgumentFacts, MeshFacts, Report, ResultFacts


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
    known = {(one.name, one.type): one for one in before.arguments if _is_whole(one, before.mesh)}
    pairs = [(known[one.name, one.type], one) for one in now.arguments if (one.name, one.type) in known]
    pairs = [(old, new) for old, new in pairs if _is_whole(new, now.mesh)]
    if not pairs or (
        [*before.mesh.axes.items()] == [*now.mesh.axes.items()] and all(a.sharding == b.sharding for a, b in pairs)
    ):
        return None
    devices = prod(now.mesh.axes.values())
    common = min(devices, prod(before.mesh.axes.values()))
    received, copied = np.zeros(devices), np.zeros(devices)
    held = sum(_largest(one, before.mesh) for one, _ in pairs)
    most = held
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
    worst, whole = received.max(), copied.max()
    return Resharding(
        len(pairs), sum(type_bytes(one.type) for one, _ in pairs), round(worst), round(received.sum()),
        worst / links if links else None, round(whole), round(copied.sum()), whole / network if network else None,
        round(most),
    )  # fmt: skip


@dataclass(frozen=True)
class HandOver:
    """Arrays that one program makes and another one reads, such as caches between prefill and decode on other devices.

    Attributes:
        arrays, bytes: how many, and their size. received_bytes: what a device of the second program receives, at most.
        seconds: of these over the network, a lower bound; None for a mesh of one's own.
    """

    arrays: int
    bytes: int
    received_bytes: int
    seconds: float | None


def handed_over(before: Report, now: Report) -> HandOver | None:
    """What goes from the results of one program to the arguments of another; None if nothing does.

    Results may be smaller than the arguments, such as the caches of one sequence: they count as if they were written
    at the start.
    """
    pairs = list(_handed(before, now))
    received = np.zeros(prod(now.mesh.axes.values()))
    for made, read in pairs:
        start, stop = _tiles(read, now.mesh)
        sizes = np.array(_shape(made.type))
        part = np.prod(np.maximum(np.minimum(stop, sizes) - start, 0), axis=1) / max(np.prod(sizes), 1)
        received += type_bytes(made.type) * part
    if not pairs:
        return None
    network, most = _rates(now.mesh)[1], received.max()
    size = sum(type_bytes(made.type) for made, _ in pairs)
    return HandOver(len(pairs), size, round(most), most / network if network else None)


def _handed(before: Report, now: Report) -> Iterator[tuple[ResultFacts, ArgumentFacts]]:
    """Each argument of the second program that the first does not have, with the first result that can be it: of two
    dimensions or more, of its element type, and nowhere larger; one of its size rather. A result of the type of one of
    the first program's own arguments is its next state."""
    kept, state = {(one.name, one.type) for one in before.arguments}, {one.type for one in before.arguments}
    results = [one for one in before.results if len(_shape(one.type)) > 1 and one.type not in state]
    for read in now.arguments:
        alike = [made for made in results if _fits_into(made.type, read.type)]
        if alike and (read.name, read.type) not in kept and _is_whole(read, now.mesh):
            made = next((one for one in alike if one.type == read.type), alike[0])
            results.remove(made)
            yield made, read


def _fits_into(small: str, large: str) -> bool:
    sizes = _shape(small), _shape(large)
    alike = small.partition("[")[0] == large.partition("[")[0] and len(sizes[0]) == len(sizes[1])
    return alike and all(one <= other for one, other in zip(*sizes, strict=True))


def _is_whole(argument: ArgumentFacts, mesh: MeshFacts) -> bool:
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
    links = sum(
        one.bytes_per_second * (2 if one.kind == "ring" else 1) for one in spec.dimensions if one.kind != "network"
    )
    return links, spec.preset.wires["network"].bytes_per_second if spec.preset else 0.0


def block(found: Resharding) -> RenderableType:
    """The section of a terminal's report."""

    def line(what: str, one: int, of_all: int, seconds: float | None, over: str) -> Text:
        least = f", at least {format_seconds(seconds)} over {over}" if seconds else ""
        return Text(f"{what}: a device receives at most {format_bytes(one)}, all {format_bytes(of_all)}{least}")

    return style.section(
        f"from the first sharding to the second: {format_plural(found.arrays, 'array')} that both programs have, "
        f"{format_bytes(found.bytes)}",
        line("to the same devices", found.moved_bytes, found.moved_bytes_of_all, found.moved_seconds, "its links"),
        line("to other devices", found.copied_bytes, found.copied_bytes_of_all, found.copied_seconds, "the network"),
        Text(f"array by array, a device holds at most {format_bytes(found.held_bytes)} of them meanwhile"),
    )


def handed_block(found: HandOver) -> RenderableType:
    """The section of a terminal's report for what is handed over."""
    least = f", at least {format_seconds(found.seconds)} over the network" if found.seconds else ""
    return style.section(
        f"from the first program to the second: {format_plural(found.arrays, 'array')} that one makes and the other "
        f"reads, {format_bytes(found.bytes)}",
        Text(f"to other devices: a device receives at most {format_bytes(found.received_bytes)}{least}"),
    )
