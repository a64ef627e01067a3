"""Finds involuntary full rematerialisations: arrays that XLA's partitioner gathers on every device because it has no
better way to reshard them. It warns of each ("[SPMD] Involuntary full rematerialization").

In: a `Partitioned` and the mesh. Out: `Rematerialisation`s, equal ones once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from toast_cli.frontend.gspmd import mesh_axes, read_tiling
from toast_cli.verify.collectives import name_and_place
from toast_cli.verify.graphs import graphs
from toast_cli.verify.hlo_text import array_bytes, places
from toast_cli.verify.partitioned import Partitioned

Axes = tuple[tuple[str, ...], ...]  # [dimensions] mesh axes that split each, major to minor

_WARNING = re.compile(
    r"nvoluntary full rematerialization\. The compiler cannot go from sharding (\{.*?\}) to (\{.*?\}) efficiently "
    r"for HLO operation %?\S+ = (\w+)\[([\d,]*)\](.*?)\. As the last resort"
)


@dataclass(frozen=True)
class Rematerialisation:
    """An array that is resharded from `start` to `end`; None for a sharding that no mesh axes express.

    Attributes:
        type, shape: of the whole array. bytes: of the whole, which every device holds for a moment. count: in one step,
            loops counted. name, place: the op that makes it, and its `model.py:12`.
    """

    type: str
    shape: tuple[int, ...]
    bytes: int
    start: Axes | None
    end: Axes | None
    count: float
    name: str
    place: str


def rematerialisations(
    found: Partitioned, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...], through: Collection[str] = ()
) -> list[Rematerialisation]:
    """The rematerialisations that the partitioner warned of, the largest first. through: see `places`."""
    frames = places(found.text, through)
    runs: dict[tuple[str, str], float] = {}
    for graph in graphs(found.text):
        for node in graph.nodes.values():
            key = name_and_place(node.rest, frames)
            runs[key] = max(graph.runs, runs.get(key, 0.0))
    alike: Counter[Rematerialisation] = Counter()
    for warned in _WARNING.finditer(found.log):
        start, end, element, extents, rest = warned.groups()
        local = tuple(int(extent) for extent in extents.split(",") if extent)
        tiling = read_tiling(start)
        tiles = tiling.tiles if tiling and len(tiling.tiles) == len(local) else (1,) * len(local)
        lies, needed = (_axes(text, len(local), axis_names, axis_sizes) for text in (start, end))
        shape = tuple(extent * parts for extent, parts in zip(local, tiles, strict=True))
        whole = array_bytes(f"{element}[{','.join(map(str, shape))}]")
        name, place = name_and_place(rest, frames)
        one = Rematerialisation(element, shape, sum(whole), lies, needed, runs.get((name, place), 1.0), name, place)
        alike[one] += 1
    each = [replace(one, count=one.count * times) for one, times in alike.items()]
    return sorted(each, key=lambda one: -one.bytes * one.count)


def _axes(text: str, rank: int, names: tuple[str, ...], sizes: tuple[int, ...]) -> Axes | None:
    tiling = read_tiling(text)
    return mesh_axes(tiling, rank, names, sizes) if tiling else None
