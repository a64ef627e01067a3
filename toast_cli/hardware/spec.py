"""`Spec`: a machine as its specification describes it, which makes logical meshes of any shape that fits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from toast_cli.errors import SpecError, UsageError
from toast_cli.hardware.axis_links import divisors, lay_out
from toast_cli.hardware.chips import Preset
from toast_cli.hardware.model import Axis, Chip, Mesh
from toast_cli.hardware.topology import Dimension
from toast_cli.inputs import whole_number

AXIS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# In a pin, a report and a PartitionSpec this word means an unsharded dimension.
RESERVED_NAMES = frozenset({"None"})
RESERVED_HINT = "in a PartitionSpec it means a dimension that is not split; choose another name, e.g. data"

# Axis names of shapes the tool chooses itself, slowest first, by number of axes.
_AXIS_NAMES = {1: ("data",), 2: ("data", "model"), 3: ("data", "fsdp", "model")}


@dataclass(frozen=True, slots=True)
class AxisRequest:
    """An axis as a specification asks for it; `over` names the physical dimensions it may use, None for any."""

    name: str
    size: int
    over: frozenset[str] | None = None


@dataclass(frozen=True)
class Spec:
    """A machine: one kind of chip on physical dimensions, and perhaps the logical axes wanted on it.

    Attributes:
        source: the file it was read from. description: one line, may be empty.
        dimensions: physical, innermost first; dimensions of one device are left out.
        requests: the axes written in the specification, None if it leaves the choice to the tool.
        memory_fraction: part of the usable memory a plan may fill.
    """

    name: str
    description: str
    source: str
    chip: Chip
    preset: Preset | None
    dimensions: tuple[Dimension, ...]
    requests: tuple[AxisRequest, ...] | None
    memory_fraction: float

    @property
    def devices(self) -> int:
        return prod(dimension.size for dimension in self.dimensions)

    @property
    def limit_bytes(self) -> int:
        """Bytes of one device a plan may use."""
        return int((self.chip.memory_bytes - self.chip.reserved_bytes) * self.memory_fraction)

    @cached_property
    def axes(self) -> dict[str, int] | None:
        """The shape written in the specification; None when it leaves the choice to the tool."""
        return None if self.requests is None else {request.name: request.size for request in self.requests}

    def mesh(
        self, shape: Mapping[str, int] | None = None, memory_limit: int | None = None, where: str = "--mesh-shape"
    ) -> Mesh:
        """The logical mesh of that shape (axis name -> size, slowest first) on the physical dimensions.

        Without `shape`: the specification's axes, or, if it has none, the most balanced shape of two axes.
        `memory_limit` in bytes per device replaces the specification's. Raises SpecError if the sizes do not multiply
        to the number of devices (at `where`, if it is `shape`'s), UsageError for a memory limit below one byte.
        """
        if memory_limit is not None and memory_limit < 1:
            raise UsageError(f"a memory limit of {memory_limit} bytes", hint="give one byte or more, e.g. 28GiB")
        requests = self._requests(shape, where)
        links = lay_out([request.size for request in requests], self.dimensions, [request.over for request in requests])
        if links is None:
            raise SpecError(
                f"axes {shape_text({r.name: r.size for r in requests})} cannot be mapped onto {self.dimension_text()}",
                where=self.source if shape is None else where,
                hint="leave out `over`, and toast maps them itself" if shape is None else "choose another shape",
            )
        axes = tuple(Axis(request.name, request.size, link) for request, link in zip(requests, links, strict=True))
        return Mesh(self.name, self.chip, axes, self.limit_bytes if memory_limit is None else memory_limit)

    def mesh_shapes(self, max_axes: int = 2) -> list[dict[str, int]]:
        """Every way to factor the devices into at most `max_axes` axes (up to 3) of two devices or more.

        One axis first, then two, and so on; among equals the one with the smaller last axis first.
        """
        if self.devices == 1:
            return [{"data": 1}]
        shapes = [
            dict(zip(_AXIS_NAMES[count], sizes, strict=True))
            for count in range(1, min(max_axes, max(_AXIS_NAMES)) + 1)
            for sizes in _factorings(self.devices, count)
        ]
        return sorted(shapes, key=lambda shape: (len(shape), list(shape.values())[::-1]))

    def _requests(self, shape: Mapping[str, int] | None, where: str) -> tuple[AxisRequest, ...]:
        """The axes of the mesh. `over` of the specification also applies to a shape equal to the specification's."""
        if shape is None and self.requests is not None:
            return self.requests
        wanted = dict(shape) if shape is not None else self._balanced_shape()
        if self.requests is not None and wanted == self.axes and list(wanted) == [r.name for r in self.requests]:
            return self.requests
        for name, size in wanted.items():
            if size < 1:
                raise SpecError(f'axis "{name}" has size {size}', where=where, hint="sizes are one or more")
        if prod(wanted.values()) != self.devices:
            fitting = ", ".join(map(shape_text, self.mesh_shapes()))
            raise SpecError(
                f"{shape_text(wanted)} is {prod(wanted.values())} devices; {self.name} has {self.devices}",
                where=where,
                hint=f"shapes that fit: {fitting}",
            )
        return tuple(AxisRequest(name, size) for name, size in wanted.items())

    def _balanced_shape(self) -> dict[str, int]:
        """data x model, as near to square as possible, data not smaller."""
        shapes = [shape for shape in self.mesh_shapes() if shape["data"] >= shape.get("model", 1)]
        return shapes[-1]

    def dimension_text(self) -> str:
        """`x=2 x y=2 x z=4`, innermost first."""
        return " x ".join(f"{dimension.name}={dimension.size}" for dimension in self.dimensions) or "one device"


def parse_shape(text: str, where: str = "--mesh-shape") -> dict[str, int]:
    """`data=8,model=2` -> {"data": 8, "model": 2}, in the order written. Raises UsageError at `where`."""
    shape: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        number = whole_number(size)
        if not equals or not AXIS_NAME.fullmatch(name) or not number:
            raise UsageError(f'"{part.strip():.60}" is not an axis', where=where, hint="write e.g. data=8,model=2")
        if name in RESERVED_NAMES:
            raise UsageError(f'"{name}" cannot name an axis', where=where, hint=RESERVED_HINT)
        if name in shape:
            raise UsageError(f'axis "{name}" is given twice', where=where, hint="name each axis once")
        shape[name] = number
    return shape


def shape_text(shape: Mapping[str, int]) -> str:
    """`data=8 x model=2`."""
    return " x ".join(f"{name}={size}" for name, size in shape.items()) or "no axes"


def _factorings(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every ordered way to write `count` as a product of `parts` factors of two or more."""
    if parts == 1:
        if count > 1:
            yield (count,)
        return
    for factor in divisors(count)[1:]:
        for rest in _factorings(count // factor, parts - 1):
            yield (factor, *rest)
