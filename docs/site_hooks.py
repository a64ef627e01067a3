"""For mkdocs: adds the page reference/options.md, every command and option as `--help` explains them today."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PAGE = "reference/options.md"
HEAD = """# Commands and options

What `--help` prints behind each command, made from the program when this site is built.

Colour is off where output is not a terminal and with `NO_COLOR`; `COLUMNS` sets the width of reports. `toast
--install-completion` adds completion to bash, zsh or fish. [Exit codes](exit-codes.md) are the same for all commands.
"""


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=options_page()))
    return files


def options_page() -> str:
    """Every command with its options. Options that work as in `toast partition` are named and not explained again."""
    import typer

    from toast_cli.cli.app import app

    toast = typer.main.get_command(app)
    partition = {_names(p): _explained(p) for p in getattr(toast, "commands", {})["partition"].params}
    return "\n\n".join([HEAD.rstrip(), *_sections(toast, "toast", partition)]) + "\n"


def _sections(command: Any, name: str, partition: dict[str, str]) -> Iterator[str]:
    """A command's section, then those of its subcommands."""
    listed = getattr(command, "commands", {})
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([name, "COMMAND"] if listed else [name, *(_names(p).strip("`") for p in arguments), "[OPTIONS]"])
    yield f"## {name}\n\n```text\n{usage}\n```\n\n{_plain(command.help)}"
    if listed:
        rows = [f"| `{name} {word}` | {_plain(under.help).splitlines()[0]} |" for word, under in listed.items()]
        yield "\n".join(["| command | does |", "|---|---|", *rows])
    known = {} if name == "toast partition" else partition
    own = [p for p in command.params if known.get(_names(p)) != _explained(p)]
    if own:
        rows = [f"| {_names(p)} | {_explained(p)} |" for p in own]
        yield "\n".join(["| option | meaning |", "|---|---|", *rows])
    if shared := [f"`{p.opts[-1]}`" for p in command.params if p not in [*own, *arguments] and p.name != "help"]:
        yield f"As in `toast partition`: {', '.join(shared)}."
    for word, under in listed.items():
        yield from _sections(under, f"{name} {word}", partition)


def _names(parameter: Any) -> str:
    """`--mesh SPEC`, or the name of an argument."""
    if parameter.param_type_name == "argument":
        return f"`{(parameter.metavar or parameter.name.upper()).strip('[].')}{'...' if parameter.nargs < 0 else ''}`"
    value = (parameter.metavar or "").replace("|", "\\|")
    return f"`{' '.join([', '.join((*parameter.opts, *parameter.secondary_opts)), *([value] if value else [])])}`"


def _explained(parameter: Any) -> str:
    """The help text, with the default value."""
    default = getattr(parameter.default, "value", parameter.default)
    notes = [f"env var: {parameter.envvar}"] if parameter.envvar else []
    notes += [f"default: {default}"] if isinstance(default, str | int) and not isinstance(default, bool) else []
    notes += ["required"] if parameter.required else []
    return " ".join([_plain(parameter.help), *([f"[{'; '.join(notes)}]"] if notes else [])])


def _plain(text: str | None) -> str:
    """Help text as one Markdown paragraph for each of its own."""
    escaped = re.sub(r"([*|<])", r"\\\1", (text or "").strip())
    return "\n\n".join(" ".join(part.split()) for part in escaped.split("\n\n"))
