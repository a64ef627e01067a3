"""The commands of toast with their options, read from the option parser itself."""

from __future__ import annotations

from functools import cache


@cache
def commands() -> list[tuple[tuple[str, ...], dict[str, bool], int]]:
    """(words of the command, its options with whether each is a flag, how many positional arguments it takes)."""
    import typer

    from toast_cli.cli.app import app

    found: list[tuple[tuple[str, ...], dict[str, bool], int]] = []

    def visit(command: object, words: tuple[str, ...]) -> None:
        children = getattr(command, "commands", None)
        if children:
            for name, child in children.items():
                visit(child, (*words, name))
            return
        options: dict[str, bool] = {}
        positional = 0
        for parameter in command.params:  # type: ignore[attr-defined]
            names = [name for name in parameter.opts if name.startswith("-")]
            if names:
                options |= {name: bool(getattr(parameter, "is_flag", False)) for name in names}
            else:
                positional += 1
        found.append((words, options, positional))

    visit(typer.main.get_command(app), ())
    return found
