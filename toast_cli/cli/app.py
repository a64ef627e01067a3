"""The `toast` command: its subcommands put together, run, and their exceptions turned into exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from toast_cli.cli.check import check
from toast_cli.cli.compare import compare
from toast_cli.cli.diff import diff
from toast_cli.cli.explain import explain
from toast_cli.cli.inspect import inspect
from toast_cli.cli.mesh import mesh_app
from toast_cli.cli.partition import partition
from toast_cli.cli.running import BAD_INPUT, debug_wanted, guarded, say
from toast_cli.cli.sweep import sweep
from toast_cli.cli.tactics import tactics
from toast_cli.cli.verify import verify

# Plain help: without rich it starts at once and reads the same in a pipe.
app = typer.Typer(
    name="toast",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command(short_help="Find how to shard a program and write it with its shardings.")(partition)
app.command(short_help="Check that the plan for a program stays within limits.")(check)
app.command(short_help="Plan programs for many meshes and settings, in one table.")(sweep)
app.command(short_help="Check with XLA that a sharded program does what its report says.")(verify)
app.command(short_help="Compare known strategies with the plan that the search finds.")(compare)
app.command(short_help="Explain why a plan is as it is and what each decision saves.")(explain)
app.command(short_help="Show what a program is made of, before anything is planned.")(inspect)
app.command(short_help="Show what changed from one report to another.")(diff)
app.command(short_help="List the known ways to shard, and which apply to a program.")(tactics)
app.add_typer(mesh_app, name="mesh", short_help="List, show or check descriptions of hardware.")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Compiling for a mesh needs none of its devices, and a program must not claim the accelerators of this machine.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # XLA says which devices it finds
    for stream in (sys.stdout, sys.stderr):
        # Names in a program may hold characters that the terminal's encoding lacks.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    code = guarded(lambda: _invoke(given), debug=debug_wanted(given))
    _warn_of_versions(given)
    return code


def _warn_of_versions(arguments: Sequence[str]) -> None:
    """Warns, if a command has used jaxlib, that the installed version is not one that toast is tested with."""
    if "toast_cli.xla" not in sys.modules or not {"-q", "--quiet"}.isdisjoint(arguments):
        return
    from toast_cli.xla import untested_here

    warning = untested_here()
    if warning:
        say("warning", warning)


def _invoke(arguments: list[str]) -> object:
    """Runs the command and returns its result. Exceptions pass through; the parser's own main would turn some into
    exits."""
    if "_TOAST_COMPLETE" in os.environ:  # a shell asks for completions
        return app(arguments, prog_name="toast")
    command = typer.main.get_command(app)
    if not arguments:  # versions of the option parser differ in the exit code
        typer.echo(command.get_help(command.make_context("toast", [], resilient_parsing=True)), err=True)
        return BAD_INPUT
    with command.make_context("toast", arguments) as context:
        return command.invoke(context)


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    from toast_cli import __version__

    typer.echo(f"toast {__version__}")
    try:
        typer.echo(f"jaxlib {version('jaxlib')}")
        from toast_cli.xla import stablehlo_version

        typer.echo(f"StableHLO {stablehlo_version()}")
    except (PackageNotFoundError, ImportError):
        typer.echo("jaxlib not installed")
    raise typer.Exit


@app.callback()
def toast(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the versions of toast, jaxlib and StableHLO."
        ),
    ] = False,
) -> None:
    """Decide how to shard a large StableHLO or HLO program over a mesh of accelerators."""
