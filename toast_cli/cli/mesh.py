"""`toast mesh`: lists the built-in specifications, shows one in full, checks a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from toast_cli.hardware import Link, Mesh, Spec


mesh_app = typer.Typer(
    name="mesh",
    help="Mesh specifications: list the built-in ones, show one, check a file.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

OTHERS = "others by chip and number: v5p-512 (Google Cloud's name), h100:64 (in hosts of 8), 2xv5p-512 (two slices)"
# The array whose collectives `show` prices.
SAMPLE_BYTES = 64 * 2**20
SAMPLE_KINDS = ("all-reduce", "all-gather", "all-to-all")
# Devices of one dimension that are drawn one by one.
MOST_DRAWN = 16


@mesh_app.command("list")
def list_specs() -> None:
    """List the built-in specifications, usable by name.

    Others are made from a chip and a number: v5p-512, h100:64 (64 GPUs in hosts of 8), 2xv5p-512 (two slices).
    """
    from toast_cli.hardware import available_specs, load_spec

    _print(_spec_table([load_spec(name) for name in available_specs()]), OTHERS)


@mesh_app.command("show")
def show_spec(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A name from `toast mesh list`, a chip and its number, or a YAML file."),
    ],
    mesh_shape: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="Mesh axes to use instead, e.g. data=4,model=4.")
    ] = None,
) -> None:
    """Show a specification in full.

    Chip figures with their sources, topology, axes and what collectives cost on them.
    """
    from toast_cli.hardware import load_spec, parse_shape

    spec = load_spec(name)
    mesh = spec.mesh(parse_shape(mesh_shape) if mesh_shape else None)
    _print(*_show(spec, mesh))


@mesh_app.command("validate")
def validate_spec(file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file.")]) -> None:
    """Check a specification.

    Errors name the line and what is allowed there; the exit code is then 2.
    """
    from toast_cli.errors import SpecError
    from toast_cli.hardware import load_spec
    from toast_cli.program.quantities import format_plural

    if not file.exists():
        raise SpecError("no such file", where=str(file), hint="`toast mesh show NAME` shows a built-in specification")
    spec = load_spec(str(file))
    mesh = spec.mesh()
    chosen = "" if spec.axes else " (chosen by the tool)"
    typer.echo(f"{file}: valid: {format_plural(mesh.devices, 'device')} ({spec.chip.name}), {mesh}{chosen}")


def _print(*renderables: RenderableType) -> None:
    from toast_cli.report.style import make_console, render

    sys.stdout.write(render(renderables, make_console(sys.stdout)))


def _spec_table(specs: list[Spec]) -> RenderableType:
    """One row a specification."""
    from rich.text import Text

    from toast_cli.program.quantities import format_bytes
    from toast_cli.report.style import TITLE, table, with_axes

    drawn = table(
        [("name", "left"), ("chip", "left"), ("devices", "right"), ("axes", "left"), ("usable", "right"), ("", "fold")]
    )
    for spec in specs:
        mesh = spec.mesh()
        axes = with_axes(_shape(mesh.names, mesh.sizes), mesh.names)
        usable = format_bytes(mesh.limit_bytes)
        drawn.add_row(Text(spec.name, TITLE), spec.chip.name, str(spec.devices), axes, usable, spec.description)
    return drawn


def _show(spec: Spec, mesh: Mesh) -> list[RenderableType]:
    """The sections of `toast mesh show`, top to bottom."""
    from rich.text import Text

    from toast_cli.program.quantities import format_bytes, format_percent, format_plural
    from toast_cli.report.style import LABEL, TITLE, indented, with_axes

    shapes = ", ".join(_shape(tuple(shape), tuple(shape.values())) for shape in spec.mesh_shapes())
    usable = spec.chip.memory_bytes - spec.chip.reserved_bytes
    memory = f"{format_bytes(mesh.limit_bytes)} a device for plans ({format_percent(spec.memory_fraction)} of "
    memory += f"{format_bytes(usable)} usable)"
    return [
        Text(spec.name, TITLE).append(f"  {spec.description}" if spec.description else "", ""),
        with_axes(f"{format_plural(mesh.devices, 'device')}, {_shape(mesh.names, mesh.sizes)}", mesh.names),
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
    from toast_cli.base.units import format_rate
    from toast_cli.price.profiles import find_profile
    from toast_cli.program.quantities import format_bytes, format_seconds
    from toast_cli.report.style import table

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
    from toast_cli.base.units import format_rate
    from toast_cli.program.quantities import format_seconds
    from toast_cli.report.style import table, with_axes

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
    from math import prod

    from toast_cli.price.collectives import collective_seconds
    from toast_cli.program.quantities import format_seconds
    from toast_cli.report.style import table, with_axes

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
    from toast_cli.base.units import format_rate

    name = "" if link.dimension == link.kind else f"{link.dimension}: "
    return f"{name}{link.kind} of {link.size}, {format_rate(link.bytes_per_second, 'B/s')}"


def _shape(names: tuple[str, ...], sizes: tuple[int, ...]) -> str:
    return " × ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
