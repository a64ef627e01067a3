"""For mkdocs: adds the page cli.md, every command's `--help` as the program prints it today."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer

WIDTH = 80  # what a page has room for


def cli_page() -> str:
    from toast_cli.cli.app import app

    return "# Command line\n\n" + "\n\n".join(_sections(typer.main.get_command(app), "toast"))


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    files.append(File.generated(config, "cli.md", content=cli_page()))
    return files


def _sections(command: Any, name: str) -> list[str]:
    context = command.make_context(name, [], resilient_parsing=True, max_content_width=WIDTH, terminal_width=WIDTH)
    found = [f"## {name}\n\n```\n{command.get_help(context).rstrip()}\n```"]
    for part, under in getattr(command, "commands", {}).items():
        found += _sections(under, f"{name} {part}")
    return found
