"""Meshes whose axes have no names: those of manual regions in GSPMD's form.

GSPMD states shardings by device numbers. Such regions are read on a mesh with invented axes, the fewest that express
the shardings (`factored`). Once the user's mesh is chosen, its axes over the same devices are found (`axes_on`); while
a program is written, its regions name those (`regions_on`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np

from toast_cli.frontend.gspmd import TILED, TileAssignment, mesh_axes
from toast_cli.frontend.statements import Axes, MeshAxes, mesh_axes_of
from toast_cli.xla import ir, sdy, walk_ops

PREFIX = "gspmd_axis_"
# Meshes have few axes; with more, there are too many assignments of axes to dimensions to try.
MOST_AXES = 5


def is_nameless(mesh: MeshAxes) -> bool:
    return bool(mesh) and all(name.startswith(PREFIX) for name, _ in mesh)


def factored(tilings: Iterable[TileAssignment], devices: int) -> MeshAxes | None:
    """The mesh with the fewest axes, devices in row-major order, that expresses all tilings; None if there is none."""
    tilings = list(tilings)
    for sizes in sorted(_factorisations(devices, MOST_AXES), key=len):
        names = tuple(f"{PREFIX}{k}" for k in range(len(sizes)))
        if all(mesh_axes(tiling, len(tiling.tiles), names, sizes) is not None for tiling in tilings):
            return tuple(zip(names, sizes, strict=True))
    return None


def _factorisations(number: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every tuple of at most `most` factors above 1 with this product; (1,) for 1."""
    yield (number,)
    if most > 1:
        for first in range(2, number // 2 + 1):
            if number % first == 0:
                yield from ((first, *rest) for rest in _factorisations(number // first, most - 1))


def axes_on(axes: Axes, mesh: MeshAxes, names: tuple[str, ...], sizes: tuple[int, ...]) -> Axes | None:
    """A sharding on a mesh without names, by the axes of another mesh; None if its axes cannot express it."""
    numbers = {name: number for number, (name, _) in enumerate(mesh)}
    extents = tuple(size for _, size in mesh)
    split = [[numbers[name] for name in found or ()] for found in axes]
    used = [number for found in split for number in found]
    rest = [number for number in range(len(mesh)) if number not in used]
    grid = np.arange(prod(extents), dtype=np.int64).reshape(extents).transpose(used + rest)
    tiles = tuple(prod(extents[number] for number in found) for found in split)
    said = mesh_axes(TileAssignment(TILED, tiles, grid.reshape((*tiles, -1))), len(tiles), names, sizes)
    if said is None:
        return None
    return tuple(None if before is None else after for before, after in zip(axes, said, strict=True))


@contextmanager
def regions_on(module: Any, names: tuple[str, ...], sizes: tuple[int, ...]) -> Iterator[None]:
    """While the block runs, regions on meshes without names refer to the mesh with these axes, which must be able to
    express them (`constraints.check_manual_axes`)."""
    meshes = {
        str(op.attributes["sym_name"].value): op
        for op in walk_ops(module, "sdy.mesh")
        if is_nameless(mesh_axes_of(op.attributes["mesh"]))
    }
    before: list[tuple[Any, str, Any]] = []

    def put(operation: Any, name: str, text: str) -> None:
        before.append((operation, name, operation.attributes[name]))
        operation.attributes[name] = ir.Attribute.parse(text, module.context)

    for symbol, op in meshes.items():
        mesh = mesh_axes_of(op.attributes["mesh"])
        for region in walk_ops(module, "sdy.manual_computation"):
            _translate(region, symbol, mesh, names, sizes, put)
        axes = ", ".join(f"{quoted(name)}={size}" for name, size in zip(names, sizes, strict=True))
        put(op, "mesh", f"#sdy.mesh<[{axes}]>")
    try:
        yield
    finally:
        for operation, name, attribute in reversed(before):
            operation.attributes[name] = attribute


def _translate(
    region: Any, symbol: str, mesh: MeshAxes, names: tuple[str, ...], sizes: tuple[int, ...], put: Any
) -> None:
    manual = region_axes(region)
    if not set(manual) <= {name for name, _ in mesh}:
        return
    for name in ("in_shardings", "out_shardings"):
        written = []
        for sharding in sdy.TensorShardingPerValueAttr(region.attributes[name]).shardings:
            stated = [
                (tuple(str(sdy.AxisRefAttr(axis).name) for axis in d.axes), d.is_closed) for d in dimensions(sharding)
            ]
            found = axes_on(tuple(axes for axes, _ in stated), mesh, names, sizes) or ()
            written.append(sharding_text(symbol, found, [closed for _, closed in stated]))
        put(region, name, f"#sdy.sharding_per_value<[{', '.join(written)}]>")
    (ours,) = axes_on((manual,), mesh, names, sizes) or ((),)
    put(region, "manual_axes", manual_text(ours or ()))


def region_axes(region: Any) -> tuple[str, ...]:
    """The manual axes of a region."""
    return tuple(str(axis) for axis in sdy.ManualAxesAttr(region.attributes["manual_axes"]))


def dimensions(sharding: Any) -> list[Any]:
    return [sdy.DimensionShardingAttr(d) for d in sdy.TensorShardingAttr(sharding).dimension_shardings]


def sharding_text(symbol: str, axes: Axes, closed: Iterable[bool]) -> str:
    """Text of one `#sdy.sharding`, for use in a list."""
    found = (
        "{" + ", ".join([*map(quoted, names or ()), *([] if whole else ["?"])]) + "}"
        for names, whole in zip(axes, closed, strict=True)
    )
    return f"<@{symbol}, [{', '.join(found)}]>"


def manual_text(axes: Iterable[str]) -> str:
    return f"#sdy<manual_axes{{{', '.join(map(quoted, axes))}}}>"


def quoted(name: str) -> str:
    """A mesh axis name as MLIR writes it."""
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
