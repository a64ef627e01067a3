"""What `toast mesh list` and `toast mesh show` print: specifications, a chip with its sources, links and axes."""

from __future__ import annotations

from math import prod

from rich.console import RenderableType
from rich.text import Text

from toast_cli.base.units import format_rate
from toast_cli.hardware import Link, Mesh, Spec
from toast_cli.price.collectives import collective_seconds
from toast_cli.price.profiles import find_profile
from toast_cli.program.quantities import format_bytes, format_percent, format_plural, format_seconds
from toast_cli.report.style import LABEL, TITLE, indented, shape, table, with_axes

# The array whose collectives `show` prices.
SAMPLE_BYTES = 64 * 2**20
SAMPLE_KINDS = ("all-reduce", "all-gather", "all-to-all")
# Devices of one dimension that are drawn one by one.
MOST_DRAWN = 16


def spec_table(specs: list[Spec]) -> RenderableType:
    """One row a specification."""
    drawn = table(
        [("name", "left"), ("chip", "left"), ("devices", "right"), ("axes", "left"), ("usable", "right"), ("", "fold")]
    )
    for spec in specs:
        mesh = spec.mesh()
        axes = with_axes(shape(mesh.shape), mesh.names)
        usable = format_bytes(mesh.limit_bytes)
        drawn.add_row(Text(spec.name, TITLE), spec.chip.name, str(spec.devices), axes, usable, spec.description)
    return drawn


def spec_blocks(spec: Spec, mesh: Mesh) -> list[RenderableType]:
    """The sections of `toast mesh show`, top to bottom."""
    shapes = ", ".join(map(shape, spec.mesh_shapes()))
    usable = spec.chip.memory_bytes - spec.chip.reserved_bytes
    memory = f"{format_bytes(mesh.limit_bytes)} a device for plans ({format_percent(spec.memory_fraction)} of "
    memory += f"{format_bytes(usable)} usable)"
    return [
        Text(spec.name, TITLE).append(f"  {spec.description}" if spec.description else "", ""),
        with_axes(f"{format_plural(mesh.devices, 'device')}, {shape(mesh.shape)}", mesh.names),
        Text(memory),
        Text("\nchip", TITLE).append(f"  {spec.chip.name}, figures of one device", LABEL),
        indented(_chip_table(spec)),
        Text("\ntopology", TITLE).append(
            "  physical dimensions, innermost first; bandwidth of a device, one way", LABEL
        ),
        indented(_dimension_table(spec, mesh)),
        Text("\naxes", TITLE).append(
            f"  and seconds for an array of {format_bytes(SAMPLE_BYTES)} on each device", LABEL
        ),
        indented(_axis_table(mesh)),
        Text("\nshapes", TITLE).append("  for --mesh-shape", LABEL),
        indented(with_axes(shapes, ("data", "model"))),
    ]


def _chip_table(spec: Spec) -> RenderableType:
    """Every figure of the chip, and of the wires it usually comes with, beside its source."""
    chip, profile = spec.chip, find_profile(spec.chip)
    attained, tile = profile.attained, profile.memory_tile
    rates = ", ".join(f"{dtype} {format_rate(rate, 'FLOP/s')}" for dtype, rate in chip.matrix_flops.items())
    kernels = f"matrix {attained.matrix:.0%}, vector {attained.vector:.0%}, memory {attained.memory:.0%}"
    kernels += f" ({attained.elementwise:.0%} without a product)" if attained.elementwise else ""
    rows = [
        ("matrix unit", "matrix_flops", rates),
        ("vector unit", "vector_flops", format_rate(chip.vector_flops, "FLOP/s")),
        ("matrix tile", "matrix_tile", f"{chip.matrix_tile[0]} × {chip.matrix_tile[1]}"),
        ("memory tile", "memory_tile", f"{tile[0]} × {tile[1]}"),
        ("memory", "memory_bytes", format_bytes(chip.memory_bytes)),
        ("reserved", "reserved_bytes", format_bytes(chip.reserved_bytes)),
        ("memory bandwidth", "memory_bytes_per_second", format_rate(chip.memory_bytes_per_second, "B/s")),
        ("host link", "host_bytes_per_second", format_rate(chip.host_bytes_per_second, "B/s")),
        ("products in a run", "sustained", f"{chip.sustained:.0%}"),
        ("of which kernels get", "attained", f"{kernels}, {format_seconds(attained.kernel_seconds)} a kernel"),
        ("temporaries", "temporary_growth", f"× {profile.temporary_growth:g}"),
    ]
    drawn = table([("", "left"), ("", "fold"), ("source", "fold")])
    for words, figure, value in rows:
        drawn.add_row(words, value, chip.sources.get(figure) or profile.sources.get(figure, ""))
    if spec.preset:
        for name, wire in spec.preset.wires.items():
            value = f"{format_rate(wire.bytes_per_second, 'B/s')}, {format_seconds(wire.latency_seconds)}"
            drawn.add_row(name, value, spec.preset.sources[name])
    return drawn


def _dimension_table(spec: Spec, mesh: Mesh) -> RenderableType:
    """The physical dimensions, drawn, and which axes run over them."""
    heads = [("", "left"), ("kind", "left"), ("", "left"), ("bandwidth", "right"), ("latency", "right")]
    drawn = table([*heads, ("axes", "fold")])
    for dimension in spec.dimensions:
        pieces = [
            axis.name if link.size == dimension.size else f"{axis.name} ({link.size} of it)"
            for axis in mesh.axes
            for link in axis.links
            if link.dimension == dimension.name
        ]
        # The number of devices, and a line `o─o─o`, a ring `─o─o─o─`, a switch `ooo` or a network `o·o`.
        joint = {"line": "─", "ring": "─", "switch": "", "network": "·"}[dimension.kind]
        count = min(dimension.size, MOST_DRAWN if not joint else MOST_DRAWN // 2)
        row = joint.join("o" * count) + ("…" if count < dimension.size else "")
        drawn.add_row(
            dimension.name,
            dimension.kind,
            f"{dimension.size:3} {f'─{row}─' if dimension.kind == 'ring' else row}",
            format_rate(dimension.bytes_per_second, "B/s"),
            format_seconds(dimension.latency_seconds),
            with_axes(", ".join(pieces), mesh.names),
        )
    return drawn


def _axis_table(mesh: Mesh) -> RenderableType:
    """Each axis with the links it runs over and the price of collectives on it; all axes together last."""
    drawn = table([("", "left"), ("size", "right"), ("over", "fold"), *((kind, "right") for kind in SAMPLE_KINDS)])
    groups = [(number,) for number in range(len(mesh.axes))]
    for axes in [*groups, tuple(range(len(mesh.axes)))] if len(groups) > 1 else groups:
        links = [link for axis in axes for link in mesh.axes[axis].links]
        over = "\n".join(_over(link) for link in links)
        size = prod(mesh.axes[axis].size for axis in axes)
        prices = (format_seconds(collective_seconds(mesh, kind, SAMPLE_BYTES, axes)) for kind in SAMPLE_KINDS)
        names = " × ".join(mesh.axes[axis].name for axis in axes)
        drawn.add_row(with_axes(names, mesh.names), str(size), over if len(axes) == 1 else "", *prices)
    return drawn


def _over(link: Link) -> str:
    """`x: ring of 4, 45 GB/s`, or for a switch or network, which is alone on its machine, `switch of 8, 300 GB/s`."""
    name = "" if link.dimension == link.kind else f"{link.dimension}: "
    return f"{name}{link.kind} of {link.size}, {format_rate(link.bytes_per_second, 'B/s')}"
