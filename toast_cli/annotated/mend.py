"""Finds an intermediate sharding if XLA cannot reshard directly from one sharding to another.

In: a `Rematerialisation` and the mesh. Out: a `Mend`, measured: XLA partitions a program that only reshards the
array, directly and through the intermediate shardings.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf

from toast_cli.confirm.compilers import seconds_on
from toast_cli.hardware import Mesh
from toast_cli.plan.reshard import is_even, waypoints
from toast_cli.plan.sharding import Sharding, axes_of
from toast_cli.verify.child import Failure
from toast_cli.verify.partitioned import after_partitioning
from toast_cli.verify.rematerialised import Axes, Rematerialisation
from toast_cli.verify.sums import partitioned_collectives


@dataclass(frozen=True)
class Mend:
    """through: the intermediate shardings. direct_seconds, seconds: of one reshard as XLA does it directly, and through
    those."""

    through: tuple[Sharding, ...]
    direct_seconds: float
    seconds: float


def mend(one: Rematerialisation, mesh: Mesh) -> Mend | None:
    """The fastest intermediate shardings; None if none is faster than the direct reshard, or if no mesh axes express
    the shardings."""
    if one.start is None or one.end is None:
        return None
    start, end = (_numbered(axes, mesh) for axes in (one.start, one.end))
    ways = [(), *_between(start, end, mesh, one.shape)]
    with ThreadPoolExecutor(max(1, min(len(ways), os.cpu_count() or 1))) as pool:
        direct, *others = pool.map(lambda through: _seconds(one, [start, *through, end], mesh), ways)
    found = [Mend(through, direct, seconds) for through, seconds in zip(ways[1:], others, strict=True)]
    return min((way for way in found if way.seconds < direct), key=lambda way: way.seconds, default=None)


def _between(start: Sharding, end: Sharding, mesh: Mesh, shape: tuple[int, ...]) -> list[tuple[Sharding, ...]]:
    """Candidates: toast's own route; the common axes of both; the end's axes plus the start's other axes; and vice
    versa."""
    shared = tuple(_common(a, b) for a, b in zip(start, end, strict=True))
    found = [waypoints(start, end, mesh.sizes, shape), (shared,), (_more(end, start),), (_more(start, end),)]
    even = [way for way in dict.fromkeys(found) if way and all(is_even(at, shape, mesh.sizes) for at in way)]
    return [through for through in even if not {start, end} & {*through}]


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The common prefix of two axis lists."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return one[: same.index(False)] if False in same else one[: len(same)]


def _more(one: Sharding, other: Sharding) -> Sharding:
    """The sharding, with the axes of the other that it does not use."""
    used = axes_of(one)
    return tuple((*a, *(axis for axis in b if axis not in used)) for a, b in zip(one, other, strict=True))


def _numbered(axes: Axes, mesh: Mesh) -> Sharding:
    return tuple(tuple(mesh.names.index(name) for name in names) for names in axes)


def _seconds(one: Rematerialisation, way: Sequence[Sharding], mesh: Mesh) -> float:
    """Seconds of communication per device along a route, as XLA partitions it; infinite if it fails."""
    found = after_partitioning(_program(one, way, mesh).encode(), "stablehlo", mesh.devices)
    if isinstance(found, Failure):
        return inf
    moved = partitioned_collectives(found.text, mesh.names, mesh.sizes)
    return sum(each.count * seconds_on(mesh, each.kind, each.bytes, each.axes) for each in moved)


def _program(one: Rematerialisation, way: Sequence[Sharding], mesh: Mesh) -> str:
    element = one.type.replace("pred", "i1").replace("s", "i") if one.type[0] in "ps" else one.type
    kind = f"tensor<{'x'.join(map(str, (*one.shape, element)))}>"
    axes = ", ".join(f'"{name}"={size}' for name, size in zip(mesh.names, mesh.sizes, strict=True))

    def written(sharding: Sharding) -> str:
        parts = ["{" + ", ".join(f'"{mesh.names[axis]}"' for axis in dim) + "}" for dim in sharding]
        return f"<@mesh, [{', '.join(parts)}]>"

    steps = "".join(
        f"  %{k} = sdy.sharding_constraint %{k - 1} {written(at)} : {kind}\n" for k, at in enumerate(way[1:], 1)
    )
    first, last = written(way[0]), written(way[-1])
    return (
        f"module attributes {{mhlo.num_partitions = {mesh.devices} : i32}} {{\n  sdy.mesh @mesh = <[{axes}]>\n"
        f"  func.func public @main(%0: {kind} {{sdy.sharding = #sdy.sharding{first}}}) -> "
        f"({kind} {{sdy.sharding = #sdy.sharding{last}}}) {{\n{steps}  return %{len(way) - 1} : {kind}\n  }}\n}}\n"
    )
