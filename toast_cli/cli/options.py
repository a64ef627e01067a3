"""Options that several commands share, as `toast_cli.request` declares them, and values of the command line as numbers
and choices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import typer

from toast_cli.base.errors import UsageError
from toast_cli.base.files import Format as Format
from toast_cli.request import DEFAULTS, OPTIONS, OptionKind, one_of
from toast_cli.request import make_request as make_request

Command = TypeVar("Command", bound=Callable[..., int])


def complete_spec(incomplete: str) -> list[str]:
    """Shell completions: built-in specifications with this prefix; the shell itself knows files."""
    from toast_cli.hardware import available_specs

    return [name for name in available_specs() if name.startswith(incomplete)]


def file(text: str, *flags: str) -> Any:
    """An option that names a file. text: its help."""
    return typer.Option(*flags, metavar="FILE", help=text)


def words(kind: type[StrEnum], flag: str, text: str) -> Any:
    """An option that takes one of several words."""
    return typer.Option(flag, parser=one_of(kind, flag), metavar=metavar(kind), help=text)


def spec(text: str) -> Any:
    """`--mesh`."""
    return typer.Option("--mesh", metavar="SPEC", autocompletion=complete_spec, help=text)


Program = Annotated[
    str, typer.Argument(metavar="PROGRAM", help="StableHLO or HLO program, also .gz or .zst; - reads it from stdin.")
]
MeshSpec = Annotated[
    str,
    spec(
        "Hardware: a name from `toast mesh list`, a chip and its number (v5p-512, h100:64, 2xv5p-512), or a YAML file."
    ),
]


# Fields of `Request` whose options most commands have, in the order of their help.
SEARCH = ("effort", "budget_seconds", "iterations")
PLANNING = (
    "mesh_shape", "dims", "prices", *SEARCH, "seed", "memory_limit", "keep_shardings", "as_written", "pins", "runs",
    "tactics", "minimise", "subject_to",
)  # fmt: skip
REWRITING = ("fit", "microbatches", "recompute", "offload")
CONFIRMING = ("confirm", "confirm_with", "confirm_seconds")


def with_options(*names: str, before: str, **defaults: str) -> Callable[[Command], Command]:
    """Gives a command the options of these fields of `Request`, in front of its parameter `before`. The command gets
    their values as keyword arguments, by their keys with underscores.

    defaults: other defaults than `Request`'s.
    """

    def wrap(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        place = [parameter.name for parameter in own].index(before)
        parameters = [
            *own[:place],
            *(_parameter(name, defaults.get(name, DEFAULTS[name])) for name in names),
            *own[place:],
        ]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return wrap


def _parameter(name: str, default: Any) -> inspect.Parameter:
    """The parameter of a command for an option of a run; `make_request` reads its text."""
    option = OPTIONS[name]
    type_: Any = bool if option.kind is OptionKind.FLAG else list[str] if option.kind is OptionKind.TEXTS else str
    if default is None or option.kind is OptionKind.TEXTS:
        type_, default = type_ | None, None
    elif type_ is str:
        default = str(default)
    declared = typer.Option(
        *((option.flag, option.also) if option.also else (option.flag,)),
        metavar=metavar(option.kind) if isinstance(option.kind, type) else option.metavar or None,
        envvar="TOAST_CONFIRM" if option.kind is OptionKind.PLANS else None,
        help=option.help,
    )
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(option.key.replace("-", "_"), kind, default=default, annotation=Annotated[type_, declared])


Quiet = Annotated[bool, typer.Option("--quiet", help="Print one line instead of the report.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="List everything, and show a traceback if toast itself fails.")
]


def refuse_both(quiet: bool, verbose: bool) -> None:
    if quiet and verbose:
        raise UsageError("both --quiet and --verbose are given", hint="choose one")


# ---------------------------------------------------------------- values
# Parses values of the command line that are no options of a run.


class CheckFormat(StrEnum):
    text = "text"
    json = "json"
    junit = "junit"
    github = "github"


class BestBy(StrEnum):
    step_time = "step_time"
    tokens = "tokens"
    price = "price"
    peak_memory = "peak_memory"
    communication = "communication"
    device_time = "device_time"


class Annotate(StrEnum):
    minimal = "minimal"
    full = "full"
    arguments = "arguments"


def metavar(kind: type[StrEnum]) -> str:
    return f"<{'|'.join(member.value for member in kind)}>"


def parse_fraction(text: str, option: str) -> float:
    """`5%` or `0.05` -> 0.05."""
    hint = "write e.g. 5% or 0.05"
    stripped = text.strip()
    percent = stripped.endswith("%")
    try:
        number = float(stripped.removesuffix("%"))
    except ValueError:
        raise UsageError(f'"{text}" is not a percentage', where=option, hint=hint) from None
    fraction = number / 100 if percent else number
    if not 0 <= fraction < float("inf"):
        raise UsageError(f'"{text}" is not a percentage of zero or more', where=option, hint=hint)
    if not percent and fraction > 1:
        raise UsageError(f'"{text}" would be {100 * fraction:g}%', where=option, hint=f"write {text}% if you mean that")
    return fraction
