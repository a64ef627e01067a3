"""`toast mesh`: lists the built-in specifications, shows one in full, checks a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toast_cli.cli.running import show

mesh_app = typer.Typer(
    name="mesh",
    help="Mesh specifications: list the built-in ones, show one, check a file.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

OTHERS = "others by chip and number: v5p-512 (Google Cloud's name), h100:64 (in hosts of 8), 2xv5p-512 (two slices)"


@mesh_app.command("list")
def list_specs() -> None:
    """List the built-in specifications, usable by name.

    Others are made from a chip and a number: v5p-512, h100:64 (64 GPUs in hosts of 8), 2xv5p-512 (two slices).
    """
    from toast_cli.hardware import available_specs, load_spec
    from toast_cli.report.mesh_tables import spec_table

    show(lambda _: [spec_table([load_spec(name) for name in available_specs()]), OTHERS])


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
    from toast_cli.report.mesh_tables import spec_blocks

    spec = load_spec(name)
    mesh = spec.mesh(parse_shape(mesh_shape) if mesh_shape else None)
    show(lambda _: spec_blocks(spec, mesh))


@mesh_app.command("validate")
def validate_spec(file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file.")]) -> None:
    """Check a specification.

    Errors name the line and what is allowed there; the exit code is then 2.
    """
    from toast_cli.base.errors import SpecError
    from toast_cli.hardware import load_spec
    from toast_cli.program.quantities import format_plural

    if not file.exists():
        raise SpecError("no such file", where=str(file), hint="`toast mesh show NAME` shows a built-in specification")
    spec = load_spec(str(file))
    mesh = spec.mesh()
    chosen = "" if spec.axes else " (chosen by the tool)"
    typer.echo(f"{file}: valid: {format_plural(mesh.devices, 'device')} ({spec.chip.name}), {mesh}{chosen}")
